"""How one input of the model is made from a sample of the data."""

from dataclasses import dataclass

import torch

from auto3d.data.interface import IGNORED, DataError

TOKEN_KINDS = ("tokens", "labels", "next-tokens")
SEQUENCE_KINDS = (*TOKEN_KINDS, "attention-mask")  # one value per token
KINDS = (*SEQUENCE_KINDS, "column", "integers", "normal", "constant", "mask")
DTYPES = {"int64": torch.int64, "float32": torch.float32, "bool": torch.bool}


@dataclass(frozen=True, kw_only=True)
class InputField:
    """How one input of the model is made.

    ``tokens``: the tokens of a sample, padded to the length of a sequence. ``labels``: the same, IGNORED where they are
    padded. ``next-tokens``: the same as labels, one token later. ``attention-mask``: 1 for tokens, 0 where they are
    padded. ``column``: a column of the data, called ``column`` or else as the input. ``integers``: uniform in
    [low, high). ``normal``: standard normal. ``constant``: ``value`` everywhere; its type is the type of the input.
    ``mask``: booleans, of which ``count`` are true, at random positions. All but the first four have ``shape``, the
    shape of one sample. The first ``prefix_length`` entries of tokens and integers are replaced by ``prefix``.
    """

    kind: str  # one of KINDS
    shape: tuple[int, ...] = ()
    dtype_name: str = "int64"  # one of DTYPES; type of a column
    column: str = ""
    targets: bool = False  # whether a column of int64 holds targets of the loss, of which IGNORED does not count
    low: int = 0
    high: int = 2
    value: bool | int | float = 1
    count: int = 1
    prefix: int = 0
    prefix_length: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DataError(f"kind: {self.kind!r} is not known; use one of {', '.join(KINDS)}")
        if self.dtype_name not in DTYPES:
            raise DataError(f"dtype: {self.dtype_name!r} is not known; use one of {', '.join(DTYPES)}")
        if self.targets and (self.kind, self.dtype_name) != ("column", "int64"):
            raise DataError("targets: only columns of int64 can hold targets that do not count")

    @property
    def dtype(self) -> torch.dtype:
        if self.kind == "column":
            return DTYPES[self.dtype_name]
        if self.kind == "constant":
            return {bool: torch.bool, int: torch.int64, float: torch.float32}[type(self.value)]
        return {"normal": torch.float32, "mask": torch.bool}.get(self.kind, torch.int64)

    @property
    def largest(self) -> int | None:
        """The largest integer that the input may contain, apart from tokens and columns; None if it has none."""
        integers = [self.prefix] if self.prefix_length else []
        if self.kind == "integers":
            integers.append(self.high - 1)
        if self.kind == "constant" and type(self.value) is int:
            integers.append(self.value)
        return max(integers, default=None)

    @property
    def may_hold_ignored(self) -> bool:
        """Whether the input may hold IGNORED in data whose samples are all full."""
        by_prefix = bool(self.prefix_length) and self.prefix == IGNORED
        return by_prefix or self.draws_ignored or (self.kind == "constant" and self.value == IGNORED)

    @property
    def draws_ignored(self) -> bool:
        """Whether samples may hold unequal numbers of IGNORED."""
        return self.targets or (self.kind == "integers" and self.low <= IGNORED < self.high)
