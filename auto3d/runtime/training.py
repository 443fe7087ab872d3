"""Train a captured model by a Plan: how a rank builds itself, in order, and the loop around it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from auto3d.capture.specialize import CapturedModel
from auto3d.partition.stage import Stage, cut
from auto3d.plan import Plan, PlanError
from auto3d.runtime.data import Batches, DataSettings
from auto3d.runtime.exchange import Exchange
from auto3d.runtime.executor import Executor, IterationResult, Replica
from auto3d.runtime.gradient_sync import GradientSync, holders
from auto3d.runtime.lowering import lower
from auto3d.runtime.materialize import materialize
from auto3d.runtime.memory import PeakMemory
from auto3d.runtime.optimizer import OptimizerSettings, build_optimizer
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage import StageModule
from auto3d.runtime.waiting import waiting_for
from auto3d.runtime.whereabouts import HERE
from auto3d.runtime.world import World, join, leave
from auto3d.schedule import build_schedule
from auto3d.schedule.check import check
from auto3d.schedule.operation import Kind, Schedule


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    iterations: int
    optimizer: OptimizerSettings
    device: str  # "cpu" or "cuda"
    threads_per_rank: int  # of a CPU rank's arithmetic
    timeout_s: float  # of every wait for another rank


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a run gave; the same on every rank. One entry per iteration, but ``peak_bytes`` has one per rank."""

    loss: list[float]
    grad_norm: list[float]
    iteration_s: list[float]  # of the slowest rank
    peak_bytes: list[int]


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank, built: its executor and the state that it trains."""

    executor: Executor
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]


def schedule_of(plan: Plan) -> Schedule:
    """The schedule of ``plan``; raises InputError where there is none of this name, options and sizes."""
    return build_schedule(plan.schedule, devices=plan.pp, micro_batches=plan.micro_batches, **plan.schedule_options)


def samples_at_once(plan: Plan) -> int:
    """How many samples an operation of ``plan`` runs: a micro-batch, or a part of one where the schedule halves them.

    The model is captured at this size. Raises PlanError where a micro-batch has no such parts.
    """
    parts = schedule_of(plan).parts
    if plan.micro_batch_size % parts:
        raise PlanError(
            f"micro_batch_size: {plan.micro_batch_size}; schedule {plan.schedule} runs it in {parts} parts: "
            f"it must be a multiple of {parts}"
        )
    return plan.micro_batch_size // parts


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


def build_rank(
    captured: CapturedModel,
    plan: Plan,
    settings: TrainingSettings,
    data: DataSettings,
    world: World,
    *,
    schedule: Schedule | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> Rank:
    """Build this rank of ``plan``; every rank of the joined world must call it.

    ``schedule`` replaces the plan's by one written by hand; ``state`` gives initial weights in place of the seed's.
    """
    device = world.device(settings.device)
    schedule = schedule or schedule_of(plan)
    check(schedule)
    has = (schedule.devices, schedule.stages, schedule.micro_batches)
    if has != (plan.pp, len(plan.stages), plan.micro_batches):
        raise PlanError(
            f"schedule: {schedule.name} has {has[0]} devices, {has[1]} stages and {has[2]} micro-batches; "
            f"the plan has {plan.pp}, {len(plan.stages)} and {plan.micro_batches}"
        )
    stages = stages_of(captured, plan)
    transfers = [transfer for stage in stages for transfer in stage.received]
    position, replica = _coordinates(plan, world.rank)
    program = lower(schedule, transfers)[position]
    micro_batches = plan.micro_batches * schedule.parts
    first_micro_batch = replica * micro_batches
    randomness = Randomness(plan.seed, first_micro_batch=first_micro_batch, device=device)

    # Only the stages of this rank get memory.
    own = {replica: stages[replica[0]] for replica, home in schedule.device_of.items() if home == position}
    constants = captured.exported.constants
    names = list(dict.fromkeys(name for stage in own.values() for name in stage.state if name not in constants))
    made = {
        name: tensor.to(device)
        for name, tensor in materialize(captured.exported.build, names, seed=plan.seed, state=state).items()
    }
    trained = captured.graph.parameters.keys() - captured.exported.frozen
    parameters = {
        name: nn.Parameter(tensor, requires_grad=name in trained)
        for name, tensor in made.items()
        if name in captured.graph.parameters
    }
    buffers = {name: tensor for name, tensor in made.items() if name not in parameters}
    tensors = {**{name: value.to(device) for name, value in constants.items()}, **buffers, **parameters}
    split = {o.stage for own in schedule.operations for o in own if o.kind is Kind.BACKWARD_INPUT}
    modules = {
        replica: StageModule(
            stage,
            captured,
            tensors,
            loss_weight=1 / (plan.dp * micro_batches),
            randomness=randomness,
            device=device,
            recompute=replica[0] in schedule.recompute,
            split_backward=replica[0] in split,
        )
        for replica, stage in own.items()
    }

    # Process groups are made in the same order everywhere: first the exchange's, then the gradient sync's.
    exchange = Exchange(
        program,
        transfers,
        rank_of=[ranks[replica] for ranks in plan.placement],
        device_of=schedule.device_of,
        device=device,
        timeout_s=settings.timeout_s,
    )
    own_trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    sync = GradientSync(own_trained, holders(plan, schedule, stages, trained), timeout_s=settings.timeout_s)
    executor = Executor(
        program,
        modules,
        _optimizers(own, own_trained, settings),
        exchange=exchange,
        sync=sync,
        batches=Batches(
            data,
            seed=plan.seed,
            global_batch=plan.global_batch,
            micro_batch_size=captured.graph.micro_batch_size,
        ),
        randomness=randomness,
        first_micro_batch=first_micro_batch,
        clip_norm=settings.optimizer.clip_norm,
        device=device,
        timeout_s=settings.timeout_s,
    )
    return Rank(executor=executor, parameters=parameters, buffers=buffers)


def train(
    captured: CapturedModel,
    plan: Plan,
    settings: TrainingSettings,
    data: DataSettings,
    world: World,
    *,
    state: Mapping[str, torch.Tensor] | None = None,
    on_iteration: Callable[[int, IterationResult, float], None] = lambda iteration, result, seconds: None,
) -> TrainingResult:
    """Train for ``settings.iterations`` as rank ``world.rank``; calls ``on_iteration`` after each with its seconds."""
    if world.size != plan.ranks:
        raise PlanError(
            f"the plan needs dp × tp × pp = {plan.dp} × {plan.tp} × {plan.pp} = {plan.ranks} ranks; "
            f"there are {world.size}"
        )
    torch.set_num_threads(settings.threads_per_rank)
    device = world.device(settings.device)
    join(world, device=device, timeout_s=settings.timeout_s)
    try:
        memory = PeakMemory(device)
        rank = build_rank(captured, plan, settings, data, world, state=state)
        results, seconds = [], []
        for iteration in range(settings.iterations):
            start = perf_counter()
            results.append(rank.executor.run_iteration(iteration))
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the optimizer's step is still queued
            seconds.append(perf_counter() - start)
            on_iteration(iteration, results[-1], seconds[-1])
        return TrainingResult(
            loss=[result.loss for result in results],
            grad_norm=[result.grad_norm for result in results],
            iteration_s=_of_all_ranks(seconds, device, timeout_s=settings.timeout_s).max(dim=0).values.tolist(),
            peak_bytes=_of_all_ranks([memory.bytes()], device, timeout_s=settings.timeout_s).flatten().tolist(),
        )
    except Exception as error:
        error.add_note(f"{HERE} failed")
        raise
    finally:
        leave()


def _coordinates(plan: Plan, rank: int) -> tuple[int, int]:
    """The pipeline device and the replica that ``rank`` plays."""
    return next((device, ranks.index(rank)) for device, ranks in enumerate(plan.placement) if rank in ranks)


def _optimizers(
    own: Mapping[Replica, Stage], parameters: Mapping[str, nn.Parameter], settings: TrainingSettings
) -> dict[Replica, tuple[Optimizer, LRScheduler] | None]:
    """One optimizer per stage; a parameter that two stages of this rank share belongs to the first of them."""
    left = dict(parameters)
    optimizers = {}
    for replica, stage in own.items():
        mine = [left.pop(name) for name in stage.state if name in left]
        optimizers[replica] = (
            build_optimizer(mine, settings.optimizer, iterations=settings.iterations) if mine else None
        )
    return optimizers


def _of_all_ranks(values: Sequence[float] | Sequence[int], device: torch.device, *, timeout_s: float) -> torch.Tensor:
    """[ranks, values]: what each rank gave, on every rank."""
    own = torch.tensor(values, device=device, dtype=torch.float64 if isinstance(values[0], float) else torch.int64)
    gathered = torch.zeros(dist.get_world_size(), len(values), device=device, dtype=own.dtype)
    gathered[dist.get_rank()] = own
    with waiting_for("the times and the memory of all ranks", timeout_s):
        dist.all_reduce(gathered)
    return gathered
