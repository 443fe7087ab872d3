"""Starts the ranks of a run on this machine, watches them, and ends them all when one fails.

Ranks are forked, so they inherit what this process has imported and captured.
"""

import ctypes
import math
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from time import monotonic
from typing import Any

from auto3d.errors import InputError
from auto3d.garbage import collect_as_usual
from auto3d.runtime.activity import THIS_RANK, ActivityBoard
from auto3d.runtime.measurement import Status
from auto3d.runtime.out_of_memory import OutOfMemoryError, is_out_of_memory
from auto3d.runtime.process.world import LEAVE_S, World, leave
from auto3d.runtime.waiting import PeerLostError, WaitTimeoutError, naming_lost_peers
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import device
from launch.run.devices import check_fork, check_torch, device_pool, showing_devices
from launch.run.diagnosis import Ending, Failure, RanksSnapshot, activity_text, death, diagnose, look
from launch.run.end_now import end_now
from launch.run.streams import stdout_to_stderr
from launch.run.waits import MARGIN_S, WaitLimit

GRACE_S = 2.0  # time for other ranks to report after a failure, because the first report may only name a lost peer
TRACEBACK_LINES = 12
LONGEST_POLL_S = 3600.0

# Lets torch count GPUs without starting CUDA, which a process that forks must not do.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended: the first rank's ``result`` if the status is ok, else the error."""

    status: Status
    result: Any = None
    error: str = ""
    ending: Ending | None = None  # ending of the rank that caused the failure


@dataclass(frozen=True)
class NodeRanks:
    """This node's ranks in a run on several nodes, and the address where the ranks of all nodes meet."""

    ranks: range
    meeting_point: str


Report = Callable[[Any], None]  # sends its argument to the parent process


def run_ranks(
    size: int,
    target: Callable[[World, Report], Any],
    *,
    limit_s: float | None,
    straggle_s: float = math.inf,
    folder: Path | None = None,
    node: NodeRanks | None = None,
    on_report: Callable[[Any], None] = lambda report: None,
    ignore_sigterm: bool = False,
    devices: Sequence[str] = (),
) -> Outcome:
    """Run ``target(world, report)`` in ``size`` forked processes and return how they ended.

    Returns when all ranks have ended, when one has failed, or after ``limit_s``; no process is left running. Raises
    InputError if a rank raised it. What rank 0 reports goes to ``on_report``.

    - ``straggle_s``: how long the others may run after the first rank is done and, plus MARGIN_S, how long a single
      wait may take. Once all results have arrived, the run is a success, and the ranks have LEAVE_S to leave their
      process groups.
    - ``folder``: a private folder for the file by which the ranks meet; by default a temporary folder.
    - ``node``: the ranks to run here, if the run is on several nodes.
    - ``ignore_sigterm``: the ranks ignore SIGTERM, because ``target`` learns in another way that it should end.
    - ``devices``: the GPUs of the ranks here, named as in CUDA_VISIBLE_DEVICES.
    """
    if devices:
        check_fork()
        target = showing_devices(devices, target)
    context = multiprocessing.get_context("fork")
    processes: dict[int, ForkProcess] = {}  # by rank
    pipes: dict[Connection, int] = {}
    board = ActivityBoard(size)
    with tempfile.TemporaryDirectory(prefix="auto3d-", dir=folder) as meeting_folder:
        node_ranks = node or NodeRanks(range(size), f"file://{meeting_folder}/meeting-point")
        try:
            for local_rank, rank in enumerate(node_ranks.ranks):
                here, there = context.Pipe(duplex=False)
                world = World(
                    rank=rank,
                    size=size,
                    local_rank=local_rank,
                    meeting_point=node_ranks.meeting_point,
                    ranks_here=len(node_ranks.ranks),
                )
                process = context.Process(
                    target=_run_rank,
                    args=(target, world, there, board, os.getpid(), ignore_sigterm),
                    name=f"rank {rank}",
                )
                with _signals_deferred():
                    process.start()
                    processes[rank] = process
                there.close()
                pipes[here] = rank
            return _watch(processes, pipes, board, limit_s, straggle_s, on_report)
        finally:
            for started in processes.values():
                started.kill()
            for started in processes.values():
                started.join()


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer SIGINT and SIGTERM while a process starts, so that their handlers find it registered and can end it.

    An exception that a handler raises inside a hook of os.fork would be lost.
    """
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for held_back in received:
        signal.raise_signal(held_back)


def _watch(
    processes: Mapping[int, ForkProcess],
    pipes: dict[Connection, int],
    board: ActivityBoard,
    limit_s: float | None,
    straggle_s: float,
    on_report: Callable[[Any], None],
) -> Outcome:
    """Read the ranks' messages until all are done, or until GRACE_S after the first failure."""
    start = monotonic()
    deadline = math.inf if limit_s is None else start + limit_s
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    first: RanksSnapshot | None = None  # taken at the first failure
    waits = WaitLimit(board, straggle_s + MARGIN_S)
    while pipes:
        at_work = [rank for rank in processes if rank not in results and rank not in failures]
        next_look = min(deadline, waits.next_look(at_work))
        ready = wait(list(pipes), timeout=min(max(0.0, next_look - monotonic()), LONGEST_POLL_S))
        if not ready and monotonic() >= deadline:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                kind, content = pipe.recv()
            except (EOFError, OSError):  # the rank has ended, perhaps in the middle of a message
                del pipes[pipe]
                if rank not in results and rank not in failures:
                    failures[rank] = death(rank, board.read(rank), _exit_code(processes[rank]))
            else:
                if kind == "report" and rank == 0:
                    on_report(content)
                elif kind == "result":
                    results[rank] = content
                    allowed_s = straggle_s if len(results) < len(processes) else LEAVE_S
                    deadline = min(deadline, monotonic() + allowed_s)
                elif kind == "failure":
                    failures[rank] = content
        failures |= waits.failures(rank for rank in at_work if rank not in results and rank not in failures)
        if failures and first is None:
            first = look(board, {rank: _process_id(process) for rank, process in processes.items()})
            deadline = min(deadline, monotonic() + GRACE_S)
    if failures:
        assert first is not None
        failure = diagnose(failures, first)
        if failure.ending is Ending.REFUSED:
            raise InputError(failure.error)
        return Outcome(failure.status, error=failure.error, ending=failure.ending)
    if len(results) < len(processes):
        unfinished = [activity_text(rank, board.read(rank), "still runs") for rank in processes if rank not in results]
        error = "\n".join([f"not done after {monotonic() - start:.0f} s", *unfinished])
        return Outcome(Status.TIMEOUT, error=error, ending=Ending.SILENT)
    return Outcome(Status.OK, result=results[min(results)])


