"""Means over targets in the program of a stage: each counts its targets, and is weighted by their number."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from auto3d.capture.loss_terms import TargetTerm


class CountedMean(nn.Module):
    """A cross-entropy's mean times n / ``term.places``, where n targets are not ignored: 0 if there are none.

    If none is ignored, the factor is exactly 1. Nothing here waits for the device.
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
            self.count = counts.sum()
            factor = self.count / self._term.places
        mean = self._mean(logits, target, *others, **options)
        # A mean of no targets is NaN. The gradients of ignored targets are zero, even those of such a mean.
        return (mean * factor).masked_fill(self.count == 0, 0.0).to(mean.dtype)


class TargetCounts:
    """The means over targets that one stage computes."""

    def __init__(self, terms: Sequence[TargetTerm] = ()) -> None:
        self._numbers = {term.name: number for number, term in enumerate(terms)}
        self._terms = terms
        self._means: dict[int, CountedMean] = {}

    def module_of(self, node: fx.Node, mean: Callable[..., torch.Tensor]) -> CountedMean | None:
        """The module that runs ``node`` by ``mean``; None if it is no mean over targets."""
        number = self._numbers.get(node.name)
        if number is None:
            return None
        self._means[number] = CountedMean(self._terms[number], mean)
        return self._means[number]

    def take(self) -> dict[int, torch.Tensor]:
        """Number of a term -> the number of its targets in the forward that has just run."""
        return {number: mean.count for number, mean in self._means.items() if mean.count is not None}
