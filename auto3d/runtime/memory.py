"""Peak memory of this process."""

from dataclasses import dataclass
from pathlib import Path

import torch

from auto3d.allocator import return_freed_memory


@dataclass(frozen=True, kw_only=True)
class PeakBytes:
    """Peak memory of a rank; a CPU rank has ``allocated`` alone."""

    allocated: int  # bytes of live tensors on a GPU; on a CPU, growth of the process
    reserved: int | None = None  # bytes that torch's caching allocator held, free pieces included
    used: int | None = None  # bytes that the device had in use: reserved, and all that torch does not allocate


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

    def read(self) -> PeakBytes:
        """The peaks up to here.

        ``used`` is the peak of ``reserved`` plus what the device has in use outside of this allocator when it is read:
        the CUDA context with its loaded kernels, and NCCL's buffers. These stay until the process ends, so reading late
        misses none. (cuBLAS's workspaces come from torch's allocator.) The device does not say whose memory it is: if
        other processes share it, theirs is included. NVML would tell processes apart, but not inside a container, whose
        process ids differ from the host's.
        """
        if self._device.type != "cuda":
            return PeakBytes(allocated=self.bytes())
        free, total = torch.cuda.mem_get_info(self._device)  # for a MIG instance, its own memory
        outside = total - free - torch.cuda.memory_reserved(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        return PeakBytes(allocated=self.bytes(), reserved=reserved, used=reserved + outside)

    def bytes(self) -> int:
        """``allocated`` alone."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, _status_bytes("VmHWM") - _status_bytes("RssFile") - self._start)


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) * 1024
