"""One rank of a Plan, built: its programs, its stages, its messages, its gradient sums and its optimizers."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from auto3d.allocator import keep_freed_memory
from auto3d.capture.model import CapturedModel
from auto3d.cost.memory import DeviceMemory, predict
from auto3d.partition.stage import Stage, Transfer, cut
from auto3d.plan import Plan, PlanError
from auto3d.runtime.agreement import check_agreement
from auto3d.runtime.data import Batches, DataSettings
from auto3d.runtime.emulated import DeviceClock, EmulatedExchange, EmulatedStage, EmulatedSync
from auto3d.runtime.exchange import Exchange
from auto3d.runtime.executor import Executor
from auto3d.runtime.gradient_sync import GradientSync, Holders, holders
from auto3d.runtime.materialize import materialize
from auto3d.runtime.optimizer import Optimizer, build_optimizer, make_state, state_by_parameter
from auto3d.runtime.out_of_memory import MemoryWatch
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.replicas import replicas_of_devices, resplit_dimensions, share_of
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.settings import TrainingSettings, optimizer_copies
from auto3d.runtime.sharded_optimizer import connect_shares
from auto3d.runtime.stage import StageModule
from auto3d.runtime.world import World, connect, new_group
from auto3d.schedule import SCHEDULES, samples_at_once, schedule_of
from auto3d.schedule.asynchronous import check_trainable
from auto3d.schedule.carried_buffers import check_carried_buffers
from auto3d.schedule.check import check
from auto3d.schedule.lowering import lower
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.program import PipeStage, Program

_CAUSE_OF_SEED = (
    "the model's initialisation does not follow from training.seed alone, but depends on the rank, the time or a "
    "generator of its own, such as numpy.random.default_rng(); seed it, or give model.weights"
)
_CAUSE_OF_FILE = "do all nodes read the same model.weights, with every buffer that the model draws at random?"

MICRO_BATCHES_WITHOUT_FLUSH = 1024  # of an asynchronous schedule: a flush costs as much as pp - 1 of them


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank, built: its executor, the programs that make up the run, and the state that it trains."""

    executor: Executor
    programs: tuple[Program, ...]  # to be run one after the other
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    optimizers: dict[PipeStage, tuple[Optimizer, LRScheduler] | None]
    all_names: tuple[str, ...]  # parameters and buffers of the model; none on emulated devices, which hold nothing
    shared: frozenset[str]  # those of them that other ranks hold too
    predicted: DeviceMemory  # bytes of this rank's pipeline device

    def check_agreement(self, *, cause: str, device: torch.device, timeout_s: float) -> None:
        """Raise WeightsDifferError unless all ranks that hold a parameter or buffer hold the same bits of it.

        Every rank must call this; ``cause`` says what is likely wrong.
        """
        if self.all_names:
            tensors = self.parameters | self.buffers
            shared = {name: tensors[name] for name in self.shared & tensors.keys()}
            check_agreement(shared, self.all_names, device=device, cause=cause, timeout_s=timeout_s)

    def state(self) -> dict[str, torch.Tensor]:
        """All that training changes here, by name, but for the learning rates; who writes into it changes the rank."""
        state = {f"model.{name}": tensor.data for name, tensor in (self.parameters | self.buffers).items()}
        names = {parameter: name for name, parameter in self.parameters.items()}
        for optimizer, _ in filter(None, self.optimizers.values()):
            for parameter, kept in state_by_parameter(optimizer).items():
                state |= {f"optimizer.{names[parameter]}.{key}": tensor for key, tensor in kept.items()}
        return state


