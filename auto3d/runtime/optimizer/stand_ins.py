"""Optimizers that add up numbers over all parameters, such as Prodigy, where each rank has some of the parameters.

Each rank makes the optimizer of all parameters. Those of other ranks are stand-ins on torch's meta device, which have a
shape and no values. A step then reads numbers from tensors in the same order on every rank, and what it reads from a
stand-in comes from a rank that has the parameter: all ranks add up the same numbers, in the order of one process.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf, isnan, nan
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from auto3d.runtime.messages.totals import Totals
from auto3d.runtime.run_ahead import RunAhead

Number = bool | int | float
_READ = torch.ops.aten._local_scalar_dense.default  # item(), bool(), int() and float() of a tensor call it
_WHAT = "a number that the optimizer adds up over all parameters"
_WHICH = "which parameters have gradients"


class NumbersRead(TorchDispatchMode):
    """While it is entered, ``read`` gives the number that is read from a tensor.

    Raises RuntimeError where values are computed from a stand-in's in another way: torch would leave them as
    they are, without a word.
    """

    def __init__(self, read: Callable[[torch.Tensor], Number]) -> None:
        super().__init__()
        self._read = read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ:
            return self._read(args[0])
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        real = [tensor for tensor in tensors if not tensor.is_meta]
        if len(real) < len(tensors) and (
            any(tensor.dim() for tensor in real) or (func._schema.is_mutable and not tensors[0].is_meta)
        ):
            raise RuntimeError(f"{func}: it computes with tensors of several parameters, which are on several ranks")
        return func(*args, **(kwargs or {}))


def stand_in(shape: Sequence[int]) -> nn.Parameter:
    return nn.Parameter(torch.empty(tuple(shape), device="meta"))


class AllParameters:
    """The parameters of a model by their ``shapes``, in the model's order; ``totals`` are of all ranks that train it.

    The ranks have the same values of what they have in common.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], totals: Totals, run_ahead: RunAhead) -> None:
        self._shapes, self._totals, self._run_ahead = shapes, totals, run_ahead

    def of(self, names: Sequence[str], own: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
        """The parameters called ``names``; stand-ins for those that are not among this rank's ``own``."""
        return [own[name] if name in own else stand_in(self._shapes[name]) for name in names]

    def step_together(self, optimizer: torch.optim.Optimizer) -> None:
        """Let steps of ``optimizer``, which every rank has made ``of`` the same names, read the same numbers.

        All ranks make each step at the same time.
        """
        kind = type(optimizer)
        # Without the hooks of a step, in which each rank reads numbers of its own.
        alone = getattr(kind.step, "__wrapped__", kind.step)
        (group,) = optimizer.param_groups

        def step(optimizer: torch.optim.Optimizer) -> None:
            parameters = group["params"]
            have = [float(parameter.grad is not None) for parameter in parameters]
            for parameter, has in zip(parameters, self._totals.largest(have, _WHICH), strict=True):
                if parameter.is_meta:
                    parameter.grad = torch.empty_like(parameter) if has else None
            with NumbersRead(self._read):
                alone(optimizer)

        hooked = torch.optim.Optimizer.profile_hook_step(step)
        optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]

    def _read(self, value: torch.Tensor) -> Number:
        """The number in ``value`` on the ranks that have it."""
        here = [-inf, -inf, -inf]  # the number, its negative, and whether it is none, which a maximum may lose
        if not value.is_meta:
            self._run_ahead.catch_up()
            number = float(value.item())
            here = [-inf, -inf, 1.0] if isnan(number) else [number, -number, 0.0]
        largest, negative, is_none = self._totals.largest(here, _WHAT)
        assert is_none > -inf, "no rank has the parameter"
        assert is_none or largest == -negative, "ranks that have a parameter read the same number from it"
        if value.dtype.is_floating_point:
            return nan if is_none else largest
        return bool(largest) if value.dtype == torch.bool else int(largest)
