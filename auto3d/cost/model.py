"""The cost model: how long an iteration of a Plan takes on a cluster, and how much memory it needs there.

The costs of the Plan's stages, messages and gradient syncs go to the simulator; the papers' closed forms take the same
costs. Ranks fill the cluster's devices in order, and the Plan's placement gives each rank its position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from auto3d.cluster import Accelerator, Cluster, Link
from auto3d.cost.closed_forms import amp_s
from auto3d.cost.collectives import TRAFFIC, GroupLink, Traffic
from auto3d.cost.estimate import METHODS, Estimate, SecondsOf, busiest
from auto3d.cost.memory.device import DeviceMemory, HeldTensor
from auto3d.cost.memory.plan import PlanMemory
from auto3d.cost.memory.stage import StageMemory
from auto3d.cost.model_work import ModelWork
from auto3d.cost.placed import PlacedTraffic
from auto3d.cost.stage_messages import StageMessages
from auto3d.cost.stage_times import StageTimes
from auto3d.cost.tables import without
from auto3d.cost.throughput import IterationFlops, iteration_flops
from auto3d.cost.times import Times, TimesOf, TimesOfWork, before, times_of
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.updates import accumulation_s, syncs_s, update_s
from auto3d.cost.work import Work, WorkAt
from auto3d.plan import SUB_PIPELINED, Plan, PlanError, StagePlan
from auto3d.schedule.shape import shape_of
from auto3d.simulate.costs import Costs, MessageCost, SharedMachine
from auto3d.simulate.memory_timeline import BytesOverTime
from auto3d.simulate.simulate import Timeline, simulate


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """The times that a partition balances: seconds of one micro-batch's forward, backward and recomputation.

    ``before[c]`` is the time before cut c on the fastest kind of device of the pipeline. ``messages[c]`` is the time of
    a message through cut c and back on the slowest link. ``speeds[s]`` is the speed of the devices of stage s relative
    to the fastest kind.
    """

    before: tuple[float, ...]
    messages: tuple[float, ...]
    speeds: tuple[float, ...]


class CostModel:
    """Estimates Plans of one model on ``cluster``; ``work_at`` makes the Work of one rank at a number of samples.

    ``method`` is a key of ``METHODS``: how the time of an iteration follows from the costs of its operations.
    ``measured_in`` names the profile behind ``times_at``; it is empty where times come from the figures of the cluster.
    ``times_of_work`` gives the same profile's times of a work that ``work_at`` does not know, such as that of an
    interpolated Graph.
    """

    def __init__(
        self,
        cluster: Cluster,
        training: TrainingOptions,
        work_at: WorkAt,
        *,
        times_at: TimesOf | None = None,
        times_of_work: TimesOfWork | None = None,
        method: str = "simulated",
        measured_in: str = "",
    ) -> None:
        self.cluster = cluster
        self.training = training
        self.method, self.measured_in = method, measured_in
        self._work_at, self._times_at = work_at, times_at
        self._times_of_work = times_of_work
        self._work = ModelWork(work_at, training)
        self._memory = PlanMemory(self._work, training)
        self._stage_times = StageTimes(self._work, times_at)
        self._messages = StageMessages(cluster, self._work, training)
        self._has_handling = any(any(node.handling) for node in cluster.nodes)
        self._has_slowdown = any(node.slowdown for node in cluster.nodes)
        self._traffic = lru_cache(1024)(self._make_traffic)

    def on(self, cluster: Cluster) -> "CostModel":
        """The cost model of the same model and training on another cluster."""
        return self._changed(cluster, self.method)

    def by(self, method: str) -> "CostModel":
        """The cost model of the same model, training and cluster by another key of ``METHODS``."""
        return self._changed(self.cluster, method)

    def _changed(self, cluster: Cluster, method: str) -> "CostModel":
        return CostModel(
            cluster,
            self.training,
            self._work_at,
            times_at=self._times_at,
            times_of_work=self._times_of_work,
            method=method,
            measured_in=self.measured_in,
        )

    def seconds(self, plan: Plan) -> float:
        """Predicted seconds of an iteration, by the model's method."""
        return self.slowest_pipeline_s(plan, METHODS[self.method])

    def closed_form_s(self, plan: Plan, form: SecondsOf = amp_s) -> float:
        """Seconds of an iteration by a paper's closed form on our costs; AMP's is exact for 1F1B on equal stages."""
        return self.slowest_pipeline_s(plan, form)

    def memory(self, plan: Plan) -> tuple[float, ...]:
        """Peak bytes of tensors on each pipeline device."""
        return self._memory.of(plan)

    def memory_one_by_one(self, plan: Plan) -> Iterator[float]:
        """``memory(plan)``, each device's when it is asked for."""
        return self._memory.one_by_one(plan)

    def memory_witness(self, plan: Plan) -> tuple[DeviceMemory, ...]:
        """``memory(plan)`` with the operation at which each device reaches its peak, and what it holds there."""
        return self._memory.devices(plan)

    def largest_tensors(self, plan: Plan, device: int, count: int | None = 10) -> tuple[HeldTensor, ...]:
        """The largest tensors that pipeline device ``device`` holds at its peak, largest first; None: all of them."""
        return self._memory.largest(plan, device, count)

    def flops(self, plan: Plan) -> IterationFlops:
        """FLOPs of an iteration of the whole model, with what the plan recomputes."""
        samples = plan.micro_batch_size // shape_of(plan).parts
        work = self._work.work_at(samples)
        return iteration_flops(
            plan, work.flops.tolist(), work.backward_flops.tolist(), kept=lambda stage: self._work.kept(samples, stage)
        )

    def stage_memory(self, plan: Plan, number: int, stage: StagePlan) -> dict[int, float]:
        """Pipeline device -> peak bytes of ``stage`` alone, for each device that holds stage ``number`` of ``plan``.

        A device with one stage needs exactly these bytes. A device with several needs at most the sum of theirs.
        """
        return self._memory.of_stage(plan, number, stage)

    def memory_beside_activations(self, plan: Plan) -> tuple[float, ...]:
        """Per pipeline device, the peak of the bytes of ``memory(plan)`` that are no activations."""
        return self._memory.beside_activations(plan)

    def stage_if(self, plan: Plan, number: int, *, recompute: bool, split: bool) -> StageMemory:
        """The bytes of a micro-batch on stage ``number`` of ``plan`` if it recomputes, or splits its backward."""
        return self._memory.stage_if(plan, number, recompute=recompute, split=split)

    def estimate(self, plan: Plan) -> Estimate:
        """``seconds(plan)`` and ``memory(plan)``, with the components of the seconds."""
        seconds_of = METHODS[self.method]
        shape = shape_of(plan)
        traffic = self._traffic_of(plan)
        pipeline = max(traffic.distinct_pipelines, key=lambda pipeline: seconds_of(shape, self.costs(plan, pipeline)))
        costs = self.costs(plan, pipeline)
        whole = seconds_of(shape, costs)
        none = (0.0,) * shape.stages
        without_sync = seconds_of(shape, replace(costs, sync=none))
        silent = replace(costs, sync=none, messages=(MessageCost(),) * (shape.stages - 1))
        without_messages = seconds_of(shape, silent)
        without_collectives = replace(
            self.costs(plan, pipeline, collectives=False), sync=none, messages=silent.messages
        )
        without_tensor = seconds_of(shape, without_collectives)
        compute, update = busiest(shape, without_collectives)
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

    def timeline(self, plan: Plan) -> Timeline:
        """The simulation of the pipeline of ``plan`` that takes longest, whatever the model's method."""
        schedule, pipelines = shape_of(plan).schedule(), self._traffic_of(plan).distinct_pipelines
        timelines = (simulate(schedule, self.costs(plan, pipeline)) for pipeline in pipelines)
        return max(timelines, key=lambda timeline: timeline.makespan)

    def memory_over_time(self, plan: Plan, timeline: Timeline, devices: Sequence[int]) -> list[BytesOverTime]:
        """Bytes on each of ``devices`` over ``timeline(plan)``; their largest values are those of ``memory(plan)``."""
        return self._memory.over_time(plan, timeline, devices)

    def slowest_pipeline_s(self, plan: Plan, seconds_of: SecondsOf) -> float:
        """Seconds of an iteration by ``seconds_of``, for the pipeline that takes longest."""
        shape, traffic = shape_of(plan), self._traffic_of(plan)
        pipelines = (seconds_of(shape, self.costs(plan, pipeline)) for pipeline in traffic.distinct_pipelines)
        return traffic.iteration_s + max(pipelines)

    def costs(self, plan: Plan, pipeline: int = 0, *, collectives: bool = True) -> Costs:
        """The costs of one of the plan's dp pipelines, as the simulator takes them.

        Without ``collectives``, those of tensor parallelism take no time.
        """
        shape = shape_of(plan)
        samples, parts = plan.micro_batch_size // shape.parts, shape.parts
        homes = shape.homes
        traffic = self._traffic_of(plan)
        degree, halved = (plan.tp, plan.sequence_parallel), plan.tp > 1 and plan.tensor_overlap == SUB_PIPELINED
        forward, backward, weight, recompute, update = [], [], [], [], []
        exposed: list[tuple[float, float, float]] = []  # by stage: forward, backward, recomputation
        for number, stage in enumerate(plan.stages):
            accelerator = traffic.accelerator(homes[number], pipeline)
            if traffic.crosses:
                accelerator = accelerator.crossing()
            if halved and samples // stage.replicas % 2:
                raise PlanError(
                    f"tensor_overlap: {SUB_PIPELINED} halves each micro-batch, and a stage runs "
                    f"{samples // stage.replicas} samples of it at once; use a micro_batch_size that makes them even"
                )
            each, divisor = self._work.slice_of(samples, 2 * stage.replicas if halved else stage.replicas)
            link = traffic.tensor[homes[number][0], pipeline] if plan.tp > 1 and collectives else None
            whole = self._stage_times.seconds(each, accelerator, degree, link, stage.operations, halved)
            accumulated = accumulation_s(self._work, self.training, plan, stage, accelerator)
            forward.append(parts * (whole[0] / divisor + accelerator.micro_batch_s))
            backward.append(parts * (whole[1] / divisor + accumulated))
            weight.append(parts * (min(whole[2], whole[1]) / divisor + accumulated))
            again = 0.0
            if number in shape.recompute:
                dropped = without(stage.operations, self._work.kept(each, stage))
                if dropped:
                    again = self._stage_times.seconds(each, accelerator, degree, link, dropped, halved)[0]
            recompute.append(parts * again / divisor)
            if link is not None:
                alone = self._stage_times.seconds(each, accelerator, degree, None, stage.operations, halved)
                again_alone = 0.0
                if again:
                    again_alone = self._stage_times.seconds(each, accelerator, degree, None, dropped, halved)[0]
                computing = (*alone[:2], again_alone)
                hidden = zip((*whole[:2], again), computing, strict=True)
                shown = [parts * (total - compute) / divisor for total, compute in hidden]
                exposed.append((shown[0], shown[1], shown[2]))
            group = plan.placement[homes[number][0]][:: plan.tp]
            update.append(
                update_s(self._work, self.training, plan, stage, accelerator=accelerator, group=group, traffic=traffic)
            )
        for boundary in range(len(plan.stages) - 1) if self._has_handling else ():
            handling = self._messages.handling_s(plan, shape, boundary, pipeline, traffic)
            for number in (boundary, boundary + 1):
                forward[number] += handling
                backward[number] += handling
        return Costs(
            forward=tuple(forward),
            backward=tuple(backward),
            backward_input=tuple(whole - half for whole, half in zip(backward, weight, strict=True)),
            backward_weight=tuple(weight),
            recompute=tuple(recompute),
            sync=syncs_s(self._work, self.training, plan, traffic, backward),
            update=tuple(update),
            messages=tuple(
                self._messages.cost(plan, shape, boundary, pipeline, traffic)
                for boundary in range(len(plan.stages) - 1)
            ),
            speed=(1.0,) * shape.devices,
            overlap=self.training.overlap,
            shared_machines=self._sharing(plan) if self._has_slowdown else (),
            exposed_forward=tuple(each[0] for each in exposed),
            exposed_backward=tuple(each[1] for each in exposed),
            exposed_recompute=tuple(each[2] for each in exposed),
        )

    def pipeline_times(self, plan: Plan, cuts: Sequence[int], *, replicas: int = 1) -> PipelineTimes:
        """The times of a pipeline with the degrees, placement and schedule of ``plan`` at any of ``cuts``.

        The stages of ``plan`` do not matter; each stage is taken to have ``replicas`` replicas.
        """
        shape, traffic = shape_of(plan), self._traffic_of(plan)
        samples, divisor = self._work.slice_of(plan.micro_batch_size // shape.parts, replicas)
        hardware = []
        for homes in shape.homes:
            keys = [(home, pipeline) for home in homes for pipeline in range(plan.dp)]
            link = min((traffic.tensor[key] for key in keys), key=_bandwidth) if plan.tp > 1 else None
            hardware.append((self.cluster.slowest(rank for key in keys for rank in traffic.ranks(*key)), link))
        recompute = bool(shape.recompute)
        seconds = {
            key: self._stage_times.between_cuts(
                samples, key[0], (plan.tp, plan.sequence_parallel), key[1], tuple(cuts), recompute
            )
            for key in dict.fromkeys(hardware)
        }
        fastest = min(seconds.values(), key=lambda each: float(each.sum()))
        sent, _ = self._messages.crossing(plan, samples, list(cuts))
        links = [
            traffic.messages.link((traffic.ranks(here[0], pipeline)[0], traffic.ranks(there[0], pipeline)[0]))
            for here, there in pairwise(shape.homes)
            for pipeline in traffic.distinct_pipelines
            if here[0] != there[0]
        ]
        slowest = min(links, key=lambda link: link.bandwidth, default=Link(latency_s=0.0, bandwidth=1.0))
        messages = np.where(sent > 0, 2 * (slowest.latency_s + sent / slowest.bandwidth), 0.0)
        return PipelineTimes(
            before=tuple(before(shape.parts * fastest / divisor)),
            messages=tuple(shape.parts * messages if links else 0 * messages),
            speeds=tuple(float(fastest.sum() / seconds[key].sum()) for key in hardware),
        )

    def times_of_work(self, work: Work, cuts: Sequence[int], samples: int, accelerator: Accelerator) -> Times:
        """The seconds of ``work`` on one device: measured where the model has a profile, else estimated.

        ``work`` is the whole model's at ``samples``, and ``cuts`` bounds its subgraphs.
        """
        if self._times_of_work is None:
            return times_of(work, accelerator)
        return self._times_of_work(work, cuts, samples, accelerator)

    def _sharing(self, plan: Plan) -> tuple[SharedMachine, ...]:
        """How the plan's processes slow each other down, for each node where they do."""
        sharing = []
        for number in sorted({self.cluster.node_of[rank] for ranks in plan.placement for rank in ranks}):
            if slowdown := self.cluster.nodes[number].slowdown:
                here = [sum(self.cluster.node_of[rank] == number for rank in ranks) for ranks in plan.placement]
                sharing.append(SharedMachine(slowdown=slowdown, processes=tuple(here)))
        return tuple(sharing)

    def _traffic_of(self, plan: Plan) -> PlacedTraffic:
        return self._traffic(plan.placement, plan.tp, plan.dp, shape_of(plan).homes)

    def _make_traffic(
        self, placement: tuple[tuple[int, ...], ...], tp: int, dp: int, homes: tuple[tuple[int, ...], ...]
    ) -> PlacedTraffic:
        return PlacedTraffic(self.cluster, placement, tp, dp, homes, TRAFFIC.get(self.method, Traffic))


def _bandwidth(link: GroupLink) -> float:
    return link.link.bandwidth
