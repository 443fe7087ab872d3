"""The cost model: how long an iteration of a Plan takes on a cluster, and how much memory it needs there.

The costs of the Plan's stages, messages and gradient syncs go to the simulator; the papers' closed forms take the same
costs. Ranks fill the cluster's devices in order; the Plan's placement says what each of them plays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from auto3d.cluster import Accelerator, Cluster, Link
from auto3d.cost.closed_forms import amp_s, chimera_s
from auto3d.cost.collectives import ring_s, tree_s
from auto3d.cost.placed import PlacedTraffic
from auto3d.cost.stage_bytes import NO_BYTES, StageBytes, message_bytes
from auto3d.cost.tables import WorkTables, without
from auto3d.cost.times import Times, before, times_of
from auto3d.cost.work import PRECISION_BYTES, Work
from auto3d.plan import Plan, StagePlan
from auto3d.schedule.shape import Shape, shape_of
from auto3d.simulate.costs import Costs, MessageCost, SharedMachine
from auto3d.simulate.simulate import simulate

MOMENTS = {"adamw": 2, "sgd": 1}  # that the optimizer keeps of each parameter
FRAGMENTATION = 1.06  # what an allocator holds beyond what is used

SecondsOf = Callable[[Shape, Costs], float]  # the simulator, or a closed form
TimesOf = Callable[[int, Accelerator, int], Times]  # by samples, kind of device and tensor-parallel degree


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the plans are trained that are to be estimated; the defaults are what this project's runtime does."""

    precision: str = "float32"  # of weights and activations; below 32 bits the optimizer keeps a copy in 32
    sync_bytes: int = 4  # of each element in the gradient all-reduce
    optimizer: str = "adamw"
    overlap: bool = True  # messages travel beside compute
    recompute_ends: bool = True  # full recomputation takes in what surrounds the repeated blocks

    @property
    def master_bytes(self) -> int:
        return 4 if PRECISION_BYTES[self.precision] < 4 else 0

    @property
    def update_traffic(self) -> int:
        """Bytes that an update reads and writes of each parameter."""
        weights = self.master_bytes or 4
        return self.sync_bytes + 2 * weights + 8 * MOMENTS[self.optimizer] + (self.master_bytes and 2)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of an iteration, what they consist of on the way that decides, and bytes on each pipeline device."""

    seconds: float
    compute_s: float  # of the busiest device, with what it recomputes
    tensor_s: float  # tensor-parallel collectives that compute does not hide; so the next two
    message_s: float
    sync_s: float
    update_s: float
    bubble_s: float  # that devices wait for each other
    memory: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What a partition balances: seconds of one micro-batch, forward, backward and what is recomputed.

    ``before`` is by cut, on the fastest kind of device of the pipeline; so is ``messages``, of a message there and back
    on its slowest link. ``speeds`` are those of the stages' devices beside the fastest.
    """

    before: tuple[float, ...]
    messages: tuple[float, ...]
    speeds: tuple[float, ...]


