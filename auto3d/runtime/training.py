"""Train a captured model by a Plan: the loop around a rank, and what it gave."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.capture.model import CapturedModel
from auto3d.plan import Plan, PlanError
from auto3d.runtime.arithmetic import set_arithmetic
from auto3d.runtime.checkpoint import CheckpointError, Checkpoints, load, newest, save
from auto3d.runtime.data import DataSettings
from auto3d.runtime.executor import IterationResult
from auto3d.runtime.measurement import BYTES
from auto3d.runtime.memory import PeakMemory
from auto3d.runtime.optimizer import advance
from auto3d.runtime.out_of_memory import OutOfMemoryError, is_out_of_memory, words_of
from auto3d.runtime.rank import Rank, build_rank
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.waiting import waiting_for
from auto3d.runtime.whereabouts import HERE
from auto3d.runtime.world import World, join
from auto3d.schedule.program import Program


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a run gave; the same on every rank. One entry per iteration; the ``_bytes`` have one per rank.

    Emulated devices compute nothing and hold nothing: of them there is ``iteration_s``, and the other lists are empty.
    """

    loss: list[float]
    grad_norm: list[float | None]  # None under an asynchronous schedule
    iteration_s: list[float]  # of the slowest rank
    peak_bytes: list[int]  # live tensors on a GPU, growth of the process on a CPU
    reserved_bytes: list[int]  # by torch's caching allocator at its peak; empty on CPUs
    used_bytes: list[int]  # on the device at the peak, context and NCCL included; empty on CPUs
    predicted_bytes: list[int]  # estimate of auto3d.cost.device_memory for the rank's pipeline device
    first_iteration: int = 0  # those before it were done when the checkpoint was written that it went on from
    asked_to_end: bool = False  # before all iterations were done; it left a checkpoint


def train(
    captured: CapturedModel,
    plan: Plan,
    settings: TrainingSettings,
    data: DataSettings,
    world: World,
    *,
    state: Mapping[str, torch.Tensor] | None = None,
    checkpoints: Checkpoints | None = None,
    asked_to_end: Callable[[], bool] = lambda: False,
    on_iteration: Callable[[int, IterationResult], None] = lambda iteration, result: None,
) -> TrainingResult:
    """Train for ``settings.iterations`` as rank ``world.rank``; calls ``on_iteration`` with each and its result.

    With ``checkpoints`` it goes on from the newest one, writes some, and ends early, after one, soon after any rank
    was ``asked_to_end``: after the iteration or, under an asynchronous schedule, once that is flushed.

    The process groups stay: after a success the caller reports the result, then leaves them (``world.leave``); after a
    failure it reports that, and ends the process without leaving them.
    """
    if world.size != plan.ranks:
        raise PlanError(f"the plan needs {plan.ranks} ranks; there are {world.size}")
    torch.set_num_threads(settings.threads_per_rank)
    try:
        device = world.device(settings.device)
        set_arithmetic(device, tf32=settings.tf32, deterministic=settings.deterministic)
        join(world, device=device, timeout_s=settings.timeout_s)
        memory = PeakMemory(device)
        rank = build_rank(captured, plan, settings, data, world, state=state, asked_to_end=asked_to_end)
        first = done = _go_on(rank, checkpoints, device, timeout_s=settings.timeout_s) if checkpoints else 0
        results: list[IterationResult] = []
        ends = False
        for program in _from(rank.programs, first):
            for result in rank.executor.run(program, done):
                on_iteration(first + len(results), result)
                results.append(result)
                ends |= result.asked_to_end
            before, done = done, done + program.iterations
            if checkpoints and (ends or checkpoints.due(before, done, settings.iterations)):
                save(checkpoints.folder, rank.state(), iteration=done, timeout_s=settings.timeout_s)
            if checkpoints and ends:
                break
        seconds = [result.seconds for result in results]
        slowest_s = _of_all_ranks(seconds, torch.float64, timeout_s=settings.timeout_s).max(dim=0).values
        facts = {"iteration_s": slowest_s.tolist(), "first_iteration": first}
        facts["asked_to_end"] = done < settings.iterations
        if settings.emulation is not None:
            return TrainingResult(loss=[], grad_norm=[], **{name: [] for name in BYTES}, **facts)
        peak = memory.read()
        own = [peak.allocated, peak.reserved or 0, peak.used or 0, rank.predicted.total]  # in the order of BYTES
        of_all = _of_all_ranks(own, torch.int64, timeout_s=settings.timeout_s).T.tolist()
        memory_of_all = dict(zip(BYTES, of_all, strict=True))
        if device.type == "cpu":
            memory_of_all |= {"reserved_bytes": [], "used_bytes": []}
        return TrainingResult(
            loss=[result.loss for result in results],
            grad_norm=[result.grad_norm for result in results],
            **memory_of_all,
            **facts,
        )
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, OutOfMemoryError):
            raise OutOfMemoryError(f"{HERE} ran out of memory: {words_of(error)}") from error
        error.add_note(f"{HERE} failed")
        raise


def _go_on(rank: Rank, checkpoints: Checkpoints, device: torch.device, *, timeout_s: float) -> int:
    """Give ``rank`` the state of the newest checkpoint, if there is one; returns how many iterations it had done."""
    # What rank 0 sees decides, for files may come to be seen at other times on other nodes.
    found = [newest(checkpoints.folder) if dist.get_rank() == 0 else None]
    with waiting_for("rank 0 to tell which checkpoint to go on from", timeout_s):
        dist.broadcast_object_list(found)
    if found[0] is None:
        return 0
    load(checkpoints.folder, rank.state(), iteration=found[0])
    for optimizer, learning_rate in filter(None, rank.optimizers.values()):
        advance(optimizer, learning_rate, found[0])
    cause = f"do all nodes see the same checkpoint in {checkpoints.folder}?"
    rank.check_agreement(cause=cause, device=device, timeout_s=timeout_s)
    return found[0]


def _from(programs: Sequence[Program], iteration: int) -> Iterator[Program]:
    """Those of ``programs`` that come after so many iterations."""
    begins = 0
    for program in programs:
        if begins >= iteration:
            yield program
        elif begins + program.iterations > iteration:
            raise CheckpointError(
                f"the checkpoint was written after {iteration} iterations, and the schedule runs "
                f"{begins + 1} to {begins + program.iterations} without a flush in between"
            )
        begins += program.iterations


def _of_all_ranks(values: Sequence[float] | Sequence[int], dtype: torch.dtype, *, timeout_s: float) -> torch.Tensor:
    """[ranks, values]: what each rank gave, on every rank."""
    own = torch.tensor(values, dtype=dtype)
    gathered = torch.zeros(dist.get_world_size(), len(values), dtype=own.dtype)
    gathered[dist.get_rank()] = own
    with waiting_for("the times and the memory of all ranks", timeout_s):
        dist.all_reduce(gathered)
    return gathered
