"""The time of an emulated device, as opposed to its process's time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from resource import RUSAGE_THREAD, getrusage


class DeviceClock:
    """The time from which the emulated device of this rank is free, on the clock of rank 0.

    ``ahead`` has the seconds by which this process's ``time.perf_counter`` is ahead of that clock.

    An operation starts when the device is free and its inputs are there. It does not start later because this process
    was still busy with sending: a real device gets its operations ahead of time, too.
    """

    def __init__(self, ahead: float = 0.0) -> None:
        self._ahead = ahead
        self.free = self._now()

    def idle(self) -> None:
        """The device had nothing to do until now."""
        self.free = max(self.free, self._now())

    @contextmanager
    def needing(self) -> Iterator[None]:
        """Inside, this process waits for what the next operation needs. The device idles only if that was not there."""
        before = _voluntary_switches()
        yield
        if _voluntary_switches() > before:
            self.idle()

    def work(self, seconds: float) -> None:
        """Return when an operation that takes so many ``seconds`` is done."""
        self.until(self.free + seconds)

    def until(self, end: float) -> None:
        """Return when the device is free and it is ``end``, a time on the clock of rank 0."""
        self.free = max(self.free, end)
        time.sleep(max(0.0, self.free - self._now()))

    def _now(self) -> float:
        return time.perf_counter() - self._ahead


def _voluntary_switches() -> int:
    """How often this thread had to wait for something; gloo does not report whether a message has arrived."""
    return getrusage(RUSAGE_THREAD).ru_nvcsw
