"""Running out of memory, told as such: where it happened, and what was predicted to be needed there."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.cost.memory import DeviceMemory


class OutOfMemoryError(RuntimeError):
    """A rank that ran out of its device's memory, or of its machine's."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is what torch or Python raises when memory runs out."""
    # torch's allocator for the CPU raises a plain RuntimeError; these are its own words
    known = (OutOfMemoryError, torch.OutOfMemoryError, MemoryError)
    return isinstance(error, known) or "DefaultCPUAllocator: can't allocate" in str(error)


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
