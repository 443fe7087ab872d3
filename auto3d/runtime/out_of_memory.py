"""Running out of memory, told as such: where it happened, and what was predicted to be needed there."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.cost.device_memory import DeviceMemory

# The words of torch and of libraries whose errors it passes on, as a RuntimeError or one of its subclasses.
# NCCL's error holds its last warning alone: after "Cuda failure 'out of memory'" that is "Failed to CUDA calloc".
_WORDS = re.compile(
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
    """A rank that ran out of its device's memory, or of its machine's."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is what torch, one of its libraries or Python raises when memory runs out."""
    if isinstance(error, (OutOfMemoryError, torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None


def words_of(error: BaseException) -> str:
    """The line of ``error`` that says that memory ran out, or its first."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in lines if _WORDS.search(line)), lines[0]).strip()


@dataclass(frozen=True)
class MemoryWatch:
    """Tells where this rank ran out of memory, and what was predicted for its pipeline device."""

    device: int
    predicted: DeviceMemory

    @contextmanager
    def during(self, what: object) -> Iterator[None]:
        """Where memory runs out inside, raise OutOfMemoryError that says so of ``what``, an operation for example."""
        try:
            yield
        except Exception as error:
            if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"rank {dist.get_rank()} ({socket.gethostname()}) ran out of memory in {what}; predicted for pipeline "
                f"device {self.device}: {self.predicted}"
            ) from error
