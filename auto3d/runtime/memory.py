"""Memory of this process: its peak, and what a CPU's allocator does with what is freed."""

import ctypes
from pathlib import Path

import torch

_C_LIBRARY = ctypes.CDLL(None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def return_freed_memory() -> None:
    """Give back to the kernel what was freed; else glibc keeps it, and the process stays as large as it ever was."""
    if hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)


def keep_freed_memory() -> None:
    """Have glibc keep what is freed from now on, for the next micro-batch.

    By default it gives the kernel what each backward frees at the top of the heap, and takes it again at the next
    forward, page by page: some percent of an iteration.
    """
    if hasattr(_C_LIBRARY, "mallopt"):
        _C_LIBRARY.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        _C_LIBRARY.mallopt(_M_MMAP_THRESHOLD, 2**25)  # its largest; larger tensors have memory of their own


class PeakMemory:
    """What a GPU allocated, or what a CPU process has grown by at most; its interpreter and libraries are not counted.

    It counts from its construction on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            return_freed_memory()  # else as much of what follows would go into it, and not be seen
            Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present (proc(5))
            self._start = _status_bytes("VmRSS") - _status_bytes("RssFile")

    def bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, _status_bytes("VmHWM") - _status_bytes("RssFile") - self._start)


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) * 1024
