"""Trains a captured model by a Plan: the loop around one rank, and its result."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from auto3d.capture.model import CapturedModel
from auto3d.data import TrainingData
from auto3d.plan import Plan, PlanError
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.checkpoint.format import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    check,
    checkpoint_folder,
    learnt_by,
    newest,
)
from auto3d.runtime.checkpoint.reading import CheckpointReader
from auto3d.runtime.checkpoint.writing import CheckpointWriter
from auto3d.runtime.executor import IterationResult
from auto3d.runtime.measurement import BYTES
from auto3d.runtime.messages.gathered import of_all_ranks
from auto3d.runtime.optimizer.build import advance
from auto3d.runtime.optimizer.classes import check_resumes
from auto3d.runtime.out_of_memory import OutOfMemoryError, is_out_of_memory, out_of_memory_line
from auto3d.runtime.process.arithmetic import set_arithmetic
from auto3d.runtime.process.world import World, join
from auto3d.runtime.rank import Rank, build_rank
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.waiting import waiting_for
from auto3d.runtime.watch.of_rank import TraceRequest, Watch, Watched
from auto3d.runtime.watch.peak_memory import PeakBytes, PeakMemory
from auto3d.schedule.program import Program


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a run, the same on every rank. Lists have an entry per iteration, the ``_bytes`` an entry per rank.

    Emulated devices compute nothing and hold nothing, so they have only ``iteration_s``; the other lists are empty.
    """

    loss: list[float]
    grad_norm: list[float | None]  # None under an asynchronous schedule
    iteration_s: list[float]  # time of the slowest rank
    peak_bytes: list[int]  # live tensors on a GPU, growth of the process on a CPU
    reserved_bytes: list[int]  # peak of what torch's caching allocator has reserved; empty on CPUs
    used_bytes: list[int]  # peak use of the device, including context and NCCL; empty on CPUs
    predicted_bytes: list[int]  # estimate of auto3d.cost for the rank's pipeline device
    first_iteration: int = 0  # number of iterations before it, which the checkpoint that it resumed from includes
    asked_to_end: bool = False  # whether it was asked to end, and wrote a checkpoint, before all iterations were done


def train(
    captured: CapturedModel,
    plan: Plan,
    settings: TrainingSettings,
    data: TrainingData,
    world: World,
    *,
    state: Mapping[str, torch.Tensor] | None = None,
    checkpoints: Checkpoints | None = None,
    asked_to_end: Callable[[], bool] = lambda: False,
    on_iteration: Callable[[int, IterationResult, Watched], None] | None = None,
    trace: TraceRequest | None = None,
) -> TrainingResult:
    """Train to the end as rank ``world.rank``.

    ``on_iteration`` receives each iteration's number and result, and what the ranks know of each other. They watch each
    other only if there is one, on every rank; then ``trace`` may ask for traces of iterations.
    """
    with naming_this_rank():
        training = Training(
            captured, plan, settings, data, world, state=state, checkpoints=checkpoints, asked_to_end=asked_to_end
        )
        watch = None if on_iteration is None else training.watch(plan, world.device(settings.device), trace)
        for iteration, result in training.iterations():
            if watch is not None and on_iteration is not None:
                if training.flushed:
                    watch.after(training.done)
                on_iteration(iteration, result, watch.latest)
        return training.result()


