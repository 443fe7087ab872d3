"""Peak memory of a GPU: of tensors, of the allocator, and of everything in use on the device."""

import pytest
import torch

from auto3d.runtime.watch.peak_memory import PeakBytes, PeakMemory

MIB = 2**20


@pytest.fixture
def gpu(monkeypatch):
    """A device of 1000 MiB whose counters a test sets, in place of torch's."""
    state = {"allocated": 0, "reserved": 0, "free": 1000 * MIB, "peak_allocated": 0, "peak_reserved": 0}

    def reset(device: torch.device) -> None:
        state.update(peak_allocated=state["allocated"], peak_reserved=state["reserved"])

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (state["free"], 1000 * MIB))
    for function, name in {
        "memory_reserved": "reserved",
        "max_memory_allocated": "peak_allocated",
        "max_memory_reserved": "peak_reserved",
    }.items():
        monkeypatch.setattr(torch.cuda, function, lambda device, name=name: state[name])
    return state


def test_used_memory_is_the_reserved_peak_plus_memory_outside_of_torch(gpu):
    """Even if the allocator returned memory before the peak is read."""
    gpu.update(allocated=10 * MIB, reserved=20 * MIB, peak_allocated=900 * MIB, peak_reserved=950 * MIB)
    memory = PeakMemory(torch.device("cuda", 0))
    gpu.update(peak_allocated=300 * MIB, peak_reserved=400 * MIB, reserved=100 * MIB)
    gpu["free"] = (1000 - 100 - 250) * MIB  # 250 MiB are the context, NCCL and the like
    assert memory.read() == PeakBytes(allocated=300 * MIB, reserved=400 * MIB, used=650 * MIB)


def test_earlier_peaks_do_not_count(gpu):
    gpu.update(allocated=10 * MIB, reserved=20 * MIB, peak_allocated=900 * MIB, peak_reserved=950 * MIB)
    gpu["free"] = 980 * MIB
    assert PeakMemory(torch.device("cuda", 0)).read() == PeakBytes(allocated=10 * MIB, reserved=20 * MIB, used=20 * MIB)


def test_a_cpu_reports_only_allocated_memory():
    memory = PeakMemory(torch.device("cpu"))
    held = torch.ones(64 * MIB // 4)
    peak = memory.read()
    assert 0.9 * held.nbytes < peak.allocated < 2 * held.nbytes
    assert peak.reserved is None
    assert peak.used is None
