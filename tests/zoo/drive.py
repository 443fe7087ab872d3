"""Run entries, each in a forked process with a time-out and a memory limit."""

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic

import torch
from torch import nn

from auto3d.capture.model import capture
from launch.run.ranks import die_with_parent
from tests.zoo.compare import run
from tests.zoo.entry import Entry, integers, normal
from tests.zoo.outcome import Outcome, Result

ENTRY_TIMEOUT_S = 240.0
RANKS_TIMEOUT_S = 90.0
MEMORY_BYTES = 6 * 2**30  # limit of the private memory of one process


@dataclass(frozen=True)
class Finished:
    entry: Entry
    outcome: Outcome
    seconds: float


def warm_up() -> None:
    """Import everything that a capture needs, so that forked processes need not."""
    import transformers
    import transformers.modeling_utils
    import transformers.optimization

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.linear(x), label)

    fields = {"x": normal(2), "label": integers()}
    capture(Small, Entry(name="", family="", build=Small, inputs=fields).data.input_specs(), 2)


def run_all(
    entries: Sequence[Entry],
    *,
    jobs: int,
    timeout_s: float = ENTRY_TIMEOUT_S,
    task: Callable[[Entry], Outcome] = lambda entry: run(entry, timeout_s=RANKS_TIMEOUT_S),
) -> Iterator[Finished]:
    """Yield each entry when it ends; ``jobs`` of them run at the same time."""
    context = multiprocessing.get_context("fork")
    pending = list(entries)[::-1]
    running: dict[Connection, tuple[Entry, multiprocessing.Process, float, Path]] = {}
    with tempfile.TemporaryDirectory(prefix="auto3d-zoo-") as folder:
        try:
            while pending or running:
                while pending and len(running) < jobs:
                    entry, log = pending.pop(), Path(folder) / f"{len(pending)}.log"
                    here, there = context.Pipe(duplex=False)
                    process = context.Process(target=_serve, args=(there, log, os.getpid(), task, entry))
                    process.start()
                    there.close()
                    running[here] = (entry, process, monotonic(), log)
                next_end = min(start for _, _, start, _ in running.values()) + timeout_s
                ready = wait(list(running), timeout=max(0.0, next_end - monotonic()))
                late = [pipe for pipe, (_, _, start, _) in running.items() if monotonic() >= start + timeout_s]
                for pipe in {*ready, *late}:
                    entry, process, start, log = running.pop(pipe)
                    outcome = _outcome(pipe, process, log) if pipe in ready else None
                    process.kill()  # the ranks that it forked die with it
                    process.join()
                    pipe.close()
                    hung = Outcome(Result.HUNG, f"not done after {timeout_s:g} s", _tail(log))
                    yield Finished(entry, outcome or hung, monotonic() - start)
        finally:
            for _, process, _, _ in running.values():
                process.kill()
                process.join()


def _outcome(pipe: Connection, process: multiprocessing.Process, log: Path) -> Outcome:
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        how = f"exit code {process.exitcode}"
        if process.exitcode < 0:
            how = signal.Signals(-process.exitcode).name
        return Outcome(Result.CRASHED, f"the process ended by {how}", _tail(log))


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:]) if log.exists() else ""


def _serve(pipe: Connection, log: Path, parent: int, task: Callable[[Entry], Outcome], entry: Entry) -> None:
    die_with_parent(parent)
    with suppress(ValueError):  # a lower limit is already set
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, sys.__stdout__.fileno())
    os.dup2(descriptor, sys.__stderr__.fileno())
    pipe.send(task(entry))
    pipe.close()
