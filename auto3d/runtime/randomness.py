"""Random numbers that depend on what is computed, not on where or when.

Each random operation is seeded from (plan's seed, iteration, micro-batch, operation), so dropout is the same whatever
the degrees and the schedule, and a recomputed forward draws what the first one drew. Replicas of a stage that share a
micro-batch count each part as a micro-batch of its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_MASK = (1 << 64) - 1


class Randomness:
    """The position from which the next random operation is seeded.

    A program numbers its micro-batches on through its iterations, each of which has ``micro_batches``. Where replicas
    of a stage share a micro-batch, each draws its own numbers for its ``part`` of it.
    """

    def __init__(
        self,
        seed: int,
        *,
        first_micro_batch: int,
        micro_batches: int,
        device: torch.device,
        part: int = 0,
        replicas: int = 1,
    ) -> None:
        self.iteration = 0  # the first of the program that runs
        self.micro_batch = 0  # of the program; ``first_micro_batch`` makes this replica's one of the global batch
        self._seed = seed
        self._first_micro_batch = first_micro_batch
        self._micro_batches = micro_batches
        self._part, self._replicas = part, replicas
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index]
        else:
            self._generator = torch.default_generator

    def seed(self, operation: int) -> None:
        """Seed the generator for operation number ``operation`` of the Graph."""
        later, index = divmod(self.micro_batch, self._micro_batches)
        part = (self._first_micro_batch + index) * self._replicas + self._part
        mixed = 0
        for number in (self._seed, self.iteration + later, part, operation):
            mixed = _mix(mixed ^ (number & _MASK))
        self._generator.manual_seed(mixed)


class SeededOperation(nn.Module):
    """A random operator of a stage's program, seeded before each call."""

    def __init__(self, target: Callable, operation: int, randomness: Randomness) -> None:
        super().__init__()
        self._target = target
        self._operation = operation
        self._randomness = randomness

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._randomness.seed(self._operation)
        return self._target(*args, **kwargs)


def _mix(number: int) -> int:
    """The finaliser of SplitMix64: neighbouring inputs give unrelated outputs."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
