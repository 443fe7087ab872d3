"""A profile times subgraphs on a GPU, here a fake one, by events and with few synchronisations."""

import pytest
import torch

from auto3d.runtime.clock import CpuClock, CudaClock, clock_of
from auto3d.runtime.profile import subgraph_timing
from auto3d.runtime.profile.link_timing import time_communication

GPU = torch.device("cuda", 0)
SECONDS = {"forward": 3.0, "backward": 5.0, "backward_input": 2.0, "backward_weight": 4.0}


class FakeGpu:
    """A queue whose work takes fixed times. The time of an event is known only after a synchronisation."""

    def __init__(self) -> None:
        self.busy_until = 0.0  # time at which all queued work is done
        self.synchronisations = 0
        self.pending: list[FakeEvent] = []

    def synchronize(self, device: torch.device) -> None:
        assert device == GPU
        self.synchronisations += 1
        for event in self.pending:
            event.known = True
        self.pending.clear()


class FakeEvent:
    def __init__(self, gpu: FakeGpu, enable_timing: bool) -> None:
        assert enable_timing
        self.gpu, self.known = gpu, False

    def record(self, stream: str) -> None:
        assert stream == "the current stream"
        self.time = self.gpu.busy_until
        self.gpu.pending.append(self)

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert self.known, "the event is still in the queue"
        assert later.known, "the event is still in the queue"
        return 1000 * (later.time - self.time)


class FakeSubgraph:
    """A subgraph that takes SECONDS, and a tenth more with each repetition."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.repetitions = 0
        self._gpu = gpu

    def __getattr__(self, name: str):
        def run() -> None:
            self.repetitions += name == "forward"
            self._gpu.busy_until += SECONDS[name] * (1 + self.repetitions / 10)

        return run


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: FakeEvent(gpu, enable_timing))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current stream")
    return gpu


def test_repetitions_on_a_gpu_are_queued_and_awaited_together(gpu, monkeypatch):
    monkeypatch.setattr(subgraph_timing, "ROUND_S", 0.0)
    whole, split = FakeSubgraph(gpu), FakeSubgraph(gpu)
    found = subgraph_timing.time_subgraph(whole, split, CudaClock(GPU))
    assert gpu.synchronisations == 1
    assert len(found) == CudaClock.queued >= subgraph_timing.MIN_REPETITIONS
    for number, times in enumerate(found, start=2):  # the first is not measured
        factor = 1 + number / 10
        assert times == pytest.approx((3 * factor, 5 * factor, 4 * factor))


def test_a_round_has_its_length_and_one_synchronisation_for_many_repetitions(gpu, monkeypatch):
    host = iter(range(1000))
    monkeypatch.setattr(subgraph_timing, "perf_counter", lambda: float(next(host)))
    monkeypatch.setattr(subgraph_timing, "ROUND_S", 4.5)
    found = subgraph_timing.time_subgraph(FakeSubgraph(gpu), FakeSubgraph(gpu), CudaClock(GPU))
    assert gpu.synchronisations == 5
    assert len(found) == 5 * CudaClock.queued


def test_messages_on_a_gpu_are_queued_too(gpu):
    def there_and_back() -> None:
        gpu.busy_until += 2.0

    assert time_communication(there_and_back, CudaClock(GPU)) == pytest.approx(2.0)
    assert gpu.synchronisations == 1
    assert gpu.busy_until == 2.0 * CudaClock.queued


def test_a_cpu_is_timed_by_the_host(monkeypatch):
    monkeypatch.setattr(subgraph_timing, "ROUND_S", 0.0)
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, CpuClock)
    assert isinstance(clock_of(GPU), CudaClock)
    work = FakeGpu()
    monkeypatch.setattr("auto3d.runtime.clock.perf_counter", lambda: work.busy_until)
    found = subgraph_timing.time_subgraph(FakeSubgraph(work), FakeSubgraph(work), clock)
    assert len(found) == subgraph_timing.MIN_REPETITIONS
    assert found[0] == pytest.approx((3 * 1.2, 5 * 1.2, 4 * 1.2))