def _exit_code(process: ForkProcess) -> int:
    """Wait for the end of ``process``; returns its exit code, or minus the number of the signal that killed it."""
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _process_id(process: ForkProcess) -> int:
    assert process.pid is not None, "it has been started"
    return process.pid


def _run_rank(
    target: Callable[[World, Report], Any],
    world: World,
    pipe: Connection,
    board: ActivityBoard,
    parent: int,
    ignore_sigterm: bool,
) -> None:
    """Run one rank from start to end: report the outcome of ``target``, then clean up, if it was a success."""
    collect_as_usual()
    THIS_RANK.report_to(board, world.rank)
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore_sigterm else signal.SIG_DFL)
    with stdout_to_stderr():
        try:
            with naming_lost_peers():
                result = target(world, lambda report: pipe.send(("report", report)))
            pipe.send(("result", result))
        except Exception as error:
            pipe.send(("failure", _failure(error, world.rank)))
            end_now(1)
        leave()
    pipe.close()


def _failure(error: Exception, rank: int) -> Failure:
    match error:
        case InputError():
            return Failure(Ending.REFUSED, Status.FAILED, str(error))
        case OutOfMemoryError():
            return Failure(Ending.RAISED, Status.OOM, str(error))
        case WaitTimeoutError():
            return Failure(Ending.WAITED, Status.TIMEOUT, str(error))
        case PeerLostError():
            return Failure(Ending.WAITED, Status.FAILED, str(error))
    status = Status.OOM if is_out_of_memory(error) else Status.FAILED
    return Failure(Ending.RAISED, status, f"rank {rank}: {_last_lines(error)}")


def _last_lines(error: Exception) -> str:
    return "\n".join("".join(traceback.format_exception(error)).rstrip().splitlines()[-TRACEBACK_LINES:])


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, even by SIGKILL (Linux; prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def check_devices(recipe: LoadedRecipe, ranks: int, verb: str = "") -> None:
    """Raise RecipeError if this machine lacks the GPUs for ``ranks`` ranks.

    Of a command ``verb``, the error names others that help.
    """
    if device(recipe.values) == "cuda":
        device_pool(recipe, ranks, verb)
        check_torch(recipe)
