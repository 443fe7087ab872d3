"""Clocks for what a device computes: a CPU's work is over when its call returns, a GPU's is queued."""

from time import perf_counter

import torch

Mark = float | torch.cuda.Event  # a moment in the work of the device


class CpuClock:
    """The time of the host."""

    queued = 1  # repetitions of what is timed between two calls of ``settle``

    def mark(self) -> Mark:
        return perf_counter()

    def settle(self) -> None:
        """Nothing is pending on a CPU."""

    def seconds(self, begin: Mark, end: Mark) -> float:
        return end - begin


class CudaClock:
    """Events in the queue of a GPU: between them it works without a pause, as in training, where the host is ahead.

    A synchronisation around each part would add the time that its first kernels take to be launched.
    """

    queued = 8  # the first of them begins on an idle device; the median is that of the others

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for all that is queued; ``seconds`` needs marks from before."""
        torch.cuda.synchronize(self._device)

    def seconds(self, begin: Mark, end: Mark) -> float:
        return begin.elapsed_time(end) / 1000


Clock = CpuClock | CudaClock


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()
