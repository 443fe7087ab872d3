"""The factor of the loss in a backward of float16, whose gradients would otherwise underflow."""

from dataclasses import dataclass

FIRST_FLOAT16_SCALE = 65536.0
_GROWTH_INTERVAL = 2000
_GROWTH = 2.0


@dataclass(kw_only=True)
class LossScale:
    """The scale, the same on every rank; it changes as that of torch.amp.GradScaler with its defaults.

    It doubles after 2000 iterations of finite gradients, and halves after one that has an infinite or undefined one,
    whose update is skipped.
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
        """Note whether the gradients of an iteration are finite."""
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

    def restore(self, numbers: dict[str, float]) -> None:
        """Continue from the ``numbers`` of a checkpoint; those without a scale change nothing."""
        if self.is_used and "loss_scale" in numbers:
            self.value = numbers["loss_scale"]
            self.good_iterations = int(numbers["good_iterations"])
            self.skipped_iterations = int(numbers["skipped_iterations"])
