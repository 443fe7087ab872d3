"""How far a rank's process may run ahead of its device, and how it waits when it may not go further.

A GPU gets its operations ahead of time, so that it never waits for the process. Then no call of the process waits for a
message; the device's queue does. So the process polls, with a deadline, whether the oldest queued operations are done.
If an operation is not, the reason is the first of its messages or sums over ranks that has not arrived. A CPU has no
queue: there the process itself waits for each message.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.waiting import poll, wait
from auto3d.runtime.watch.observer import StepObserver

OPERATIONS_AHEAD = 2  # operations queued behind the running operation: enough to hide the time that queueing takes


@dataclass(frozen=True)
class _Queued:
    """An operation that the device, as far as the process knows, has not completed."""

    at: str
    waits: list[tuple[torch.cuda.Event, str]]  # the arrivals that it waits for, with their names for errors
    end: torch.cuda.Event


class RunAhead:
    """Bounds how far a rank runs ahead. Between ``begin`` and ``end`` it queues one operation, or runs it on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._has_queue = device.type == "cuda"
        self.observer: StepObserver | None = None  # is told of each operation and of each wait for other ranks
        self._at = ""
        self._waits: list[tuple[torch.cuda.Event, str]] = []  # waits of the operation that is being queued
        self._queued: deque[_Queued] = deque()

    def begin(self, at: str) -> None:
        """Begin the operation that ``at`` describes in errors, once the device is near enough."""
        if self._queued:
            self._wait_until(OPERATIONS_AHEAD)
        self._at = at
        THIS_RANK.set_phase(at)

    def wait(self, work: dist.Work, what: str) -> None:
        """Let everything that is queued from now on wait for ``work``, which errors call ``what``."""
        if self.observer is not None:
            self.observer.begin_wait()
        if self._has_queue:
            work.wait()
            # An event behind the wait, not the Work: a Work of NCCL owns the tensors of its result.
            arrived = torch.cuda.Event()
            arrived.record()
            self._waits.append((arrived, what))
        else:
            wait(work, what=what)
        if self.observer is not None:
            self.observer.end_wait()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits for another."""
        if self.observer is not None:
            self.observer.begin_wait()
        yield
        if self.observer is not None:
            self.observer.end_wait()

    def end(self) -> None:
        """Note that the operation is queued."""
        if self._has_queue:
            end = torch.cuda.Event()
            end.record()
            self._queued.append(_Queued(self._at, self._waits, end))
            self._waits = []

    def catch_up(self) -> None:
        """Wait until the device has completed everything that is queued."""
        self.end()
        self._wait_until(0)
        THIS_RANK.set_phase(self._at)

    def _wait_until(self, remaining: int) -> None:
        """Wait until at most ``remaining`` queued operations are not completed."""
        while len(self._queued) > remaining:
            first = self._queued[0]
            THIS_RANK.set_phase(first.at)
            for arrived, what in first.waits:
                poll(arrived.query, what=what)
            poll(first.end.query, what="its device to compute")
            self._queued.popleft()
