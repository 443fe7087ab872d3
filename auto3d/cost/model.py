"""The cost model: how long an iteration of a Plan takes on a cluster, and how much memory it needs there.

The costs of the Plan's stages, messages and gradient syncs go to the simulator; the papers' closed forms take the same
costs. Ranks fill the cluster's devices in order, and the Plan's placement gives each rank its position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from auto3d.cluster import Accelerator, Cluster, Link
from auto3d.cost.collectives import TRAFFIC, Group, GroupLink, Traffic
from auto3d.cost.estimate import METHODS, Estimate, SecondsOf, busiest
from auto3d.cost.memory.plan import PlanMemory
from auto3d.cost.memory.workspaces import with_workspaces
from auto3d.cost.model_work import ModelWork
from auto3d.cost.placed import PlacedTraffic
from auto3d.cost.stage_messages import StageMessages
from auto3d.cost.stage_times import StageTimes
from auto3d.cost.throughput import IterationFlops, iteration_flops
from auto3d.cost.times import Times, TimesOf, TimesOfWork, before, times_of
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.updates import accumulation_s, syncs_s, update_s
from auto3d.cost.work import Work, WorkAt
from auto3d.mesh import Mesh
from auto3d.partition.request import StageSeconds
from auto3d.plan import SUB_PIPELINED, Plan, PlanError, StagePlan
from auto3d.schedule.shape import shape_of, shares_of
from auto3d.share import Share, share_of
from auto3d.simulate.costs import Costs, MessageCost, SharedMachine
from auto3d.simulate.simulate import Timeline, simulate

Kept = Sequence[float | None]
"""Per stage, the fraction of its forward that it does not recompute; None: it recomputes nothing."""


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """The times that a partition balances: seconds of one micro-batch's forward, backward and recomputation.

    ``before[s][c]`` is the time before cut c, recomputed as on stage s, on the fastest kind of device of the pipeline;
    stages that recompute alike have one object. ``messages[c]`` is the time of a message through cut c and back on the
    slowest link. ``speeds[s]`` is the speed of the devices of stage s relative to the fastest kind.
    """

    before: tuple[tuple[float, ...], ...]
    messages: tuple[float, ...]
    speeds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of the operations of a stage that do one share of the work on a micro-batch."""

    forward: float
    backward: float
    weight: float  # the part of ``backward`` that computes gradients of weights
    recompute: float
    exposed: tuple[float, ...]
    """Seconds in which collectives are exposed in the forward, the backward and the recomputation; empty: none."""


@dataclass(frozen=True, kw_only=True)
class WholeBytes:
    """Bytes of a whole model and one of its micro-batches on one device."""

    weights: float  # weights and gradients
    optimizer: float
    activations: float  # activations that autograd keeps of a micro-batch
    message: float  # largest message between two stages