class Training:
    """One rank's training of a Plan for ``settings.iterations``. All ranks make the same calls in the same order.

    With ``checkpoints`` it resumes from the newest and writes further checkpoints. Once ``asked_to_end`` is true on any
    rank, it writes a checkpoint and ends early: after the iteration or, under an asynchronous schedule, once that is
    flushed.

    The process groups stay. After a success the caller reports the result and then leaves them (``world.leave``); after
    a failure it reports that, and ends the process without leaving them.
    """

    def __init__(
        self,
        captured: CapturedModel,
        plan: Plan,
        settings: TrainingSettings,
        data: TrainingData,
        world: World,
        *,
        state: Mapping[str, torch.Tensor] | None = None,
        checkpoints: Checkpoints | None = None,
        asked_to_end: Callable[[], bool] = lambda: False,
    ) -> None:
        if world.size != plan.ranks:
            raise PlanError(f"the plan needs {plan.ranks} ranks; there are {world.size}")
        self._settings, self._checkpoints = settings, checkpoints
        device = start_rank(settings, world)
        self._memory = PeakMemory(device)
        self.rank = build_rank(captured, plan, settings, data, world, state=state, asked_to_end=asked_to_end)
        self._writer: CheckpointWriter | None = None
        resumed = 0
        if checkpoints:
            check_resumes(self.rank.common.rules.values())
            learnt = learnt_by(plan, settings.optimizer)
            self._writer = CheckpointWriter(checkpoints, learnt)
            check_it = partial(check, graph=captured.graph, learnt=learnt)
            resumed = _resume(self.rank, checkpoints, check_it, device)
        self._saved = resumed  # iterations that the newest checkpoint includes
        self.first = resumed  # iterations before this run, which the checkpoint that it resumed from includes
        self.done = resumed  # iterations of finished programs: the state that ``save`` would write
        self._results: list[IterationResult] = []

    def begin_after(self, iterations: int, numbers: Mapping[str, float]) -> None:
        """Begin after ``iterations``, with the ``numbers`` of then; the caller has put the state of then into ``rank``.

        It must not have run yet, and writes no checkpoints.
        """
        assert self._checkpoints is None
        assert not self._results
        self.rank.restore(numbers)
        _advance(self.rank, iterations)
        self._saved = self.first = self.done = iterations

    @property
    def flushed(self) -> bool:
        """Whether no micro-batch is in flight, so that ``save`` may be called; always true between synchronous
        iterations."""
        return self.done == self.first + len(self._results)

    def iterations(self) -> Iterator[tuple[int, IterationResult]]:
        """Run the remaining iterations; yields the number, from 0, and the result of each iteration.

        The caller may save between two iterations where the training is ``flushed``, and may stop at any of them.
        """
        checkpoints, asked_to_end = self._checkpoints, False
        for program in _after(self.rank.programs, self.first):
            before = self.done
            for result in self.rank.executor.run(program, before):
                if self._writer:
                    self._writer.check()
                asked_to_end |= result.asked_to_end
                self._results.append(result)
                if self.first + len(self._results) == before + program.iterations:
                    self.done = before + program.iterations
                yield self.first + len(self._results) - 1, result
            if checkpoints and (asked_to_end or checkpoints.due(before, self.done, self._settings.iterations)):
                self.save()
            if checkpoints and asked_to_end:
                return

    def watch(self, plan: Plan, device: torch.device, trace: TraceRequest | None = None) -> Watch:
        """A Watch of this rank, which the caller tells of the iterations. All ranks must call it."""
        return Watch(
            self.rank.executor,
            plan,
            self._memory,
            device,
            first_iteration=self.done,
            programs=self.rank.programs,
            trace=trace,
        )

    def save(self) -> None:
        """Begin to write a checkpoint, unless this iteration has a checkpoint; training may go on meanwhile.

        All ranks must call it. The next call, and ``result``, wait until it is complete, and raise the error that
        prevented that. Where an optimizer averages, it holds the weights of evaluation, which an export is to have.
        """
        assert self._writer is not None
        assert self.flushed
        if self.done != self._saved:
            self.rank.executor.use_weights(evaluation=True)
            self._writer.save(self.rank.state(), iteration=self.done, numbers=self.rank.numbers())
            self._saved = self.done

    def result(self) -> TrainingResult:
        """The result of the iterations so far, once the last checkpoint is complete. All ranks must call it."""
        if self._writer:
            self._writer.finish()
        settings, results = self._settings, self._results
        seconds = [result.seconds for result in results]
        slowest_s = of_all_ranks(seconds, torch.float64).max(dim=0).values
        bytes_of_ranks: dict[str, list[int]] = {name: [] for name in BYTES}
        if settings.emulation is None:
            predicted = self.rank.predicted.total
            bytes_of_ranks = memory_of_ranks(self._memory.read(), predicted)
        computed = results if settings.emulation is None else []
        return TrainingResult(
            loss=[result.loss for result in computed],
            grad_norm=[result.grad_norm for result in computed],
            iteration_s=slowest_s.tolist(),
            peak_bytes=bytes_of_ranks["peak_bytes"],
            reserved_bytes=bytes_of_ranks["reserved_bytes"],
            used_bytes=bytes_of_ranks["used_bytes"],
            predicted_bytes=bytes_of_ranks["predicted_bytes"],
            first_iteration=self.first,
            asked_to_end=self.done < settings.iterations,
        )


