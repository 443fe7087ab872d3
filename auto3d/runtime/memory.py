"""Peak memory of this process: what a GPU allocated, or what a CPU process has grown by."""

from pathlib import Path

import torch


class PeakMemory:
    """Counts from its construction on: a CPU process's interpreter and libraries are not the model's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present (proc(5))
            self._start = _status_bytes("VmRSS")

    def bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, _status_bytes("VmHWM") - self._start)


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) * 1024
