"""What one operator costs: floating-point operations, and what autograd keeps; found on tensors without memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from warnings import warn

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from auto3d.capture.attention import fused_attention

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@dataclass(frozen=True, slots=True)
class OperationCost:
    """``alias_of`` and the two ``saved_`` number the tensors among the operator's arguments and results, in order."""

    flops: int  # forward
    backward_flops: int
    results: tuple[torch.Tensor, ...]  # on the meta device, with the strides and requires_grad that they really have
    alias_of: tuple[int | None, ...]  # of each result: the argument of which it is a view
    saved_arguments: tuple[int, ...]  # that the backward needs
    saved_results: tuple[int, ...]
    saved_bytes: int  # of what else the backward needs, such as a dropout's mask


class OperationCosts:
    """Runs operators on meta tensors; equal calls, of which a model has many, run once.

    What autograd keeps is that of the kernels of a ``device`` "cpu" or "cuda".
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._known: dict[str, OperationCost] = {}

    def __call__(self, target: Callable, args: tuple, kwargs: dict, result: Any) -> OperationCost:
        """``args`` and ``kwargs`` hold meta tensors; those that require a gradient make the operator save things.

        An operator that does not run on meta tensors is taken to give ``result``, to cost the bytes that it moves alone
        and to save all that it has.
        """
        strides = [tensor.stride() for tensor in _tensors((args, kwargs))]
        key = f"{target} {args} {kwargs} {strides}"  # meta tensors print as their shape, dtype and requires_grad alone
        if key not in self._known:
            try:
                self._known[key] = _cost(target, args, kwargs, self._device)
            except Exception as error:  # kernels raise errors of any kind
                problem = f"the cost of {target} is not known ({type(error).__name__}): its bytes are counted alone"
                warn(problem, stacklevel=2)
                self._known[key] = _unknown_cost(args, kwargs, result)
        return self._known[key]


def _unknown_cost(args: tuple, kwargs: dict, result: Any) -> OperationCost:
    arguments, values = _tensors((args, kwargs)), _tensors(result)
    learns = any(argument.requires_grad for argument in arguments)
    results = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") for v in values]
    return OperationCost(
        flops=0,
        backward_flops=0,
        results=tuple(
            each.requires_grad_(learns and (each.is_floating_point() or each.is_complex())) for each in results
        ),
        alias_of=(None,) * len(results),
        saved_arguments=tuple(range(len(arguments))) if learns else (),
        saved_results=tuple(range(len(results))) if learns else (),
        saved_bytes=0,
    )


def _cost(target: Callable, args: tuple, kwargs: dict, device: str) -> OperationCost:
    arguments = _tensors((args, kwargs))
    with FlopCounterMode(display=False) as counter:
        results, saved = _run(target, args, kwargs)
        flops = counter.get_total_flops()
        _run_backward(arguments, results)
        backward_flops = counter.get_total_flops() - flops
    if flops == 0 and "grouped_mm" in str(target):  # torch has no formula for it; each row meets one group's matrix
        flops = 2 * results[0].numel() * arguments[0].shape[-1]
        backward_flops = flops * sum(argument.requires_grad for argument in arguments[:2])
    fused = fused_attention(device, *args, **kwargs) if target is _ATTENTION else None
    if fused is not None:
        results, saved = _run(fused, (), {})
        results = results[:1]
    argument_keys = [_key(argument) for argument in arguments]
    result_keys = [_key(result) for result in results]
    kept = {_key(tensor): tensor for tensor in saved}
    return OperationCost(
        flops=flops,
        backward_flops=backward_flops,
        results=tuple(result.detach().requires_grad_(result.requires_grad) for result in results),
        alias_of=tuple(argument_keys.index(key) if key in argument_keys else None for key in result_keys),
        saved_arguments=tuple(index for index, key in enumerate(argument_keys) if key in kept),
        saved_results=tuple(i for i, key in enumerate(result_keys) if key in kept and key not in argument_keys),
        saved_bytes=sum(
            tensor.untyped_storage().nbytes()
            for key, tensor in kept.items()
            if key not in argument_keys and key not in result_keys
        ),
    )


def _run(target: Callable, args: tuple, kwargs: dict) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The operator's results, and the tensors that autograd saved."""
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return _tensors(target(*args, **kwargs)), saved


def _run_backward(arguments: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    made = [result for result in results if result.requires_grad]
    wanted = [argument for argument in arguments if argument.requires_grad]
    if made:
        torch.autograd.grad(made, wanted, [torch.empty_like(result) for result in made], allow_unused=True)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