class CostModel:
    """Estimates Plans of one model on ``cluster``; ``work_at`` gives its Work at a number of samples.

    ``method`` is one of ``METHODS``: how the time of an iteration follows from the costs of its operations.
    ``measured_in`` names the profile that these costs come from, empty where they come from data sheets.
    """

    def __init__(
        self,
        cluster: Cluster,
        training: Training,
        work_at: Callable[[int], Work],
        *,
        times_at: TimesOf | None = None,
        method: str = "simulated",
        measured_in: str = "",
    ) -> None:
        self.cluster = cluster
        self.training = training
        self.method, self.measured_in = method, measured_in
        self._work_at, self._times_at = lru_cache(None)(work_at), times_at
        self._work = lru_cache(None)(lambda samples: WorkTables(self._work_at(samples)))
        self._times = lru_cache(None)(
            times_at or (lambda samples, accelerator, tp: times_of(self._work_at(samples), accelerator, tp))
        )
        self._handles_messages = any(any(node.handling) for node in cluster.nodes)
        self._shares_processors = any(node.slowdown for node in cluster.nodes)
        self._traffic = lru_cache(1024)(self._make_traffic)
        self._collectives = lru_cache(None)(self._make_collectives)
        self._parts = lru_cache(1024)(self._make_parts)
        self._seconds = lru_cache(2**16)(self._make_seconds)  # plans of a search have stages in common
        self._stage_bytes = lru_cache(2**16)(self._make_stage_bytes)

    def on(self, cluster: Cluster) -> "CostModel":
        """Of the same model and training on another cluster."""
        same = {"times_at": self._times_at, "method": self.method, "measured_in": self.measured_in}
        return CostModel(cluster, self.training, self._work_at, **same)

    def seconds(self, plan: Plan) -> float:
        """Predicted seconds of an iteration, by the model's method."""
        return self.slowest_replica_s(plan, METHODS[self.method])

    def closed_form_s(self, plan: Plan, form: SecondsOf = amp_s) -> float:
        """Of an iteration, by a paper's closed form on our costs; AMP's is exact for 1F1B on equal stages."""
        return self.slowest_replica_s(plan, form)

    def estimate(self, plan: Plan) -> Estimate:
        """The same seconds, with what they consist of."""
        seconds_of = METHODS[self.method]
        shape = shape_of(plan)
        traffic = self._traffic_of(plan)
        replica = max(traffic.different, key=lambda replica: seconds_of(shape, self.costs(plan, replica)))
        costs = self.costs(plan, replica)
        whole = seconds_of(shape, costs)
        none = (0.0,) * shape.stages
        without_sync = seconds_of(shape, replace(costs, sync=none))
        silent = replace(costs, sync=none, messages=(MessageCost(),) * (shape.stages - 1))
        without_messages = seconds_of(shape, silent)
        alone = replace(self.costs(plan, replica, collectives=False), sync=none, messages=silent.messages)
        without_tensor = seconds_of(shape, alone)
        compute, update = _busiest(shape, alone)
        return Estimate(
            seconds=whole + traffic.iteration_s,
            compute_s=compute,
            tensor_s=without_messages - without_tensor,
            message_s=without_sync - without_messages,
            sync_s=whole - without_sync,
            update_s=update + traffic.iteration_s,
            bubble_s=without_tensor - compute - update,
            memory=self.memory(plan),
        )

    # Costs of a plan

    def costs(self, plan: Plan, replica: int = 0, *, collectives: bool = True) -> Costs:
        """What the simulator takes, of one replica of the pipeline.

        Without ``collectives``, tensor-parallel ranks reduce for free.
        """
        shape = shape_of(plan)
        samples, parts = plan.micro_batch_size // shape.parts, shape.parts
        homes = shape.homes
        traffic = self._traffic_of(plan)
        forward, backward, weight, recompute, update = [], [], [], [], []
        for number, stage in enumerate(plan.stages):
            accelerator = traffic.accelerator(homes[number], replica)
            each, division = self._share(samples, stage.replicas)
            link = traffic.tensor[homes[number][0], replica] if plan.tp > 1 and collectives else None
            whole = self._seconds(each, accelerator, plan.tp, link, stage.operations)
            forward.append(parts * (whole[0] / division + accelerator.micro_batch_s))
            backward.append(parts * whole[1] / division)
            weight.append(parts * min(whole[2], whole[1]) / division)
            again = 0.0
            if number in shape.recompute:
                dropped = without(stage.operations, self._kept(each, stage))
                again = self._seconds(each, accelerator, plan.tp, link, dropped)[0] if dropped else 0.0
            recompute.append(parts * again / division)
            update.append(
                self._update_s(plan, stage, accelerator, plan.placement[homes[number][0]][:: plan.tp], traffic)
            )
        for boundary in range(len(plan.stages) - 1) if self._handles_messages else ():
            handling = self._handling_s(plan, shape, boundary, replica)
            for number in (boundary, boundary + 1):
                forward[number] += handling
                backward[number] += handling
        return Costs(
            forward=tuple(forward),
            backward=tuple(backward),
            backward_input=tuple(whole - half for whole, half in zip(backward, weight, strict=True)),
            backward_weight=tuple(weight),
            recompute=tuple(recompute),
            sync=self._syncs(plan, traffic),
            update=tuple(update),
            messages=tuple(
                self._message(plan, shape, boundary, replica, traffic) for boundary in range(len(plan.stages) - 1)
            ),
            speed=(1.0,) * shape.devices,
            overlap=self.training.overlap,
            shared_machines=self._sharing(plan) if self._shares_processors else (),
        )

    def _sharing(self, plan: Plan) -> tuple[SharedMachine, ...]:
        """What the plan's processes share on each node where they share something."""
        found = []
        for number in sorted({self.cluster.node_of[rank] for ranks in plan.placement for rank in ranks}):
            if slowdown := self.cluster.nodes[number].slowdown:
                here = [sum(self.cluster.node_of[rank] == number for rank in ranks) for ranks in plan.placement]
                found.append(SharedMachine(slowdown=slowdown, processes=tuple(here)))
        return tuple(found)

    def _share(self, samples: int, replicas: int) -> tuple[int, int]:
        """At what number of samples to look up what one of ``replicas`` of a stage does, and what to divide that by.

        Where the model has other operations at the replica's share, as it can at a single sample, positions do not mean
        the same: then it is an equal part of what is done at all samples.
        """
        share = samples // replicas
        same = replicas == 1 or len(self._work(share).work) == len(self._work(samples).work)
        return (share, 1) if same else (samples, replicas)

    def pipeline(self, plan: Plan, cuts: Sequence[int], *, replicas: int = 1) -> "Pipeline":
        """What a pipeline of ``plan``'s degrees, placement and schedule takes wherever it is cut, if its stages, which
        do not matter, have so many ``replicas``."""
        shape, traffic = shape_of(plan), self._traffic_of(plan)
        samples, division = self._share(plan.micro_batch_size // shape.parts, replicas)
        hardware = []
        for homes in shape.homes:
            keys = [(home, replica) for home in homes for replica in range(plan.dp)]
            link = min((traffic.tensor[key] for key in keys), key=lambda link: link.bandwidth) if plan.tp > 1 else None
            hardware.append((self.cluster.slowest(rank for key in keys for rank in traffic.ranks(*key)), link))
        recompute = bool(shape.recompute)
        parts = {
            key: self._parts(samples, key[0], plan.tp, key[1], tuple(cuts), recompute)
            for key in dict.fromkeys(hardware)
        }
        fastest = min(parts.values(), key=lambda seconds: float(seconds.sum()))
        crossing = self._work(samples).work.crossing[list(cuts)]
        links = [
            traffic.messages.link((traffic.ranks(here[0], replica)[0], traffic.ranks(there[0], replica)[0]))
            for here, there in pairwise(shape.homes)
            for replica in traffic.different
            if here[0] != there[0]
        ]
        slowest = min(links, key=lambda link: link.bandwidth, default=Link(latency_s=0.0, bandwidth=1.0))
        messages = np.where(crossing > 0, 2 * (slowest.latency_s + crossing / plan.tp / slowest.bandwidth), 0.0)
        return Pipeline(
            before=tuple(before(shape.parts * fastest / division)),
            messages=tuple(shape.parts * messages if links else 0 * messages),
            speeds=tuple(float(fastest.sum() / parts[key].sum()) for key in hardware),
        )

    def _make_parts(
        self, samples: int, accelerator: Accelerator, tp: int, link: Link | None, cuts: tuple[int, ...], recompute: bool
    ) -> np.ndarray:
        """Seconds of one micro-batch forward and backward between neighbouring ``cuts``."""
        places = list(cuts)
        times = np.diff(self._times(samples, accelerator, tp).table[:, places])
        reduced = np.zeros((2, len(cuts) - 1))
        if link is not None:
            reduced = np.diff(self._collectives(samples, tp, link)[:, places])
        forward, backward = np.maximum(times[0] + reduced[0], times[1]), np.maximum(times[2] + reduced[1], times[3])
        return forward * (2 if recompute else 1) + backward

    def _make_seconds(
        self,
        samples: int,
        accelerator: Accelerator,
        tp: int,
        link: Link | None,
        operations: tuple[tuple[int, int], ...],
    ) -> tuple[float, float, float]:
        """Forward, backward, and of that the half for the weights, of one micro-batch."""
        times = self._times(samples, accelerator, tp)
        total = sum(times.range(first, last) for first, last in operations)
        reduced = np.zeros(2)
        if link is not None:
            table = self._collectives(samples, tp, link)
            reduced = sum(table[:, last] - table[:, first] for first, last in operations)
        forward = max(total[0] + reduced[0], total[1])
        backward = max(total[2] + reduced[1], total[3])
        return float(forward), float(backward), float(total[4])

    def _make_collectives(self, samples: int, tp: int, link: Link) -> np.ndarray:
        """[2, operations + 1]: seconds of all all-reduces before each operation, forward and backward."""
        work = self._work(samples).work

        def seconds(sizes: np.ndarray) -> np.ndarray:
            each = [min(ring_s(tp, size, link), tree_s(tp, size, link)) if size else 0.0 for size in sizes]
            return before(each)

        return np.stack([seconds(work.reduced), seconds(work.backward_reduced)])

    def _kept(self, samples: int, stage: StagePlan) -> tuple[tuple[int, int], ...]:
        if self.training.recompute_ends or stage.kept:
            return stage.kept
        blocks = self._work(samples).blocks
        return tuple(
            (max(first, start), min(last, stop))
            for first, last in stage.operations
            for start, stop in ((0, blocks[0]), (blocks[1], len(self._work(samples).work)))
            if max(first, start) < min(last, stop)
        )

    def _update_s(
        self, plan: Plan, stage: StagePlan, accelerator: Accelerator, group: tuple[int, ...], traffic: PlacedTraffic
    ) -> float:
        """Of the parameters, or where the ranks of ``group`` share them, of a share and until they have the others'."""
        elements = self._elements(plan, stage.operations)
        each = accelerator.update_s
        if each is None:
            each = self.training.update_traffic / (accelerator.memory_bandwidth * accelerator.memory_efficiency)
        if not plan.shard_optimizer:
            return elements * each
        size = elements * PRECISION_BYTES[self.training.precision]
        return elements / len(group) * each + traffic.sync.all_reduce_s(group, size) / 2

    def _elements(self, plan: Plan, operations: tuple[tuple[int, int], ...]) -> float:
        """Parameters that a rank which runs ``operations`` trains, tied ones once."""
        return self._work(plan.micro_batch_size).parameters(operations, plan.tp)

    def _syncs(self, plan: Plan, traffic: PlacedTraffic) -> tuple[float, ...]:
        tables = self._work(plan.micro_batch_size)
        found = []
        for number, stage in enumerate(plan.stages):
            group = traffic.replicas[number]
            size = self._elements(plan, stage.operations) * self.training.sync_bytes
            found.append(traffic.sync.all_reduce_s(group, size))
        for elements, stages in tables.shared(plan.stages, plan.tp):
            # A tied parameter is reduced over all stages that hold it, after each has reduced its own.
            found[stages[-1]] += traffic.tied_s(tuple(stages), elements * self.training.sync_bytes)
        return tuple(found)

    def _message(self, plan: Plan, shape: Shape, boundary: int, replica: int, traffic: PlacedTraffic) -> MessageCost:
        source, target = (shape.device_of[stage, 0] for stage in (boundary, boundary + 1))
        if source == target:
            return MessageCost()
        size = (
            shape.parts
            * self._work(plan.micro_batch_size // shape.parts).work.crossing[plan.stages[boundary].operations[-1][1]]
        )
        # Each tensor-parallel rank sends its part, and they gather it on the other side (Narayanan et al. 2021, 4.1).
        link = traffic.messages.link((traffic.ranks(source, replica)[0], traffic.ranks(target, replica)[0]))
        seconds = size / plan.tp / link.bandwidth
        if plan.tp > 1:
            seconds += ring_s(plan.tp, size, traffic.tensor[target, replica]) / 2
        return MessageCost(latency=link.latency_s, forward=seconds, backward=seconds)

    def _traffic_of(self, plan: Plan) -> PlacedTraffic:
        return self._traffic(plan.placement, plan.tp, plan.dp, shape_of(plan).homes)

    def _handling_s(self, plan: Plan, shape: Shape, boundary: int, replica: int) -> float:
        """What a message takes of the compute of either side."""
        source, target = (shape.device_of[stage, 0] for stage in (boundary, boundary + 1))
        nodes = {self.cluster.node_of[self._traffic_of(plan).ranks(device, replica)[0]] for device in (source, target)}
        if source == target or len(nodes) > 1:
            return 0.0
        each, per_byte = self.cluster.nodes[min(nodes)].handling
        samples = plan.micro_batch_size // shape.parts
        size = self._work(samples).work.crossing[plan.stages[boundary].operations[-1][1]]
        return shape.parts * (each + size / plan.tp * per_byte)

    def _make_traffic(
        self, placement: tuple[tuple[int, ...], ...], tp: int, dp: int, homes: tuple[tuple[int, ...], ...]
    ) -> PlacedTraffic:
        return PlacedTraffic(self.cluster, placement, tp, dp, homes)

    def slowest_replica_s(self, plan: Plan, seconds_of: SecondsOf) -> float:
        """Of an iteration, by ``seconds_of`` for the replica of the pipeline that takes longest."""
        shape, traffic = shape_of(plan), self._traffic_of(plan)
        replicas = (seconds_of(shape, self.costs(plan, replica)) for replica in traffic.different)
        return traffic.iteration_s + max(replicas)

    # Memory

    def memory(self, plan: Plan) -> tuple[float, ...]:
        """Bytes on each pipeline device at its fullest: what ``auto3d.cost.memory`` counts, and fragments.

        That module reads a plan's bytes off the Graph, tensor by tensor; this one sums tables, thousands of times a
        second, for other precisions, tensor parallelism and measured layers too.
        """
        shape, stages = shape_of(plan), dict(enumerate(plan.stages))
        return tuple(self._device_memory(plan, shape, device, stages) for device in range(len(shape.holdings)))

    def stage_memory(self, plan: Plan, number: int, stage: StagePlan) -> dict[int, float]:
        """Pipeline device -> bytes of ``stage`` alone, for each device that holds it as stage ``number`` of ``plan``.

        A device with one stage needs exactly these bytes. A device with several needs at most the sum of theirs.
        """
        shape = shape_of(plan)
        homes = dict.fromkeys(shape.homes[number])
        return {device: self._device_memory(plan, shape, device, {number: stage}) for device in homes}

    def _device_memory(self, plan: Plan, shape: Shape, device: int, stages: Mapping[int, StagePlan]) -> float:
        """Bytes on ``device`` of those stages of its own that ``stages`` has, by their numbers."""
        weight = PRECISION_BYTES[self.training.precision]
        optimizer = self.training.master_bytes + 4 * MOMENTS[self.training.optimizer]
        samples = plan.micro_batch_size // shape.parts
        holding = shape.holdings[device]
        own = [number for number in holding.stages if number in stages]
        bytes_of = {
            number: self._stage_bytes(samples, stages[number], plan.tp, number in shape.recompute) for number in own
        }
        elements = self._elements(plan, tuple(span for number in own for span in stages[number].operations))
        shards = plan.dp * stages[own[0]].replicas if plan.shard_optimizer else 1
        state = elements * (weight + self.training.sync_bytes + optimizer / shards)
        for number, versions in zip(holding.stages, holding.versions, strict=True):
            if versions > 1 and number in stages:
                state += (versions - 1) * weight * self._elements(plan, stages[number].operations)
        activations = max(
            sum(
                bytes_of[number].of(load)
                for number, load in zip(holding.stages, moment, strict=True)
                if number in stages
            )
            for moment in holding.peaks
        )
        fixed, working = sum(one.fixed for one in bytes_of.values()), max(one.working for one in bytes_of.values())
        messages = message_bytes(shape, [bytes_of.get(number, NO_BYTES) for number in range(shape.stages)], device)
        return FRAGMENTATION * (state + fixed + activations + working + messages)

    def _make_stage_bytes(self, samples: int, stage: StagePlan, tp: int, recompute: bool) -> StageBytes:
        samples, division = self._share(samples, stage.replicas)
        tables = self._work(samples)
        received = tables.work.crossing[stage.operations[0][0]] / division
        saved = active = tables.saved(stage.operations, tp) / division
        if recompute:
            dropped = without(stage.operations, self._kept(samples, stage))
            active = saved - tables.saved(dropped, tp) / division
        again = saved - active
        if not self.training.recompute_ends:  # one block after the other
            again /= max(1, tables.blocks_of(stage.operations))
        return StageBytes(
            in_flight=active + received,
            recomputed=again,
            deferred=tables.deferred(stage.operations, tp) / division,
            fixed=tables.fixed(stage.operations, tp),
            working=tables.working(stage.operations, tp) / division,
            received=received,
            sent=tables.work.crossing[stage.operations[-1][1]] / division,
        )


def _busiest(shape: Shape, costs: Costs) -> tuple[float, float]:
    """Seconds of compute and of updates on the device that has most of both."""
    timeline = simulate(shape.schedule(), costs)
    best = (0.0, 0.0)
    for device in range(shape.devices):
        spent = [0.0, 0.0]
        for number in timeline.numbers(device):
            operation = timeline.operations[number]
            spent[operation.kind.name == "UPDATE"] += timeline.end[number] - timeline.start[number]
        best = max(best, tuple(spent), key=sum)
    return best


def _simulated(shape: Shape, costs: Costs) -> float:
    schedule = shape.schedule()
    return simulate(schedule, costs).makespan / schedule.iterations


METHODS: dict[str, SecondsOf] = {"simulated": _simulated, "amp": amp_s, "chimera": chimera_s}
