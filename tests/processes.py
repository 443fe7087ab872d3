"""A few forked processes that stay, so that each distributed test need not pay for starting its own."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from auto3d.runtime.world import World, leave
from launch.run.ranks import die_with_parent

CASE_TIMEOUT_S = 120


class ProcessPool:
    """Runs ``function(world, *arguments)`` as every rank of a world, as often as asked."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory(prefix="auto3d-test-")
        self._cases = 0
        self._pipes, self._processes = [], []
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, os.getpid()), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function`` returned on each of ``size`` ranks; an exception on one is raised here."""
        self._cases += 1
        meeting_point = f"file://{self._folder.name}/{self._cases}"
        for rank, pipe in enumerate(self._pipes[:size]):
            world = World(rank=rank, size=size, local_rank=rank, meeting_point=meeting_point)
            pipe.send((function, world, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes[:size]):
            assert pipe.poll(CASE_TIMEOUT_S), f"rank {rank} gave no answer within {CASE_TIMEOUT_S} s"
            answers.append(pipe.recv())
        errors = [f"rank {rank}:\n{answer}" for rank, (fine, answer) in enumerate(answers) if not fine]
        assert not errors, "\n".join(errors)
        return [answer for _, answer in answers]

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        self._folder.cleanup()


def _serve(pipe: Any, parent: int) -> None:
    die_with_parent(parent)
    while True:
        function, world, arguments = pipe.recv()
        try:
            answer = (True, function(world, *arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        leave()
        pipe.send(answer)