class CostModel:
    """Estimates Plans of one model on ``cluster``; ``work_at`` makes the Work of a share of a number of samples.

    ``method`` is a key of ``METHODS``: how the time of an iteration follows from the costs of its operations.
    ``measured_in`` names the profile behind ``times_at``; it is empty where times come from the figures of the cluster.
    ``times_of_work`` gives the same profile's times of a work that ``work_at`` does not know, such as the work of
    an interpolated Graph. ``stage_seconds`` has the times of RaNNC's candidate stages that it ran whole.
    """

    def __init__(
        self,
        cluster: Cluster,
        training: TrainingOptions,
        work_at: WorkAt,
        *,
        times_at: TimesOf | None = None,
        times_of_work: TimesOfWork | None = None,
        stage_seconds: StageSeconds | None = None,
        method: str = "simulated",
        measured_in: str = "",
    ) -> None:
        self.cluster = cluster
        self.training = training
        self.method, self.measured_in = method, measured_in
        self._work_at, self._times_at = work_at, times_at
        self._times_of_work = times_of_work
        self.stage_seconds = stage_seconds
        self._work = ModelWork(work_at, training)
        self.memory = PlanMemory(self._work, with_workspaces(training, cluster))
        self._stage_times = StageTimes(self._work, times_at, hides_collectives=training.times.hides_collectives)
        self._messages = StageMessages(cluster, self._work, training)
        self._has_handling = any(any(node.handling) for node in cluster.nodes)
        self._has_slowdown = any(node.slowdown for node in cluster.nodes)
        self._traffic = lru_cache(256)(self._make_traffic)
        self._pass_times = lru_cache(2**14)(self._find_pass_times)  # the plans of a search have many stages in common

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
            stage_seconds=self.stage_seconds,
            method=method,
            measured_in=self.measured_in,
        )

    def seconds(self, plan: Plan) -> float:
        """Predicted seconds of an iteration, by the model's method."""
        return self.slowest_pipeline_s(plan, METHODS[self.method])

    def flops(self, plan: Plan) -> IterationFlops:
        """FLOPs of an iteration of the whole model, with what the plan recomputes."""
        samples = plan.micro_batch_size // shape_of(plan).sample_parts
        work = self._work.work_at(samples)
        return iteration_flops(
            plan, work.flops.tolist(), work.backward_flops.tolist(), kept=lambda stage: self._work.kept(samples, stage)
        )

    def estimate(self, plan: Plan) -> Estimate:
        """``seconds(plan)`` and ``memory.of(plan)``, with the components of the seconds."""
        seconds_of = METHODS[self.method]
        shape = shape_of(plan)
        traffic = self._traffic_of(plan)
        pipeline = max(traffic.distinct_pipelines, key=lambda pipeline: seconds_of(shape, self.costs(plan, pipeline)))
        costs = self.costs(plan, pipeline)
        whole = seconds_of(shape, costs)
        none = (0.0,) * shape.stages
        without_sync = seconds_of(shape, replace(costs, sync=none))
        silence: dict[str, Any] = {"sync": none, "messages": (MessageCost(),) * (shape.stages - 1), "inputs": ()}
        without_messages = seconds_of(shape, replace(costs, **silence))
        without_collectives = replace(self.costs(plan, pipeline, collectives=False), **silence)
        without_tensor = seconds_of(shape, without_collectives)
        compute, update = busiest(shape, without_collectives)
        of_device, _ = busiest(shape, replace(self.costs(plan, pipeline, collectives=False, host=False), **silence))
        waits = max(0.0, compute - of_device)
        return Estimate(
            seconds=whole + traffic.iteration_s,
            compute_s=compute - waits,
            host_s=waits,
            tensor_s=without_messages - without_tensor,
            message_s=without_sync - without_messages,
            sync_s=whole - without_sync,
            update_s=update + traffic.iteration_s,
            bubble_s=without_tensor - compute - update,
            memory=self.memory.of(plan),
        )

    def timeline(self, plan: Plan) -> Timeline:
        """The simulation of the pipeline of ``plan`` that takes longest, whatever the model's method."""
        schedule, pipelines = shape_of(plan).schedule(), self._traffic_of(plan).distinct_pipelines
        timelines = (simulate(schedule, self.costs(plan, pipeline)) for pipeline in pipelines)
        return max(timelines, key=lambda timeline: timeline.makespan)

    def slowest_pipeline_s(self, plan: Plan, seconds_of: SecondsOf) -> float:
        """Seconds of an iteration by ``seconds_of``, for the pipeline that takes longest."""
        shape, (iteration_s, pipelines) = shape_of(plan), self.pipelines(plan)
        return iteration_s + max(seconds_of(shape, costs) for costs in pipelines)

    def pipelines(self, plan: Plan) -> tuple[float, tuple[Costs, ...]]:
        """The fixed seconds of an iteration, and the costs of each kind of pipeline: all that its time depends on
        beside the operations."""
        traffic = self._traffic_of(plan)
        return traffic.iteration_s, tuple(self.costs(plan, pipeline) for pipeline in traffic.distinct_pipelines)

    def costs(self, plan: Plan, pipeline: int = 0, *, collectives: bool = True, host: bool = True) -> Costs:
        """The costs of one of the plan's dp pipelines, as the simulator takes them.

        Without ``collectives``, the collectives of tensor parallelism take no time; without ``host``, nothing waits for
        the host.
        """
        shape, shares = shape_of(plan), shares_of(plan)
        traffic = self._traffic_of(plan)
        halved = plan.tp > 1 and plan.tensor_overlap == SUB_PIPELINED
        sizes = plan.micro_batch_size, shape.sample_parts, halved, share_of(plan)
        passes: list[list[PassTimes]] = []  # by stage and share
        update = []
        for number, stage in enumerate(plan.stages):
            home = shape.homes[number]
            accelerator = traffic.accelerator(home, pipeline)
            if traffic.crosses:
                accelerator = accelerator.crossing()
            if not host:
                accelerator = accelerator.without_host()
            link = traffic.tensor[home[0], pipeline] if plan.tp > 1 and collectives else None
            recompute = number in shape.recompute
            passes.append([self._pass_times(stage, recompute, share, accelerator, link, *sizes) for share in shares])
            update.append(
                update_s(
                    self._work,
                    self.training,
                    plan,
                    number,
                    accelerator=accelerator,
                    traffic=traffic,
                    forward=sum(times.forward for times in passes[-1]),
                )
            )
        forward = [[times.forward for times in of_stage] for of_stage in passes]
        backward = [[times.backward for times in of_stage] for of_stage in passes]
        again = [[times.recompute for times in of_stage] for of_stage in passes]
        for boundary in range(len(plan.stages) - 1) if self._has_handling else ():
            handling = self._messages.handling_s(plan, shape, boundary, pipeline, traffic) / len(shares)
            for number in (boundary, boundary + 1):
                forward[number] = [time + handling for time in forward[number]]
                backward[number] = [time + handling for time in backward[number]]
        if self._has_handling:
            of_inputs = self._messages.input_handling_s(plan, shape, pipeline, traffic)
            for number, handling in enumerate((sum(of_inputs), *of_inputs[1:])):
                forward[number] = [time + handling for time in forward[number]] if handling else forward[number]
        kinds = [traffic.accelerator((device,), pipeline) for device in range(shape.devices)]
        whole = tuple(map(sum, backward))
        weight = tuple(sum(times.weight for times in of_stage) for of_stage in passes)
        exposed = [tuple(map(sum, zip(*(times.exposed for times in of_stage), strict=True))) for of_stage in passes]
        return Costs(
            forward=tuple(map(sum, forward)),
            backward=whole,
            backward_input=tuple(both - half for both, half in zip(whole, weight, strict=True)),
            backward_weight=weight,
            recompute=tuple(map(sum, again)),
            sync=syncs_s(self._work, self.training, plan, traffic, whole),
            update=tuple(update),
            messages=tuple(
                self._messages.cost(plan, shape, boundary, pipeline, traffic)
                for boundary in range(len(plan.stages) - 1)
            ),
            inputs=self._messages.inputs_s(plan, shape, pipeline, traffic),
            speed=(1.0,) * shape.devices,
            overlap=self.training.overlap,
            shared_machines=self._sharing(plan) if self._has_slowdown else (),
            sync_start=tuple(kind.sync_start_s for kind in kinds),
            sync_slowdown=tuple(kind.sync_slowdown for kind in kinds),
            exposed_forward=tuple(seconds[0] for seconds in exposed if seconds),
            exposed_backward=tuple(seconds[1] for seconds in exposed if seconds),
            exposed_recompute=tuple(seconds[2] for seconds in exposed if seconds),
            forward_of_slice=tuple(map(tuple, forward)) if shape.slices > 1 else (),
            backward_of_slice=tuple(map(tuple, backward)) if shape.slices > 1 else (),
            recompute_of_slice=tuple(map(tuple, again)) if shape.slices > 1 else (),
        )

    def _find_pass_times(
        self,
        stage: StagePlan,
        recompute: bool,
        share: Share,
        accelerator: Accelerator,
        link: GroupLink | None,
        micro_batch_size: int,
        parts: int,
        halved: bool,
        share_of_rank: Share,
    ) -> PassTimes:
        """The times of ``share`` of ``stage`` in micro-batches of that size, whose samples run in ``parts``.

        Without ``link``, collectives take no time. If passes are ``halved``, two halves of a micro-batch take turns.
        """
        samples = micro_batch_size // parts
        if halved and samples // stage.replicas % 2:
            raise PlanError(
                f"tensor_overlap: {SUB_PIPELINED} halves each micro-batch, and a stage runs "
                f"{samples // stage.replicas} samples of it at once; use a micro_batch_size that makes them even"
            )
        count, divisor = self._work.slice_of(samples, 2 * stage.replicas if halved else stage.replicas)
        dropped = self._work.dropped(count, stage, recompute=recompute)

        def seconds(link: GroupLink | None) -> tuple[float, float, float, float]:
            whole = self._stage_times.seconds(count, accelerator, share, link, stage.operations, halved)
            again = self._stage_times.seconds(count, accelerator, share, link, dropped, halved)[0] if dropped else 0.0
            return *whole, again

        forward, backward, weight, again = seconds(link)
        elements = self._work.tables(micro_batch_size, share_of_rank).parameters(stage.operations)
        accumulated = accumulation_s(self.training, elements, accelerator)
        exposed: tuple[float, ...] = ()
        if link is not None:
            forward_alone, backward_alone, _, again_alone = seconds(None)
            pairs = (forward, forward_alone), (backward, backward_alone), (again, again_alone)
            exposed = tuple(parts * (total - compute) / divisor for total, compute in pairs)
        return PassTimes(
            forward=parts * (forward / divisor + accelerator.micro_batch_s),
            backward=parts * (backward / divisor + accumulated),
            weight=parts * (min(weight, backward) / divisor + accumulated),
            recompute=parts * again / divisor,
            exposed=exposed,
        )

    def pipeline_times(self, plan: Plan, cuts: Sequence[int], *, kept: Kept = (), replicas: int = 1) -> PipelineTimes:
        """The times of a pipeline with the degrees, placement and schedule of ``plan`` at any of ``cuts``.

        The stages of ``plan`` do not matter. Each stage is taken to keep the fraction ``kept`` of its forward's seconds
        (default: nothing where the schedule recomputes), and to have ``replicas`` replicas.
        """
        shape, traffic = shape_of(plan), self._traffic_of(plan)
        samples, divisor = self._work.slice_of(plan.micro_batch_size // shape.sample_parts, replicas)
        hardware = []
        for homes in shape.homes:
            keys = [(home, pipeline) for home in homes for pipeline in range(plan.dp)]
            link = min((traffic.tensor[key] for key in keys), key=_bandwidth) if plan.tp > 1 else None
            hardware.append((self.cluster.slowest(rank for key in keys for rank in traffic.ranks(*key)), link))
        fractions = kept or [0.0 if number in shape.recompute else None for number in range(shape.stages)]
        seconds = {
            (key, fraction): np.sum(
                [
                    self._stage_times.between_cuts(samples, key[0], share, key[1], tuple(cuts), fraction)
                    for share in shares_of(plan)
                ],
                axis=0,
            )
            for fraction in dict.fromkeys(fractions)
            for key in dict.fromkeys(hardware)
        }
        fastest = {
            fraction: min((seconds[key, fraction] for key in hardware), key=lambda by_cut: float(by_cut.sum()))
            for fraction in dict.fromkeys(fractions)
        }
        times = {fraction: tuple(before(shape.sample_parts * by_cut / divisor)) for fraction, by_cut in fastest.items()}
        sent, _ = self._messages.crossing(plan, samples, list(cuts))
        links = [
            route.link
            for here, there in pairwise(shape.homes)
            for pipeline in traffic.distinct_pipelines
            if here[0] != there[0]
            for route in traffic.routes(here[0], there[0], pipeline)
        ]
        slowest = min(links, key=lambda link: link.bandwidth, default=Link(latency_s=0.0, bandwidth=1.0))
        messages = np.where(sent > 0, 2 * (slowest.latency_s + sent / slowest.bandwidth), 0.0)
        return PipelineTimes(
            before=tuple(times[fraction] for fraction in fractions),
            messages=tuple(shape.parts * messages if links else 0 * messages),
            speeds=tuple(
                float(fastest[fraction].sum() / seconds[key, fraction].sum())
                for key, fraction in zip(hardware, fractions, strict=True)
            ),
        )

    def times_of_work(self, work: Work, cuts: Sequence[int], samples: int, accelerator: Accelerator) -> Times:
        """The seconds of ``work`` on one device: measured where the model has a profile, else estimated.

        ``work`` is the whole model's at ``samples``, and ``cuts`` bounds its subgraphs.
        """
        if self._times_of_work is None:
            return times_of(work, accelerator)
        return self._times_of_work(work, cuts, samples, accelerator)

    def whole_pass_s(
        self, samples: int, share: Share, accelerator: Accelerator, link: GroupLink | None, *, halved: bool
    ) -> tuple[float, float, float]:
        """Seconds of the forward, the backward and the recomputation of a micro-batch of ``samples`` on one device that
        holds the whole model.

        No stages of the model take less together. The arguments are as in ``_pass_times``.
        """
        count, divisor = self._work.slice_of(samples, 2 if halved else 1)
        every = ((0, len(self._work.work_at(count, share))),)
        forward, backward, _ = self._stage_times.seconds(count, accelerator, share, link, every, halved)
        dropped = self._work.dropped(count, StagePlan(operations=every), recompute=True)
        again = self._stage_times.seconds(count, accelerator, share, link, dropped, halved)[0] if dropped else 0.0
        elements = self._work.tables(samples, share).parameters(every)
        accumulated = accumulation_s(self.training, elements, accelerator)
        return forward / divisor + accelerator.micro_batch_s, backward / divisor + accumulated, again / divisor

    def whole_bytes(self, samples: int, share: Share) -> WholeBytes:
        """What one device would hold if it had the whole model, for a micro-batch of ``samples``."""
        training, work = self.training, self._work.work_at(samples, share)
        elements = self._work.tables(samples, share).parameters(((0, len(work)),))
        moments = training.moments * elements
        if training.state_elements is not None:
            moments = sum(map(training.state_elements, work.tensors.parameters, work.tensors.shapes))
        return WholeBytes(
            weights=elements * (training.weight_bytes + training.sync_bytes),
            optimizer=4 * moments + training.master_bytes * elements,
            activations=float(work.saved.sum()),
            message=float(work.crossing.max()),
        )

    def group_links(self, groups: Sequence[Group]) -> tuple[GroupLink, ...]:
        """The different links of ``groups``, which communicate at the same time."""
        traffic = TRAFFIC.get(self.method, Traffic)(self.cluster, groups)
        return tuple(dict.fromkeys(map(traffic.group_link, groups)))

    def _sharing(self, plan: Plan) -> tuple[SharedMachine, ...]:
        """How the plan's processes slow each other down, for each node where they do."""
        sharing = []
        for number in sorted({self.cluster.node_of[rank] for mesh in plan.meshes for rank in mesh.ranks}):
            if slowdown := self.cluster.nodes[number].slowdown:
                here = [sum(self.cluster.node_of[rank] == number for rank in mesh.ranks) for mesh in plan.meshes]
                sharing.append(SharedMachine(slowdown=slowdown, processes=tuple(here)))
        return tuple(sharing)

    def _traffic_of(self, plan: Plan) -> PlacedTraffic:
        shape = shape_of(plan)
        return self._traffic(plan.meshes, shape.homes, shape.alternates)

    def _make_traffic(
        self, meshes: tuple[Mesh, ...], homes: tuple[tuple[int, ...], ...], alternates: bool
    ) -> PlacedTraffic:
        traffic = TRAFFIC.get(self.method, Traffic)
        return PlacedTraffic(self.cluster, meshes, homes, traffic, alternates=alternates)


def _bandwidth(link: GroupLink) -> float:
    return link.link.bandwidth
