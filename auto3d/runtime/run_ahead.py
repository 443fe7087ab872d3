"""How far a rank's process may be ahead of its device, and what it waits for when it may not go further.

A GPU is given its operations ahead, so that it never waits for the process. Nothing in the process then waits for a
message: the device's queue does. So the process looks, with a deadline, whether the operations that it queued first are
done; if one is not, it is because of the first of its messages, or sums over ranks, that has not come. A CPU has no
queue: there the process waits for each message itself.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.waiting import poll, wait

OPERATIONS_AHEAD = 2  # queued behind the one that runs: this hides the time that queueing one takes


@dataclass(frozen=True)
class _Queued:
    """An operation that the device has not ended, as far as is known."""

    at: str
    waits: list[tuple[dist.Work, str]]  # each with what it is
    end: torch.cuda.Event


class RunAhead:
    """Of one rank. Between ``begin`` and ``end`` the process queues one operation, or runs it on a CPU."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._has_queue = device.type == "cuda"
        self.timeout_s = timeout_s
        self._at = ""
        self._waits: list[tuple[dist.Work, str]] = []  # the waits of the operation that is being queued
        self._queued: deque[_Queued] = deque()

    def begin(self, at: str) -> None:
        """Come to the operation that is told by ``at``, once the device is near enough."""
        self._wait_until(OPERATIONS_AHEAD)
        self._at = at
        THIS_RANK.set_phase(at)

    def wait(self, work: dist.Work, what: str) -> None:
        """Let what is queued from here on wait until ``work`` is done, which is ``what`` if it does not end."""
        if self._has_queue:
            work.wait()
            self._waits.append((work, what))
        else:
            wait(work, timeout_s=self.timeout_s, what=what)

    def end(self) -> None:
        """The operation is queued."""
        if self._has_queue:
            end = torch.cuda.Event()
            end.record()
            self._queued.append(_Queued(self._at, self._waits, end))
            self._waits = []

    def catch_up(self) -> None:
        """Wait until the device has done all that is queued."""
        self.end()
        self._wait_until(0)
        THIS_RANK.set_phase(self._at)

    def _wait_until(self, left: int) -> None:
        """At most so many operations are left."""
        while len(self._queued) > left:
            first = self._queued[0]
            THIS_RANK.set_phase(first.at)
            for work, what in first.waits:
                poll(work.is_completed, timeout_s=self.timeout_s, what=what)
            poll(first.end.query, timeout_s=self.timeout_s, what="its device to compute")
            self._queued.popleft()
