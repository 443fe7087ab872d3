"""Recognise out-of-memory errors, and report where they happened and how much memory was predicted there."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.cost.memory.device import DeviceMemory

# Messages of torch, and of libraries whose errors torch raises as a RuntimeError or one of its subclasses. An error of
# NCCL holds only its last warning: after "Cuda failure 'out of memory'" that is "Failed to CUDA calloc".
_OUT_OF_MEMORY = re.compile(
    r"""
    DefaultCPUAllocator:\ can't\ allocate
    | \bCUDA\ out\ of\ memory
    | \bCUDA\ (driver\ )?error:\ out\ of\ memory     # the context, pinned memory, a kernel's first use
    | \bCU[A-Z]+_\w*ALLOC(ATION)?_FAILED\b          # cuBLAS, cuDNN, cuSOLVER, cuFFT
    | \bCuda\ failure\ (\d+\ )?'out\ of\ memory'      # NCCL
    | \bFailed\ to\ CUDA\ (host\ )?[cm]?alloc\b       # NCCL
    """,
    re.VERBOSE,
)


class OutOfMemoryError(RuntimeError):
    """A rank ran out of memory, of its device or of its machine."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is raised by torch, one of its libraries or Python when memory runs out."""
    if isinstance(error, (OutOfMemoryError, torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def out_of_memory_line(error: BaseException) -> str:
    """The line of ``error`` that says that memory ran out; its first line if there is none."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in lines if _OUT_OF_MEMORY.search(line)), lines[0]).strip()


@dataclass(frozen=True)
class MemoryWatch:
    """Reports where this rank ran out of memory, and the memory predicted for its pipeline device."""

    device: int  # the pipeline device
    predicted: DeviceMemory

    @contextmanager
    def during(self, what: object) -> Iterator[None]:
        """Raise an OutOfMemoryError that names ``what`` if memory runs out inside."""
        try:
            yield
        except Exception as error:
            self.check(error, what)
            raise

    def check(self, error: Exception, what: object) -> None:
        """Raise an OutOfMemoryError that names ``what``, such as an operation, if ``error`` is that memory ran out."""
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            return
        raise OutOfMemoryError(
            f"rank {dist.get_rank()} ({socket.gethostname()}) ran out of memory in {what}; predicted for pipeline "
            f"device {self.device}: {self.predicted}"
        ) from error
