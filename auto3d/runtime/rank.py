"""One rank of a plan, built in order: layout, programs, process groups, state, stages, optimizers, executor."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from auto3d.allocator import keep_freed_memory
from auto3d.capture.graph import Graph, Value
from auto3d.capture.model import CapturedModel
from auto3d.capture.shard import Shard
from auto3d.cost.memory.device import DeviceMemory
from auto3d.cost.memory.plan import PlanMemory
from auto3d.cost.model_work import ModelWork
from auto3d.cost.work import Work, work_of, work_of_local
from auto3d.data import BatchSlice, DataSettings, TrainingData
from auto3d.derived.local_graph import local_graphs
from auto3d.derived.model import Derived
from auto3d.plan import Plan
from auto3d.runtime.agreement import check_agreement, check_same_plan
from auto3d.runtime.backend import Backend, RealBackend, trained_parameters
from auto3d.runtime.checkpoint.state_part import StatePart
from auto3d.runtime.emulated.backend import EmulatedBackend
from auto3d.runtime.emulated.device_clock import DeviceClock
from auto3d.runtime.executor import Executor, Peers
from auto3d.runtime.layout import PlanLayout, RankLayout, lay_out_plan, lay_out_rank
from auto3d.runtime.loss_scale import LossScale
from auto3d.runtime.messages.exchange import Exchange
from auto3d.runtime.messages.gradient_sync import GradientSync
from auto3d.runtime.messages.tensor_group import ProcessTensorGroup
from auto3d.runtime.messages.totals import Totals
from auto3d.runtime.optimizer.build import Optimizers, build_optimizers, learning_rate_of
from auto3d.runtime.optimizer.classes import traits_of
from auto3d.runtime.optimizer.memory import memory_options
from auto3d.runtime.optimizer.stand_ins import AllParameters
from auto3d.runtime.optimizer.state import make_state, make_state_to_load, state_tensors
from auto3d.runtime.out_of_memory import MemoryWatch
from auto3d.runtime.process.arithmetic import cublas_workspaces
from auto3d.runtime.process.world import World, connect, new_group
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.replicas import capture_slices, rank_program
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.samples.batch_targets import BatchTargets, check_loss, check_statistics, targets_vary
from auto3d.runtime.samples.incomplete_batch import IncompleteBatches
from auto3d.runtime.samples.inputs import MicroBatchInputs
from auto3d.runtime.samples.neighbours import MOST_US, Neighbour, agrees, measured_us
from auto3d.runtime.samples.same_samples import Readers, SameSamples
from auto3d.runtime.samples.sizes import ShorterSamples, SizedStages, lay_out_sized
from auto3d.runtime.settings import SUMMED_ITEMS, TrainingSettings
from auto3d.runtime.stage.module import StageModule
from auto3d.runtime.waiting import waiting_up_to
from auto3d.runtime.watch.clock_offset import seconds_ahead
from auto3d.runtime.weights.shard import WeightShard
from auto3d.schedule import without_slices
from auto3d.schedule.check import check
from auto3d.schedule.lowering import lower
from auto3d.schedule.operation import Schedule
from auto3d.schedule.program import PipeStage, Program
from auto3d.schedule.shape import shares_of
from auto3d.share import WHOLE, Share

_CAUSE_OF_SEED = (
    "the model's initialisation does not follow from training.seed alone, but depends on the rank, the time or a "
    "generator of its own, such as numpy.random.default_rng(); seed it, or give model.weights"
)
_CAUSE_OF_FILE = "do all nodes read the same model.weights, with every buffer that the model draws at random?"

_EVALUATES = "evaluates"  # a number of checkpoints with the weights of evaluation of an optimizer that averages
COMPILE_TIMEOUT_S = 1800.0  # a rank compiles its stages in minutes


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank, built: its executor, the programs that make up the run, and the state that it trains."""

    common: PlanLayout
    layout: RankLayout
    device: torch.device
    run_ahead: RunAhead
    exchange: Exchange
    tensor_group: ProcessTensorGroup | None
    executor: Executor
    programs: tuple[Program, ...]  # run one after the other
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    optimizers: Mapping[PipeStage, Optimizers]
    slices: tuple[WeightShard, ...]  # this rank's slices of the weights, under ZeRO-1
    all_names: tuple[str, ...]
    """Names, as ``stored_as`` has them, of the parameters and buffers that any rank holds; none if devices are
    emulated."""
    shared: frozenset[str]  # parameters and buffers of which several ranks hold the same elements
    stored_as: Mapping[str, str]  # parameter or buffer -> its name, and which shard of it this rank holds
    shapes: Mapping[str, tuple[int, ...]]  # shape of each whole parameter and buffer
    shards: Mapping[str, Shard]  # this rank's shard of each that tensor parallelism splits
    predicted: DeviceMemory  # predicted bytes of this rank's pipeline device
    loss_scale: LossScale
    evaluations: dict[Hashable, Any] = field(default_factory=dict)
    """What evaluations of the rank have made so far, by what they compute; see evaluation/run.py."""

    def check_agreement(self, *, cause: str, device: torch.device) -> None:
        """Raise WeightsDifferError unless all ranks that hold a parameter or buffer hold the same bits of it.

        Every rank must call this. ``cause`` is the likely cause, which the error names.
        """
        if self.all_names:
            tensors = self.parameters | self.buffers
            shared = {self.stored_as[name]: tensors[name] for name in self.shared & tensors.keys()}
            check_agreement(shared, self.all_names, device=device, cause=cause)

    def state(self) -> dict[str, StatePart]:
        """Everything that training changes here, by name, except the learning rates and ``numbers``."""
        state = {f"model.{name}": self._part(name, tensor) for name, tensor in (self.parameters | self.buffers).items()}
        for optimizer, _ in self.updaters():
            for optimizer_tensor in state_tensors(optimizer, self.parameters, self.slices):
                if optimizer_tensor.per_element:
                    part = self._part(optimizer_tensor.parameter, optimizer_tensor.tensor, optimizer_tensor.flat)
                else:
                    part = StatePart(tensor=optimizer_tensor.tensor, shape=tuple(optimizer_tensor.tensor.shape))
                state[f"optimizer.{optimizer_tensor.parameter}.{optimizer_tensor.key}"] = part
        return state

    def _part(self, name: str, tensor: torch.Tensor, flat: tuple[int, int] | None = None) -> StatePart:
        """What this rank holds of a tensor that is held like the parameter or buffer ``name``, or a range of it."""
        return StatePart(
            tensor=tensor.detach(),
            shape=self.shapes[name],
            shard=self.shards.get(name),
            flat=flat,
            is_stored=name not in self.layout.captured.graph.written_buffers or self.layout.is_first_copy_of(name),
        )

    def updaters(self) -> Iterator[tuple[torch.optim.Optimizer, LRScheduler]]:
        """The optimizers of all stages, with their learning-rate schedules."""
        return chain.from_iterable(optimizers.values() for optimizers in self.optimizers.values())

    def make_state_to_load(self) -> None:
        """Allocate the state of all optimizers, whose tensors earlier state must replace."""
        for optimizer, _ in self.updaters():
            make_state_to_load(optimizer)

    def numbers(self) -> dict[str, float]:
        """Numbers that training changes, the same on all ranks; they are part of a checkpoint."""
        return self.loss_scale.numbers() | ({_EVALUATES: 1.0} if self.executor.evaluates else {})

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Continue with the ``numbers`` of a checkpoint, whose state is loaded."""
        self.loss_scale.restore(numbers)
        self.executor.note_weights(evaluation=_EVALUATES in numbers)


def _compile(
    stages: Iterable[tuple[StageModule, Graph]], world: World, device: torch.device, group: ProcessTensorGroup | None
) -> None:
    """Compile ``stages``, each a part of its Graph, and wait for the other ranks, which may take minutes longer."""
    if group is not None:
        group.is_alone = True
    for stage, graph in stages:
        stage.warm_up(graph, device)
    if group is not None:
        group.is_alone = False
    with waiting_up_to(COMPILE_TIMEOUT_S):
        everyone = new_group(range(world.size), device=device, numbers=True)
        connect(everyone, device=device, what="all ranks, each with its stages compiled")


def check_plan(
    captured: CapturedModel, plan: Plan, settings: TrainingSettings, data: TrainingData | None = None
) -> None:
    """Raise InputError where ``plan`` does not fit its schedule, its model or ``settings``, as its ranks would.

    With ``data``, it also does where the model's loss cannot be as in one process on such data.
    It makes the program of every size that a rank needs, so that ranks forked afterwards capture and derive nothing.
    """
    common = lay_out_plan(captured, plan, settings)
    _check_data(common, data)
    capture_slices(captured, plan)


def _check_data(common: PlanLayout, data: TrainingData | None) -> None:
    """Raise InputError where training on ``data`` would not be as in one process."""
    fills = isinstance(data, DataSettings) and data.last_batch == "pad"  # with samples that do not count
    may_ignore = data is not None and data.may_ignore_targets
    parts = common.schedule.slices * max(common.replicas)
    check_loss(common.terms, common.schedule, common.settings, may_ignore=may_ignore, parts=parts, fills=fills)
    if fills:
        because = "data.last_batch: found pad, which adds samples that must not count"
        check_statistics(common.captured.graph, because, "use drop")


def build_rank(
    captured: CapturedModel,
    plan: Plan,
    settings: TrainingSettings,
    data: TrainingData,
    world: World,
    *,
    schedule: Schedule | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
    asked_to_end: Callable[[], bool] = lambda: False,
) -> Rank:
    """Build this rank of ``plan``; every rank of the joined world must call it.

    ``schedule`` replaces the plan's by one written by hand; ``state`` has initial weights in place of the seed's.
    """
    device = world.device(settings.device)
    # The heap must be set up before the first large tensor is allocated.
    if device.type == "cpu":
        keep_freed_memory()
    # Everything else follows from the layout; a plan that does not fit is refused before any rank waits for another.
    common = lay_out_plan(captured, plan, settings, schedule, read_once=data.read_once)
    _check_data(common, data)
    layout = lay_out_rank(common, world.rank)
    # Programs need no peers, but every connection below is made for the messages and sums that they have.
    programs = programs_of(layout)
    # The prediction comes before anything that takes memory: where that runs out, the error names it.
    memory = MemoryWatch(layout.device, _predicted_memory(common, device)[layout.device])
    # Waits for other ranks go through this, so that each wait has its deadline.
    run_ahead = RunAhead(device)
    loss_scale = LossScale.of(settings.first_loss_scale)
    backend = _backend(settings, device, run_ahead, state, loss_scale)
    # From here on process groups are made, in the same order on every rank, and connected at once: NCCL blocks at the
    # first use of a group until its other ranks use it, which must not happen between messages. First, all ranks.
    everyone = new_group(range(world.size), device=device, numbers=True)
    connect(everyone, device=device, what="all ranks")
    check_same_plan(plan)  # all that follows takes it for granted
    # Second, the groups for messages.
    exchange = backend.exchange(layout, programs[0])
    # Memory for weights comes before the gradient sums, whose buffers are as large and become the weights' ``.grad``.
    tensors = backend.state(layout, memory)
    # Third, one group for each set of ranks that hold the same parameters.
    sync = backend.gradient_sync(layout, tensors, memory)
    # Fourth, the tensor-parallel groups, in which stages sum and gather activations.
    group = _tensor_group(layout, device, run_ahead)
    # Stages keep references to the weights, and optimizers too, so both come after them.
    randomness = Randomness(
        plan.seed,
        first_micro_batch=layout.first_micro_batch // layout.schedule.slices,
        micro_batches=layout.micro_batches // layout.schedule.slices,
        replica=layout.replica,
        replicas=layout.replicas,
        device=device,
    )
    stages = backend.stages(layout, tensors, randomness, group)
    compiled = [(stage, layout.captured.graph) for stage in stages.values()]

    def sized(other: CapturedModel) -> SizedStages:
        own = lay_out_rank(lay_out_sized(common, other), world.rank)
        sized_stages = SizedStages(stages=backend.stages(own, tensors, randomness, group), transfers=own.transfers)
        for pipe_stage, stage in sized_stages.stages.items():
            stage.weights = stages[pipe_stage].weights
            compiled.append((stage, own.captured.graph))
        return sized_stages

    incomplete, shorter = None, None
    if data.incomplete is not None:
        incomplete = IncompleteBatches(
            data=data.incomplete,
            plan=plan,
            first_micro_batch=layout.first_micro_batch,
            sized=sized(captured.at(data.incomplete.short)),
        )
    if data.lengths is not None:
        shorter = ShorterSamples(
            data=data.lengths,
            first_micro_batch=layout.first_micro_batch,
            sized={length: sized(captured.for_inputs(inputs)) for length, inputs in data.lengths.inputs.items()},
        )
    if settings.compile:
        _compile(compiled, world, device, group)
    totals = Totals(
        everyone,
        device=device,
        run_ahead=run_ahead,
        counts_loss=layout.shard == 0,
        asked_to_end=asked_to_end,
    )
    # The optimizers' state is the last large memory.
    shapes = {name: value.shape for name, value in captured.graph.parameters.items()}
    of_all_ranks = AllParameters(shapes, totals, run_ahead)
    optimizers = _optimizers(layout, tensors, settings, sync, run_ahead, of_all_ranks)
    is_summed = settings.loss_mean == SUMMED_ITEMS
    # The executor only puts together what exists by now.
    executor = Executor(
        stages,
        optimizers,
        inputs_of(layout, data, device),
        Peers(exchange=exchange, sync=sync, totals=totals, run_ahead=run_ahead),
        randomness=randomness,
        memory=memory,
        clip_norm=settings.optimizer.clip_norm,
        targets=BatchTargets(
            terms=common.terms,
            micro_batches=plan.dp * layout.micro_batches,
            loss_mean=settings.loss_mean,
            label_places=layout.label_places if is_summed else 1,
            vary=is_summed or targets_vary(common.terms, may_ignore=data.may_ignore_targets),
        ),
        loss_scale=loss_scale,
        learning_rate=learning_rate_of(settings.optimizer, settings.iterations),
        incomplete=incomplete,
        shorter=shorter,
        averages=any(traits_of(rule).averages for rule in common.rules.values()),
    )
    rank = Rank(
        common=common,
        layout=layout,
        device=device,
        run_ahead=run_ahead,
        exchange=exchange,
        tensor_group=group,
        executor=executor,
        programs=programs,
        parameters={name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)},
        buffers={name: tensor for name, tensor in tensors.items() if name in captured.graph.buffers},
        optimizers=optimizers,
        slices=tuple(sync.shards.values()),
        all_names=layout.all_stored_names,
        shared=layout.state_of_several_ranks,
        stored_as={name: layout.stored_name(name) for name in tensors},
        shapes={name: tuple(value.shape) for name, value in _whole_state(captured).items()},
        shards={name: shard for name in tensors if (shard := layout.shard_of(name)) is not None},
        predicted=memory.predicted,
        loss_scale=loss_scale,
    )
    # Nothing would correct ranks that begin with different weights, so they compare them before the first iteration.
    cause = _CAUSE_OF_SEED if state is None else _CAUSE_OF_FILE
    rank.check_agreement(cause=cause, device=device)
    return rank


def _whole_state(captured: CapturedModel) -> dict[str, Value]:
    return {**captured.graph.parameters, **captured.graph.buffers}


def programs_of(layout: RankLayout) -> tuple[Program, ...]:
    """What the rank's pipeline device runs of each schedule."""
    lowered: dict[int, Program] = {}
    for schedule in layout.schedules:
        if schedule.iterations not in lowered:
            check(schedule)
            lowered[schedule.iterations] = lower(schedule, layout.transfers, layout.summed_stages)[layout.device]
    return tuple(lowered[schedule.iterations] for schedule in layout.schedules)


