"""Floating-point operations of one operator, counted by torch's own formulas on tensors without memory."""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode


class FlopCount:
    """Counts an operator's forward; equal calls, of which a model has many, are counted once."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, target: Callable, args: tuple, kwargs: dict) -> int:
        key = f"{target} {args} {kwargs}"  # meta tensors print as their shape and dtype alone
        if key not in self._known:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                target(*args, **kwargs)
            self._known[key] = counter.get_total_flops()
        return self._known[key]
