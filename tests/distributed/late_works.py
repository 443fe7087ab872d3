"""gloo that behaves like NCCL: ``wait`` returns at once, and messages and sums arrive some time later.

A tensor is read when its message leaves, not when it is passed to the call, and written when it arrives. So a tensor
that is changed or used too early spoils the training.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

LATEST_S = 0.01


class LateWork:
    """Done when a thread has done it; ``wait`` returns before."""

    def __init__(self) -> None:
        self.done = Event()
        self.problem: BaseException | None = None

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        if self.problem is not None:
            raise self.problem
        return self.done.is_set()


class _Line:
    """A thread that does one task after the other, each a little late, as the stream of a communicator does."""

    def __init__(self, seed: int) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], None], LateWork]] = SimpleQueue()
        self._draw = random.Random(seed)
        Thread(target=self._serve, daemon=True).start()

    def put(self, do: Callable[[], None]) -> LateWork:
        work = LateWork()
        self._tasks.put((do, work))
        return work

    def _serve(self) -> None:
        while True:
            do, work = self._tasks.get()
            time.sleep(self._draw.uniform(0, LATEST_S))
            try:
                do()
            except BaseException as problem:
                work.problem = problem
            work.done.set()


@contextmanager
def late_works() -> Iterator[None]:
    """Inside, messages and asynchronous sums of this process arrive late, in order on each line."""
    lines: dict[Any, _Line] = {}
    real = {name: getattr(dist, name) for name in ("isend", "irecv", "all_reduce")}

    def line(*key: Any) -> _Line:
        if key not in lines:
            lines[key] = _Line(len(lines))
        return lines[key]

    def isend(tensor: torch.Tensor, peer: int, group: Any = None) -> LateWork:
        return line("to", peer, group).put(lambda: real["isend"](tensor.clone(), peer, group=group).wait())

    def irecv(tensor: torch.Tensor, peer: int, group: Any = None) -> LateWork:
        def do() -> None:
            arrived = torch.empty_like(tensor)
            real["irecv"](arrived, peer, group=group).wait()
            with torch.no_grad():
                tensor.copy_(arrived)

        return line("from", peer, group).put(do)

    def all_reduce(tensor: torch.Tensor, *, group: Any = None, async_op: bool = False, **options: Any) -> Any:
        if not async_op:
            return real["all_reduce"](tensor, group=group, **options)

        def do() -> None:
            total = tensor.clone()
            real["all_reduce"](total, group=group, **options)
            with torch.no_grad():
                tensor.copy_(total)

        return line("sum", group).put(do)

    with ExitStack() as stack:
        for name, late in (("isend", isend), ("irecv", irecv), ("all_reduce", all_reduce)):
            stack.enter_context(patch.object(dist, name, late))
        yield