def _predicted_memory(common: PlanLayout, device: torch.device) -> tuple[DeviceMemory, ...]:
    """The estimate for each pipeline device, from the Graphs that its ranks run, if all are like ``device``."""
    return predicted_memory(
        common.captured,
        common.plan,
        common.settings,
        read_once=common.read_once,
        workspaces=cublas_workspaces(device),
    )


def predicted_memory(
    captured: CapturedModel, plan: Plan, settings: TrainingSettings, *, read_once: bool = False, workspaces: int = 0
) -> tuple[DeviceMemory, ...]:
    """The estimate for each pipeline device of ``plan``, from the Graphs that its ranks run of ``captured``.

    ``workspaces`` are bytes of cuBLAS's on each device.
    """
    options = memory_options(settings.optimizer, settings.device, captured.graph.precision, lambda: captured.graph)
    options = replace(options, read_once=read_once, workspace_bytes=float(workspaces))
    in_slices = len(shares_of(plan)) > 1

    def derived_at(samples: int, plan: Plan) -> Derived:
        model = rank_program(captured, plan, captured.graph.micro_batch_size // samples).derived
        assert model is not None
        return model

    @cache
    def whole_at(samples: int) -> Work:
        return _work_of(derived_at(samples, plan).whole.graph)

    def work_at(samples: int, share: Share) -> Work:
        if not in_slices:
            return _work_of(rank_program(captured, plan, captured.graph.micro_batch_size // samples).captured.graph)
        if share == WHOLE:
            return whole_at(samples)
        # The share of all tokens has the sizes of the weights.
        model = derived_at(samples, without_slices(plan) if share.slices == 1 else plan)
        graph = local_graphs(model)[share.slice_number]
        return work_of_local(whole_at(samples), graph, precision=graph.graph.precision)

    of_rank = plan if in_slices else rank_program(captured, plan, 1).plan
    return PlanMemory(ModelWork(work_at, options), options).devices(of_rank)


def _work_of(graph: Graph) -> Work:
    return work_of(graph, (0, len(graph.nodes)), precision=graph.precision)


def _backend(
    settings: TrainingSettings,
    device: torch.device,
    run_ahead: RunAhead,
    initial_weights: Mapping[str, torch.Tensor] | None,
    loss_scale: LossScale,
) -> Backend:
    if settings.emulation is not None:
        return EmulatedBackend(
            emulation=settings.emulation,
            device=device,
            run_ahead=run_ahead,
            clock=DeviceClock(seconds_ahead()),
        )
    return RealBackend(
        device=device,
        run_ahead=run_ahead,
        initial_weights=initial_weights,
        loss_scale=loss_scale,
        compile=settings.compile,
    )


def inputs_of(layout: RankLayout, data: TrainingData, device: torch.device, *, trains: bool = True) -> MicroBatchInputs:
    """The inputs from ``data`` of the rank's micro-batches. If it ``trains``, ranks measure what comparisons cost."""
    readers = Readers.of(layout, data)
    slices, neighbour, of_neighbour = layout.schedule.slices, None, readers.neighbour_stage
    if of_neighbour is not None and not layout.shard and any(stage == of_neighbour for stage, _ in layout.stages):
        neighbour = Neighbour.of(layout, of_neighbour)
    first = layout.first_micro_batch // slices
    part = BatchSlice(
        seed=layout.plan.seed,
        global_batch=layout.plan.global_batch,
        micro_batch_size=layout.samples,
        replica=layout.replica,
        replicas=layout.replicas,
        read_once=layout.read_once,
        micro_batches=range(first, first + layout.micro_batches // slices),
        is_compared=readers.are_several or neighbour is not None,
    )
    anew = 2 if layout.read_once and data.is_read_anew else 1
    measured = partial(measured_us, times=anew) if trains and agrees(data, layout) else MOST_US
    return MicroBatchInputs(
        data.micro_batches(part),
        first_micro_batch=layout.first_micro_batch,
        micro_batches=layout.micro_batches,
        slices=slices,
        device=device,
        same=SameSamples(readers),
        neighbour=neighbour,
        cost_us=0 if data.is_by_position else measured,
        begins_epoch=data.begins_epoch,
        counting_stage=readers.stages[0] if readers.stages and not layout.replica else None,
        largest=None if data.lengths is None else {n: v.shape for n, v in layout.captured.graph.inputs.items()},
    )


def _tensor_group(layout: RankLayout, device: torch.device, run_ahead: RunAhead) -> ProcessTensorGroup | None:
    """This rank's tensor-parallel group, connected; None if tp is 1. Every rank makes all groups."""
    groups = {ranks: new_group(ranks, device=device) for ranks in layout.tensor_groups}
    for ranks, group in groups.items():
        if dist.get_rank() in ranks:
            what = f"the tensor-parallel ranks {', '.join(map(str, ranks))}"
            connect(group, device=device, what=what)
            return ProcessTensorGroup(group, ranks, run_ahead=run_ahead)
    return None


def _optimizers(
    layout: RankLayout,
    state: Mapping[str, torch.Tensor],
    settings: TrainingSettings,
    sync: GradientSync,
    run_ahead: RunAhead,
    of_all_ranks: AllParameters,
) -> dict[PipeStage, Optimizers]:
    """The optimizers of each stage; a parameter that two stages of this rank share belongs to the first of them."""
    remaining = trained_parameters(state)
    shards = list(sync.shards.values())
    optimizers: dict[PipeStage, Optimizers] = {}
    for pipe_stage, stage in layout.stages.items():
        names = [name for name in stage.state if name in remaining]
        here = [shard for shard in shards if not shard.parameters.keys().isdisjoint(names)]
        sharded = {name for shard in here for name in shard.parameters}
        whole = {name: remaining.pop(name) for name in names if name not in sharded}
        remaining = {name: parameter for name, parameter in remaining.items() if name not in sharded}
        optimizers[pipe_stage] = build_optimizers(
            whole,
            layout.rules,
            iterations=settings.iterations,
            shards=here,
            run_ahead=run_ahead,
            of_all_ranks=of_all_ranks,
        )
        for optimizer, _ in optimizers[pipe_stage].values():
            make_state(optimizer)
    return optimizers