@contextmanager
def naming_this_rank() -> Iterator[None]:
    """Have errors inside say which rank failed, and in which phase; raises OutOfMemoryError if memory ran out."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, OutOfMemoryError):
            raise OutOfMemoryError(f"{THIS_RANK} ran out of memory: {out_of_memory_line(error)}") from error
        error.add_note(f"{THIS_RANK} failed")
        raise


def start_rank(settings: TrainingSettings, world: World, *, collectives_on_device: bool = False) -> torch.device:
    """Set up this process as rank ``world.rank`` and join the others, as ``join`` does; returns its device."""
    torch.set_num_threads(settings.threads_per_rank)
    device = world.device(settings.device)
    set_arithmetic(device, tf32=settings.tf32, deterministic=settings.deterministic)
    join(world, device=device, timeout_s=settings.timeout_s, collectives_on_device=collectives_on_device)
    return device


def memory_of_ranks(peak: PeakBytes, predicted: int | None) -> dict[str, list[int]]:
    """The fields BYTES of a result, from what each rank read as ``peak``; lists are empty where nothing is known."""
    local = [peak.allocated, peak.reserved or 0, peak.used or 0, predicted or 0]  # in the order of BYTES
    gathered = of_all_ranks(local, torch.int64).T.tolist()
    known = (True, peak.reserved is not None, peak.used is not None, predicted is not None)
    return {name: column if knows else [] for name, column, knows in zip(BYTES, gathered, known, strict=True)}


def _resume(
    rank: Rank,
    checkpoints: Checkpoints,
    check_it: Callable[[Path, Checkpoint], None],
    device: torch.device,
) -> int:
    """Load the newest checkpoint, if there is any, into ``rank``; returns how many iterations it includes."""
    # Rank 0 decides for all, because files may become visible at different times on different nodes.
    newest_iteration = [newest(checkpoints.folder) if dist.get_rank() == 0 else None]
    with waiting_for("rank 0 to say which checkpoint to resume from"):
        dist.broadcast_object_list(newest_iteration)
    (done,) = newest_iteration
    if done is None:
        return 0
    rank.make_state_to_load()
    source = checkpoint_folder(checkpoints.folder, done)
    with CheckpointReader(source) as reader:
        check_it(source, reader.checkpoint)
        reader.load(rank.state())
        rank.restore(reader.checkpoint.numbers)
    _advance(rank, done)
    cause = f"do all nodes see the same checkpoint in {checkpoints.folder}?"
    rank.check_agreement(cause=cause, device=device)
    return done


def _advance(rank: Rank, iterations: int) -> None:
    """Set the learning rates of ``rank`` to those after ``iterations``."""
    for optimizer, learning_rate in rank.updaters():
        advance(optimizer, learning_rate, iterations - rank.loss_scale.skipped_iterations)


def _after(programs: Sequence[Program], iterations: int) -> Iterator[Program]:
    """The programs that remain after the first ``iterations``; CheckpointError if these end inside of a program."""
    first = 0
    for program in programs:
        if first >= iterations:
            yield program
        elif first + program.iterations > iterations:
            raise CheckpointError(
                f"the checkpoint was written after {iterations} iterations, and the schedule runs "
                f"{first + 1} to {first + program.iterations} without a flush in between"
            )
        first += program.iterations
