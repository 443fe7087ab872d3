"""Peak memory of this process."""

from pathlib import Path

import torch

from auto3d.allocator import return_freed_memory


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
