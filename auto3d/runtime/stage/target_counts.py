"""Terms of the loss in the program of a stage: a mean over targets is weighted by their number, another by a factor."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from auto3d.capture.loss_terms import ScaledTerm, TargetTerm


class CountedMean(nn.Module):
    """A cross-entropy's mean times n / ``term.places``, where n targets are not ignored: 0 if there are none.

    If none is ignored, the factor is exactly 1; where ``term.is_alike`` also if some are. Nothing waits for the device.
    """

    def __init__(self, term: TargetTerm, mean: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._term = term
        self._mean = mean
        self.count: torch.Tensor | None = None  # n of the last forward, on its device

    def forward(self, logits: torch.Tensor, target: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        with torch.no_grad():
            counts = target != self._term.ignore_index
            if self._term.has_class_weights:
                weight = options["weight"] if "weight" in options else others[0]
                counts = weight.take(target.masked_fill(~counts, 0)) * counts
            self.count = counts.any() * self._term.places if self._term.is_alike else counts.sum()
            factor = self.count / self._term.places
        mean = self._mean(logits, target, *others, **options)
        # A mean of no targets is NaN. The gradients of ignored targets are zero, even in such a mean.
        return (mean * factor).masked_fill(self.count == 0, 0.0).to(mean.dtype)


class Scaled(nn.Module):
    """A term of the loss times ``factor``, in a global batch that has the fraction ``present`` of its samples."""

    def __init__(self, factor: float, term: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._factor, self._term, self.present = factor, term, 1.0

    def forward(self, *values: Any, **options: Any) -> torch.Tensor:
        return self._term(*values, **options) * (self._factor * self.present)


class TargetCounts:
    """The terms of the loss that one stage computes, and how many targets its means have counted."""

    def __init__(self, terms: Sequence[TargetTerm | ScaledTerm] = ()) -> None:
        self._numbers = {term.name: number for number, term in enumerate(terms)}
        self._terms = terms
        self._means: dict[int, CountedMean] = {}
        self._scaled: list[Scaled] = []

    def module_of(self, node: fx.Node, run: Callable[..., torch.Tensor]) -> CountedMean | Scaled | None:
        """The module that runs ``node``, which ``run`` would run; None if it is none of the terms."""
        number = self._numbers.get(node.name)
        if number is None:
            return None
        term = self._terms[number]
        if isinstance(term, ScaledTerm):
            self._scaled.append(Scaled(term.factor, run))
            return self._scaled[-1]
        self._means[number] = CountedMean(term, run)
        return self._means[number]

    def set_present(self, fraction: float) -> None:
        """From now on a global batch has this fraction of its samples, by which its sum is divided in the end."""
        for scaled in self._scaled:
            scaled.present = fraction

    def take(self) -> dict[int, torch.Tensor]:
        """Number of a term -> the number of its targets in the forward that has just run."""
        return {number: mean.count for number, mean in self._means.items() if mean.count is not None}
