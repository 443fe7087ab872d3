"""Peak memory of this process."""

from dataclasses import dataclass
from pathlib import Path

import torch

from auto3d.allocator import return_freed_memory
from auto3d.process_memory import status_bytes


@dataclass(frozen=True, kw_only=True)
class PeakBytes:
    """Peak memory of a rank; only ``allocated`` is known on a CPU."""

    allocated: int  # bytes of live tensors on a GPU; growth of the process on a CPU
    reserved: int | None = None  # bytes reserved by torch's caching allocator, including blocks that are free
    used: int | None = None  # bytes in use on the device: reserved, plus everything that torch does not allocate


class PeakMemory:
    """Peak memory since this object was made: bytes allocated on a GPU, or growth of a CPU process.

    The interpreter and its libraries, loaded before, do not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()
        if device.type != "cuda":
            self._start = status_bytes("VmRSS") - status_bytes("RssFile")

    def restart(self) -> None:
        """Forget the peaks so far; memory that is in use still counts."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            return_freed_memory()  # otherwise later allocations would reuse freed memory and not count as growth
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present size (proc(5))

    def read(self) -> PeakBytes:
        """The peaks so far.

        ``used`` is the peak of ``reserved``, plus the memory in use outside of torch's allocator at the time of this
        call: the CUDA context with its loaded kernels, and NCCL's buffers. Those stay until the process ends, so a late
        call misses none of them. (cuBLAS's workspaces come from torch's allocator.) The device does not report which
        process uses its memory: if other processes use the same device, their memory is included. NVML distinguishes
        processes, but not inside a container, where process ids differ from the host's.
        """
        if self._device.type != "cuda":
            return PeakBytes(allocated=self.bytes())
        free, total = torch.cuda.mem_get_info(self._device)  # on a MIG instance: that instance's memory
        outside = total - free - torch.cuda.memory_reserved(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        return PeakBytes(allocated=self.bytes(), reserved=reserved, used=reserved + outside)

    def bytes(self) -> int:
        """``PeakBytes.allocated`` so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, status_bytes("VmHWM") - status_bytes("RssFile") - self._start)
