"""The cost of one operator: its FLOPs and what autograd keeps of it, measured on tensors without memory."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from warnings import warn

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from auto3d.capture.alike import signature, values_in
from auto3d.capture.attention import fused_attention

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@dataclass(frozen=True, slots=True)
class OperationCost:
    """The cost of one call. Tensors among its arguments, and tensors among its results, are numbered in order."""

    flops: int  # forward
    backward_flops: int
    results: tuple[torch.Tensor, ...]  # meta tensors with the strides and requires_grad of the real results
    alias_of: tuple[int | None, ...]  # for each result, the number of the argument that it is a view of
    saved_arguments: tuple[int, ...]  # numbers of the arguments that the backward needs
    saved_results: tuple[int, ...]  # numbers of the results that the backward needs
    saved_bytes: int  # bytes of other tensors that the backward needs, such as a dropout mask


class OperationCosts:
    """Runs operators on meta tensors to learn their costs; equal calls, of which a model has many, run once.

    What autograd keeps is taken from the kernels of ``device``, "cpu" or "cuda"; without ``fused_attention``, attention
    runs as matrix products with a softmax between them and keeps the matrix of attention weights.
    """

    def __init__(self, device: str, *, fused_attention: bool = True) -> None:
        self._device = device
        self._fused_attention = fused_attention
        self._known: dict[Hashable, OperationCost] = {}

    def __call__(self, target: Callable, args: tuple, kwargs: dict, result: Any) -> OperationCost:
        """The cost of ``target`` on ``args`` and ``kwargs``, whose tensors are meta tensors, or nodes that have such.

        Arguments that require a gradient make the operator save tensors. If the operator does not run on meta tensors,
        its cost is only the bytes that it moves, it saves all arguments and results, and ``result`` gives the shapes.
        """
        key = signature(target, args, kwargs)
        if key not in self._known:
            values, named = values_in(args, kwargs)
            try:
                self._known[key] = _cost(target, values, named, self._device if self._fused_attention else None)
            except Exception as error:  # kernels raise errors of any kind
                problem = f"the cost of {target} is unknown ({type(error).__name__}): only its bytes are counted"
                warn(problem, stacklevel=2)
                self._known[key] = _unknown_cost(values, named, result)
        return self._known[key]


def _unknown_cost(args: tuple, kwargs: dict, result: Any) -> OperationCost:
    arguments, values = _tensors((args, kwargs)), _tensors(result)
    has_gradient = any(argument.requires_grad for argument in arguments)
    results = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") for v in values]
    return OperationCost(
        flops=0,
        backward_flops=0,
        results=tuple(
            tensor.requires_grad_(has_gradient and (tensor.is_floating_point() or tensor.is_complex()))
            for tensor in results
        ),
        alias_of=(None,) * len(results),
        saved_arguments=tuple(range(len(arguments))) if has_gradient else (),
        saved_results=tuple(range(len(results))) if has_gradient else (),
        saved_bytes=0,
    )


def _cost(target: Callable, args: tuple, kwargs: dict, device: str | None) -> OperationCost:
    """The cost with the fused attention of ``device``, or with unfused attention if ``device`` is None."""
    arguments = _tensors((args, kwargs))
    with FlopCounterMode(display=False) as counter:
        results, saved = _run(target, args, kwargs)
        flops = counter.get_total_flops()
        _run_backward(arguments, results)
        backward_flops = counter.get_total_flops() - flops
    if flops == 0 and "grouped_mm" in str(
        target
    ):  # torch has no formula for it; each row is multiplied by one group's matrix
        flops = 2 * results[0].numel() * arguments[0].shape[-1]
        backward_flops = flops * sum(argument.requires_grad for argument in arguments[:2])
    fused = fused_attention(device, *args, **kwargs) if device and target is _ATTENTION else None
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
    """(tensors among the operator's results, tensors that autograd saved)."""
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
