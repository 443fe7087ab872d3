"""The factor of the loss in a backward of float16, whose gradients would otherwise underflow."""

from collections.abc import Mapping
from dataclasses import dataclass

from auto3d.errors import InputError

_LEAST = 1.0
_GROWTH_INTERVAL = 2000
_GROWTH = 2.0


@dataclass(kw_only=True)
class LossScale:
    """The scale, the same on every rank; it changes as torch.amp.GradScaler's does by default.

    It doubles after 2000 iterations of finite gradients, and halves after an iteration with an infinite or
    undefined gradient, whose update is skipped.
    """

    value: float = 1.0
    is_used: bool = False
    good_iterations: int = 0  # iterations of finite gradients since the scale last changed
    skipped_iterations: int = 0

    @staticmethod
    def of(first: float | None) -> "LossScale":
        """A scale that begins at ``first``; None: no scale."""
        return LossScale() if first is None else LossScale(value=first, is_used=True)

    def update(self, *, finite: bool) -> None:
        """Note whether the gradients of an iteration are finite.

        Raises InputError if they are not although the scale is 1 or less: then a smaller one would not help.
        """
        if not finite and self.value <= _LEAST:
            raise InputError(
                f"the gradients are infinite or undefined, and the loss scale is {self.value:g}, which did not cause "
                "it; lower the learning rate, or train in bfloat16 or float32"
            )
        if not finite:
            self.value /= _GROWTH
            self.good_iterations = 0
            self.skipped_iterations += 1
            return
        self.good_iterations += 1
        if self.good_iterations == _GROWTH_INTERVAL:
            self.value *= _GROWTH
            self.good_iterations = 0

    def numbers(self) -> dict[str, float]:
        """Its state for a checkpoint; nothing if it is not used."""
        if not self.is_used:
            return {}
        return {
            "loss_scale": self.value,
            "good_iterations": float(self.good_iterations),
            "skipped_iterations": float(self.skipped_iterations),
        }

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Continue from the ``numbers`` of a checkpoint; those without a scale change nothing."""
        if self.is_used and "loss_scale" in numbers:
            self.value = numbers["loss_scale"]
            self.good_iterations = int(numbers["good_iterations"])
            self.skipped_iterations = int(numbers["skipped_iterations"])