def schedules_of(plan: Plan, iterations: int) -> list[Schedule]:
    """Schedules of ``plan`` that together are ``iterations`` iterations, each flushed before the next begins.

    An asynchronous one has as many iterations as its option says, or about MICRO_BATCHES_WITHOUT_FLUSH micro-batches;
    the last of them has what is left. So a run does, as far as it goes, what a longer run of the plan does.
    """
    if not SCHEDULES[plan.schedule].asynchronous:
        return [schedule_of(plan)] * iterations
    default = max(1, MICRO_BATCHES_WITHOUT_FLUSH // plan.micro_batches)
    most = int(plan.schedule_options.get("iterations", default))
    whole, rest = divmod(iterations, most)
    return [
        schedule_of(replace(plan, schedule_options={**plan.schedule_options, "iterations": length}))
        for length in [most] * whole + [rest] * (rest > 0)
    ]


def stages_of(captured: CapturedModel, plan: Plan) -> tuple[Stage, ...]:
    """The stages of ``plan``; raises PlanError if it was made for another model or micro-batch size."""
    if plan.graph != captured.graph.fingerprint:
        raise PlanError(
            f"graph: the plan was made for model {plan.graph}, this one is {captured.graph.fingerprint}; "
            "make the plan again for this model and these versions of torch and transformers"
        )
    if samples_at_once(plan) != captured.graph.micro_batch_size:
        raise PlanError(
            f"micro_batch_size: the plan runs {samples_at_once(plan)} samples at once; the model was captured with "
            f"{captured.graph.micro_batch_size}"
        )
    return cut(captured.graph, plan.stages)


def check_plan(captured: CapturedModel, plan: Plan, settings: TrainingSettings) -> None:
    """Raise InputError where ``plan`` does not fit its schedule, its model or ``settings``, as its ranks would."""
    schedule, stages = schedule_of(plan), stages_of(captured, plan)
    replicas_of_devices(plan, schedule)
    resplit_dimensions(captured, plan, stages)
    check_trainable(schedule, stages, captured.graph.trained, clip_norm=settings.optimizer.clip_norm)
    check_carried_buffers(captured.graph, plan, schedule, stages)
    if settings.emulation is not None:
        settings.emulation.check_fits(plan.stages)


def build_rank(
    captured: CapturedModel,
    plan: Plan,
    settings: TrainingSettings,
    data: DataSettings,
    world: World,
    *,
    schedule: Schedule | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
    asked_to_end: Callable[[], bool] = lambda: False,
) -> Rank:
    """Build this rank of ``plan``; every rank of the joined world must call it.

    ``schedule`` replaces the plan's by one written by hand; ``state`` gives initial weights in place of the seed's.
    """
    device, emulation = world.device(settings.device), settings.emulation
    if device.type == "cpu":
        keep_freed_memory()
    by_hand = [schedule] * (settings.iterations // schedule.iterations) if schedule else []
    schedules = by_hand or schedules_of(plan, settings.iterations)
    schedule = schedules[0]
    counts = replicas_of_devices(plan, schedule)
    stages, trained = stages_of(captured, plan), captured.graph.trained
    check_trainable(schedule, stages, trained, clip_norm=settings.optimizer.clip_norm)
    check_carried_buffers(captured.graph, plan, schedule, stages)
    dimensions = resplit_dimensions(captured, plan, stages)

    position, replica, part = plan.position(world.rank)
    replicas, samples = counts[position], captured.graph.micro_batch_size
    captured, plan = share_of(captured, plan, replicas)
    stages = cut(captured.graph, plan.stages)
    if emulation is not None:
        stages = emulation.stages(stages)
    transfers = [transfer for stage in stages for transfer in stage.received]
    all_holders = holders(plan, schedule, stages, trained)
    shared = {each.stages for each in all_holders.values() if len(each.ranks) > 1}
    programs = _programs(schedules, transfers, shared, position)
    copies = optimizer_copies(settings.optimizer, settings.device)
    memory = MemoryWatch(position, predict(captured.graph, plan, schedule, **copies)[position])
    own = {replica: stages[replica[0]] for replica, home in schedule.device_of.items() if home == position}

    run_ahead = RunAhead(device, settings.timeout_s)
    # Process groups are made, and connected, in the same order everywhere.
    everyone = new_group(range(world.size), settings.timeout_s, device=device)
    connect(everyone, device=device, what="all ranks", timeout_s=settings.timeout_s)
    exchange = (Exchange if emulation is None else EmulatedExchange)(
        programs[0],
        transfers,
        ranks_of=[
            ranks[replica * count : (replica + 1) * count] for ranks, count in zip(plan.placement, counts, strict=True)
        ],
        device_of=schedule.device_of,
        sample_dimensions=dimensions,
        device=device,
        run_ahead=run_ahead,
        timeout_s=settings.timeout_s,
    )
    micro_batches = plan.micro_batches * schedule.parts
    numbers = {"first_micro_batch": replica * micro_batches, "micro_batches": micro_batches}
    share = {"part": part, "replicas": replicas}
    randomness = Randomness(plan.seed, **numbers, **share, device=device)
    if emulation is None:
        tensors = _state(captured, own, memory, device=device, seed=plan.seed, given=state)
        learning = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        with memory.during("the making of its gradients"):
            alone = {} if schedule.weight_version else _alone(own, learning, all_holders)
            sync = GradientSync(
                learning, all_holders, alone=alone, device=device, run_ahead=run_ahead, timeout_s=settings.timeout_s
            )
        loss_weight = schedule.updates / (plan.dp * micro_batches * replicas)
        modules = _stage_modules(
            own, captured, plan, schedule, tensors, loss_weight=loss_weight, randomness=randomness, device=device
        )
    else:
        tensors, learning = {}, {}
        modules = _emulated_stages(own, captured, plan, schedule, exchange.clock, settings, device=device)
        names = {name for stage in own.values() for name in stage.state if name in all_holders}
        sync = EmulatedSync(
            {name: captured.graph.parameters[name] for name in all_holders if name in names},
            all_holders,
            sync_bytes=emulation.each("sync_bytes", len(plan.stages)),
            clock=exchange.clock,
            device=device,
            run_ahead=run_ahead,
            timeout_s=settings.timeout_s,
        )
    shared_by = None
    if plan.shard_optimizer:
        shared_by = [new_group(ranks, settings.timeout_s, device=device) for ranks in plan.placement][position]
        connect_shares(shared_by, device, timeout_s=settings.timeout_s)
    optimizers = _optimizers(own, learning, settings, shared_by)
    executor = Executor(
        modules,
        optimizers,
        exchange=exchange,
        sync=sync,
        everyone=everyone,
        run_ahead=run_ahead,
        batches=Batches(
            data,
            seed=plan.seed,
            global_batch=plan.global_batch,
            micro_batch_size=samples,
            replica=part,
            replicas=replicas,
        ),
        randomness=randomness,
        **numbers,
        clip_norm=settings.optimizer.clip_norm,
        device=device,
        memory=memory,
        asked_to_end=asked_to_end,
        timeout_s=settings.timeout_s,
    )
    names = captured.graph.parameters.keys() | captured.graph.buffers.keys()
    rank = Rank(
        executor=executor,
        programs=programs,
        parameters={name: tensor for name, tensor in tensors.items() if name in captured.graph.parameters},
        buffers={name: tensor for name, tensor in tensors.items() if name in captured.graph.buffers},
        optimizers=optimizers,
        all_names=tuple(sorted(names)) if emulation is None else (),
        shared=frozenset(name for name, each in holders(plan, schedule, stages, names).items() if len(each.ranks) > 1),
        predicted=memory.predicted,
    )
    cause = _CAUSE_OF_SEED if state is None else _CAUSE_OF_FILE
    rank.check_agreement(cause=cause, device=device, timeout_s=settings.timeout_s)
    return rank


def _programs(
    schedules: Sequence[Schedule], transfers: Sequence[Transfer], shared: Collection[tuple[int, ...]], position: int
) -> tuple[Program, ...]:
    """What pipeline device ``position`` runs of each of ``schedules``, which differ in their iterations alone."""
    lowered: dict[int, Program] = {}
    for schedule in schedules:
        if schedule.iterations not in lowered:
            check(schedule)
            lowered[schedule.iterations] = lower(schedule, transfers, shared)[position]
    return tuple(lowered[schedule.iterations] for schedule in schedules)


def _state(
    captured: CapturedModel,
    own: Mapping[PipeStage, Stage],
    memory: MemoryWatch,
    *,
    device: torch.device,
    seed: int,
    given: Mapping[str, torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """Parameters, buffers and constants of this rank's stages; only they get memory."""
    constants, graph = captured.exported.constants, captured.graph
    names = list(dict.fromkeys(name for stage in own.values() for name in stage.state if name not in constants))
    with memory.during("the making of its weights"):
        initial = materialize(captured.exported.build, names, seed=seed, state=given)
        made = {name: tensor.to(device) for name, tensor in initial.items()}
        made |= {name: value.to(device) for name, value in constants.items()}
    return {
        name: nn.Parameter(tensor, requires_grad=name in graph.trained) if name in graph.parameters else tensor
        for name, tensor in made.items()
    }


def _alone(own: Mapping[PipeStage, Stage], names: Collection[str], holders: Mapping[str, Holders]) -> list[str]:
    """Those of ``names`` that one stage of this rank uses, and no other rank."""
    users = Counter(name for stage in own.values() for name in stage.state)
    return [name for name in names if users[name] == 1 and len(holders[name].ranks) == 1]


def _stage_modules(
    own: Mapping[PipeStage, Stage],
    captured: CapturedModel,
    plan: Plan,
    schedule: Schedule,
    tensors: Mapping[str, torch.Tensor],
    *,
    loss_weight: float,
    randomness: Randomness,
    device: torch.device,
) -> dict[PipeStage, StageModule]:
    split = {o.stage for operations in schedule.operations for o in operations if o.kind is Kind.BACKWARD_INPUT}
    return {
        (number, pipe): StageModule(
            stage,
            captured,
            tensors,
            loss_weight=loss_weight,
            randomness=randomness,
            device=device,
            recompute=number in schedule.recompute,
            kept=plan.stages[number].kept,
            split_backward=number in split,
            old_weights=bool(schedule.weight_version),
        )
        for (number, pipe), stage in own.items()
    }


def _emulated_stages(
    own: Mapping[PipeStage, Stage],
    captured: CapturedModel,
    plan: Plan,
    schedule: Schedule,
    clock: DeviceClock,
    settings: TrainingSettings,
    *,
    device: torch.device,
) -> dict[PipeStage, EmulatedStage]:
    costs = settings.emulation.costs(captured.graph, plan.stages, schedule)
    return {
        (number, pipe): EmulatedStage(
            stage, costs, parts=schedule.parts, recompute=number in schedule.recompute, clock=clock, device=device
        )
        for (number, pipe), stage in own.items()
    }


def _optimizers(
    own: Mapping[PipeStage, Stage],
    parameters: Mapping[str, nn.Parameter],
    settings: TrainingSettings,
    shared_by: dist.ProcessGroup | None,
) -> dict[PipeStage, tuple[Optimizer, LRScheduler] | None]:
    """One optimizer per stage; a parameter that two stages of this rank share belongs to the first of them."""
    left = dict(parameters)
    optimizers = {}
    for replica, stage in own.items():
        mine = [left.pop(name) for name in stage.state if name in left]
        optimizers[replica] = None
        if mine:
            optimizers[replica] = build_optimizer(
                mine, settings.optimizer, iterations=settings.iterations, shard_over=shared_by
            )
            make_state(optimizers[replica][0])
    return optimizers
