"""Clocks for the work of a device: a CPU has done it when the call returns, a GPU queues it."""

from time import perf_counter

import torch

Mark = float | torch.cuda.Event  # a point in the work of the device


class CpuClock:
    """A clock for a CPU: the time of the host."""

    queued = 1  # timed repetitions between two calls of ``settle``

    def mark(self) -> Mark:
        return perf_counter()

    def settle(self) -> None:
        """Nothing is pending on a CPU."""

    def seconds(self, begin: Mark, end: Mark) -> float:
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin


class CudaClock:
    """A clock for a GPU: events in its queue.

    Between events the GPU works without a pause, as in training, where the host runs ahead. A synchronisation around
    each part would add the launch time of the part's first kernels.
    """

    queued = 8  # enough that the median excludes the first repetition, which begins on an idle device

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for all queued work. ``seconds`` accepts only marks made before this call."""
        torch.cuda.synchronize(self._device)

    def seconds(self, begin: Mark, end: Mark) -> float:
        assert not isinstance(begin, float)
        assert not isinstance(end, float)
        return begin.elapsed_time(end) / 1000


Clock = CpuClock | CudaClock


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()
