"""How one input of the model is made from a sample of the data."""

from dataclasses import dataclass

import torch

from auto3d.data.interface import DataError

TOKEN_KINDS = ("tokens", "next-tokens")
KINDS = (*TOKEN_KINDS, "integers", "normal", "constant", "mask")


@dataclass(frozen=True, kw_only=True)
class InputField:
    """How one input of the model is made.

    ``tokens``: a window of the corpus. ``next-tokens``: the same window, one token later. ``integers``: uniform in
    [low, high). ``normal``: standard normal. ``constant``: ``value`` everywhere; its type is the type of the input.
    ``mask``: booleans, of which ``count`` are true, at random positions. All but the first two have ``shape``, the
    shape of one sample. The first ``prefix_length`` entries of tokens and integers are replaced by ``prefix``.
    """

    kind: str  # one of KINDS
    shape: tuple[int, ...] = ()
    low: int = 0
    high: int = 2
    value: bool | int | float = 1
    count: int = 1
    prefix: int = 0
    prefix_length: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DataError(f"kind: {self.kind!r} is not known; use one of {', '.join(KINDS)}")

    @property
    def dtype(self) -> torch.dtype:
        if self.kind == "constant":
            return {bool: torch.bool, int: torch.int64, float: torch.float32}[type(self.value)]
        return {"normal": torch.float32, "mask": torch.bool}.get(self.kind, torch.int64)

    @property
    def largest(self) -> int | None:
        """The largest integer that the input may contain, apart from tokens; None if it contains no integers."""
        integers = [self.prefix] if self.prefix_length else []
        if self.kind == "integers":
            integers.append(self.high - 1)
        if self.kind == "constant" and type(self.value) is int:
            integers.append(self.value)
        return max(integers, default=None)

    @property
    def smallest(self) -> int | None:
        """The smallest integer that the input may contain, apart from tokens; None if it contains no integers."""
        integers = [self.prefix] if self.prefix_length else []
        if self.kind == "integers":
            integers.append(self.low)
        if self.kind == "constant" and type(self.value) is int:
            integers.append(self.value)
        return min(integers, default=None)
