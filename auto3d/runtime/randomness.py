"""Random numbers that depend on what is computed, not on where or when.

Each random operation is seeded from (seed of the plan, iteration, micro-batch, operation). So dropout is the same for
all degrees and schedules, and a recomputed forward draws the same numbers as the first forward. Replicas of a stage
each seed their slice of a micro-batch as a micro-batch of its own. The ranks of a tensor-parallel group draw the same
numbers for a value that all of them have, and each draws numbers of its own for its shard of a split value.

Stages on a CPU draw from torch's own generator, from which a script, its callbacks and its data may draw too, on all
ranks alike. So that generator is as before after each random operation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_MASK = (1 << 64) - 1


class Randomness:
    """Seeds the generator of ``device`` for each random operation of a rank.

    A program counts its micro-batches on through its iterations, each of which has ``micro_batches`` of them, from
    number ``first_micro_batch`` of the global batch on. Replica number ``replica`` of the ``replicas`` of a stage draws
    numbers of its own for its slice of a micro-batch.
    """

    def __init__(
        self,
        seed: int,
        *,
        first_micro_batch: int,
        micro_batches: int,
        device: torch.device,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self.iteration = 0  # first iteration of the program that runs
        self.micro_batch = 0  # the current iteration, numbered within the program
        self.device = device
        self._seed = seed
        self._first_micro_batch = first_micro_batch
        self._micro_batches = micro_batches
        self._replica, self._replicas = replica, replicas
        self._mixed_for: tuple[int, int] | None = None  # iteration and micro-batch
        self._mixed = 0  # the mix of all that the operations of that micro-batch have in common
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index]
        else:
            self._generator = torch.default_generator

    def seed(self, operation: int, shard: int | None = None) -> torch.Tensor | None:
        """Seed the generator for operation number ``operation`` of the whole model's Graph.

        With ``shard``, the numbers are this shard's own. Returns what ``restore`` takes after the operation.
        """
        before = None if self.device.type == "cuda" else self._generator.get_state()
        if self._mixed_for != (self.iteration, self.micro_batch):
            self._mixed_for = self.iteration, self.micro_batch
            later, index = divmod(self.micro_batch, self._micro_batches)
            batch_slice = (self._first_micro_batch + index) * self._replicas + self._replica
            self._mixed = 0
            for number in (self._seed, self.iteration + later, batch_slice):
                self._mixed = _mix(self._mixed ^ (number & _MASK))
        mixed = _mix(self._mixed ^ (operation & _MASK))
        self._generator.manual_seed(mixed if shard is None else _mix(mixed ^ (shard & _MASK)))
        return before

    def restore(self, before: torch.Tensor | None) -> None:
        """Have the generator as it was ``before`` it was seeded; a GPU's generator is the stages' alone."""
        if before is not None:
            self._generator.set_state(before)


class SeededOperation(nn.Module):
    """A random operator of a stage's program; it seeds the generator before each call, for its ``shard`` if any."""

    def __init__(self, target: Callable, operation: int, randomness: Randomness, shard: int | None = None) -> None:
        super().__init__()
        self._target = target
        self._operation = operation
        self._randomness = randomness
        self._shard = shard

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = self._randomness.seed(self._operation, self._shard)
        try:
            return self._target(*args, **kwargs)
        finally:
            self._randomness.restore(before)


def _mix(number: int) -> int:
    """The finaliser of SplitMix64, which maps neighbouring numbers to unrelated numbers."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
