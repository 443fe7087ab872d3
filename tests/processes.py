"""A few forked processes that stay, so that each distributed test need not pay for starting its own."""

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

from auto3d.runtime.process.world import World, leave
from launch.run.ranks import die_with_parent
from tests.models import num_captures

CASE_TIMEOUT_S = 240  # a test has 600 for all of its cases
import_module("transformers.optimization")  # 260 modules, which else each rank imports, again after every fork


class ProcessPool:
    """Runs ``function(world, *arguments)`` as every rank of a world, as often as asked.

    A capture takes longer than a test's training. So each model is captured once, in the process that calls ``run``,
    and the ranks inherit it: ``run`` forks them anew if this process has captured more since it forked them. It also
    does after a case that failed, of which some ranks may still be waiting for others.
    """

    def __init__(
        self, size: int, *, start: Literal["fork", "spawn"] = "fork", begin: Callable[[int], None] | None = None
    ) -> None:
        """At most ``size`` ranks, forked as a case needs them; ``begin(rank)`` runs first in each process.

        With ``start="spawn"`` ranks inherit nothing: they import and capture for themselves, as ranks on a GPU must
        whose parent has run a backward.
        """
        self._start: Literal["fork", "spawn"] = start
        self._begin = begin
        self._folder = tempfile.TemporaryDirectory(prefix="auto3d-test-")
        self._size = size
        self._cases = 0
        self._captures = 0  # how many models this process had captured when it forked the ranks
        self._in_step = False  # all ranks have answered, and wait for the next case
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function`` returned on each of ``size`` ranks; an exception on one is raised here."""
        self._cases += 1
        self._fork_if_needed(size)
        self._in_step = False
        meeting_point = f"file://{self._folder.name}/{self._cases}"
        for rank, pipe in enumerate(self._pipes[:size]):
            world = World(rank=rank, size=size, local_rank=rank, meeting_point=meeting_point)
            pipe.send((function, world, arguments))
        answers = []
        end = time.monotonic() + CASE_TIMEOUT_S
        for pipe in self._pipes[:size]:
            if not pipe.poll(max(0.0, end - time.monotonic())):
                answers.append((False, f"it gave no answer within {CASE_TIMEOUT_S} s"))
                continue
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append((False, "it died"))
        errors = [f"rank {rank}:\n{answer}" for rank, (fine, answer) in enumerate(answers) if not fine]
        assert not errors, "\n".join(errors)
        self._in_step = True
        return [answer for _, answer in answers]

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def _fork_if_needed(self, size: int) -> None:
        assert size <= self._size
        captures = num_captures()
        if not self._in_step or (captures != self._captures and self._start == "fork"):
            self._end()
            self._captures = captures
        context = multiprocessing.get_context(self._start)
        for rank in range(len(self._processes), size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, os.getpid(), rank, self._begin), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []


def _serve(pipe: Any, parent: int, rank: int, begin: Callable[[int], None] | None) -> None:
    die_with_parent(parent)
    if begin is not None:
        begin(rank)
    gc.freeze()  # a collection would touch, and so copy, all that this process shares with its parent
    while True:
        function, world, arguments = pipe.recv()
        try:
            answer = (True, function(world, *arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        leave()
        gc.collect()  # process groups are in cycles, and gloo's threads in them wake up 100 times a second
        pipe.send(answer)
