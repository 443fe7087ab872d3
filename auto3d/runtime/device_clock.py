"""The time of an emulated device, as opposed to that of its process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from resource import RUSAGE_THREAD, getrusage


class DeviceClock:
    """The time from which the emulated device of this rank is free.

    An operation starts when the device is free and its inputs are there. It does not start later because this process
    was still busy with sending: a real device gets its operations ahead of time, too.
    """

    def __init__(self) -> None:
        self.free = time.perf_counter()

    def idle(self) -> None:
        """The device had nothing to do until now."""
        self.free = max(self.free, time.perf_counter())

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
        """Return when the device is free and it is ``end``, a time of ``time.perf_counter``."""
        self.free = max(self.free, end)
        time.sleep(max(0.0, self.free - time.perf_counter()))


def _voluntary_switches() -> int:
    """How often this thread had to wait for something; gloo does not report whether a message has arrived."""
    return getrusage(RUSAGE_THREAD).ru_nvcsw
