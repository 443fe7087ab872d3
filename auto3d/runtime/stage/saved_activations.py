"""Forwards whose activations autograd does not save, because the stage computes them again for the backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_SAVES = ContextVar("saves", default=True)


@contextmanager
def no_saved_activations() -> Iterator[None]:
    """Autograd is on but saves no activations.

    It is on because attention would take another kernel without it, and round differently.
    """
    drop: Any = id  # a number in place of each tensor, by a function of C
    before = _SAVES.set(False)
    try:
        with torch.autograd.graph.saved_tensors_hooks(drop, drop):
            yield
    finally:
        _SAVES.reset(before)


def saves_activations() -> bool:
    """Whether autograd saves activations now. Hooks of an operator's own would replace those that drop them."""
    return _SAVES.get()
