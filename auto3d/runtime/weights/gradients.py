"""Split backward: operators whose backward computes the input's gradient at once and defers the weights' gradients.

In a zero-bubble schedule, I (the input half) runs autograd with these operators in place of the stage's matrix products
and convolutions, and W (the weight half) runs the computations that they deferred. Other parameters, of norms and
embeddings, get their gradients in I, because these cost little.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from auto3d.runtime.stage.fast_calls import apply_of
from auto3d.runtime.weights.low_precision import use_copy

aten = torch.ops.aten
_WEIGHT_AND_BIAS = {  # operator -> positions of its weight and its bias among its arguments
    aten.linear.default: (1, 2),
    aten.addmm.default: (2, 0),
    aten.conv1d.default: (1, 2),
    aten.conv2d.default: (1, 2),
    aten.conv3d.default: (1, 2),
}


class DeferredGradients:
    """The weight-gradient computations that the backward of one stage has deferred, in order."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def take(self) -> list[Callable[[], None]]:
        """The computations deferred since the last call."""
        work, self._work = self._work, []
        return work


class WeightGradientsAtOnce(DeferredGradients):
    """Computes weight gradients in the backward itself; each product adds to the gradients of earlier products.

    Autograd makes a tensor of each gradient first and adds it afterwards; LLaMA in halves took 4 % longer that way.
    """

    def add(self, work: Callable[[], None]) -> None:
        work()


def split_operation(
    node: fx.Node,
    parameters: Collection[fx.Node],
    parameter_of: Mapping[fx.Node, fx.Node],
    deferred: DeferredGradients,
) -> "SplitOperation | None":
    """``node`` with a split backward; None unless its weight is in ``parameters``, not a value computed from them.

    The gradient of a bias that is computed from parameters is not deferred: autograd needs it. ``parameter_of`` has the
    parameter of each copy in low precision among ``parameters``; ``node`` then takes these too, as its ``learned``.
    """
    if node.target not in _WEIGHT_AND_BIAS or node.kwargs:
        return None
    weight, bias = _WEIGHT_AND_BIAS[node.target]
    if node.args[weight] not in parameters:
        return None
    bias_node = node.args[bias] if len(node.args) > bias else None
    if parameter_of:
        both: tuple[Any, Any] = (node.args[weight], bias_node)
        node.kwargs = {"learned": tuple(parameter_of.get(copy) for copy in both)}
    return SplitOperation(node.target, deferred, defers_bias=bias_node is None or bias_node in parameters)


class SplitOperation(nn.Module):
    """One of these operators. Its deferred computation adds the weights' gradients to their ``.grad``.

    Shapes that layers never have, such as a bias of one element for all outputs, run as they are: nothing is deferred.
    """

    def __init__(self, target: torch._ops.OpOverload, deferred: DeferredGradients, *, defers_bias: bool = True) -> None:
        super().__init__()
        self._target = target
        self._places = _WEIGHT_AND_BIAS[target]
        self._deferred = deferred
        self._defers_bias = defers_bias

    def forward(self, *args: Any, learned: tuple[Any, Any] = (None, None)) -> torch.Tensor:
        """``learned``: the parameters that weight and bias are copies of, in low precision; None where they are none.

        Gradients are added to the parameters.
        """
        if self._target is aten.addmm.default:
            bias, value, weight = args
            if bias.shape != weight.shape[1:]:
                return self._as_it_is(args, learned)
            return _product(value, weight, bias, *learned, False, self._deferred, self._defers_bias)
        value, weight, bias, *rest = args if len(args) > 2 else (*args, None)
        if self._target is aten.linear.default:
            if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
                return self._as_it_is(args, learned)
            return _product(value, weight, bias, *learned, True, self._deferred, self._defers_bias)
        if value.dim() != weight.dim():  # without a dimension of samples
            return self._as_it_is(args, learned)
        dimensions = value.dim() - 2
        defaults: list[Any] = [[1], [0], [1], 1]
        stride, padding, dilation, groups = rest + defaults[len(rest) :]
        geometry = [list(size) * (dimensions if len(size) == 1 else 1) for size in (stride, padding, dilation)]
        return _convolution(value, weight, bias, *learned, (*geometry, groups), self._deferred, self._defers_bias)

    def _as_it_is(self, args: Sequence[Any], learned: tuple[Any, Any]) -> torch.Tensor:
        places = self._places
        used = list(args)
        for place, parameter in zip(places, learned, strict=True):
            if parameter is not None:
                used[place] = use_copy(parameter, used[place])
        return self._target(*used)


def _learned(
    weight: Any, bias: Any, weight_parameter: Any, bias_parameter: Any, *, defers_bias: bool
) -> tuple[Any, Any]:
    """What deferred computations add gradients to: weight and bias, or the parameters that they are copies of."""
    bias = bias if bias_parameter is None else bias_parameter
    return (weight if weight_parameter is None else weight_parameter), (bias if defers_bias else None)


class _Product(torch.autograd.Function):
    """value [..., in] × weight + bias [out]; weight is [out, in] if ``transposed``, else [in, out]."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Any,
        weight: Any,
        bias: Any,
        weight_parameter: Any,
        bias_parameter: Any,
        transposed: bool,
        deferred: DeferredGradients,
        defers_bias: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(value)
        ctx.weight, ctx.transposed, ctx.deferred = weight, transposed, deferred
        ctx.learned = _learned(weight, bias, weight_parameter, bias_parameter, defers_bias=defers_bias)
        return nn.functional.linear(value, weight if transposed else weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        # Detached: its autograd graph would keep the inputs of the stage and their gradients until the weight half.
        value = ctx.saved_tensors[0].detach()
        ctx.deferred.add(partial(_add_product, gradient, value, ctx.learned[0], ctx.learned[1], ctx.transposed))
        weight = ctx.weight if ctx.transposed else ctx.weight.t()
        of_bias = None
        if ctx.learned[1] is None and ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return (gradient @ weight if ctx.needs_input_grad[0] else None), None, of_bias, *[None] * 5


_product = apply_of(_Product)


def _add_product(
    gradient: torch.Tensor, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> None:
    gradient, value = gradient.reshape(-1, gradient.shape[-1]), value.reshape(-1, value.shape[-1])
    if weight.requires_grad:
        left, right = (gradient.t(), value) if transposed else (value.t(), gradient)
        if weight.grad is None or weight.dtype != left.dtype:
            add_gradient(left @ right, weight)
        else:
            weight.grad.addmm_(left, right)
    if bias is not None and bias.requires_grad:
        add_gradient(gradient.sum(0), bias)


def add_gradient(gradient: torch.Tensor, parameter: torch.Tensor) -> None:
    """Add ``gradient`` to the gradient of ``parameter``, in the type of the parameter."""
    parameter.grad = gradient.to(parameter.dtype) if parameter.grad is None else parameter.grad.add_(gradient)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Any,
        weight: Any,
        bias: Any,
        weight_parameter: Any,
        bias_parameter: Any,
        geometry: tuple,
        deferred: DeferredGradients,
        defers_bias: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(value)
        ctx.weight, ctx.bias, ctx.geometry, ctx.deferred = weight, bias if defers_bias else None, geometry, deferred
        ctx.learned = _learned(weight, bias, weight_parameter, bias_parameter, defers_bias=defers_bias)
        stride, padding, dilation, groups = geometry
        return torch.convolution(value, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        value = ctx.saved_tensors[0].detach()
        ctx.deferred.add(partial(_add_convolution, gradient, value, ctx.weight, ctx.bias, ctx.learned, ctx.geometry))
        mask = (ctx.needs_input_grad[0], False, False)
        of_input, _, _ = _convolution_backward(gradient, value, ctx.weight, ctx.bias, ctx.geometry, mask)
        of_bias = None
        if ctx.bias is None and ctx.needs_input_grad[2]:
            of_bias = gradient.sum([0, *range(2, gradient.dim())])
        return of_input, None, of_bias, *[None] * 5


_convolution = apply_of(_Convolution)


def _add_convolution(
    gradient: torch.Tensor,
    value: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    learned: tuple[torch.Tensor, torch.Tensor | None],
    geometry: tuple,
) -> None:
    mask = (False, learned[0].requires_grad, learned[1] is not None and learned[1].requires_grad)
    _, of_weight, of_bias = _convolution_backward(gradient, value, weight, bias, geometry, mask)
    if of_weight is not None:
        # cuDNN may return it in the layout of the activations; fused optimizers need the layout of the weight.
        add_gradient(of_weight.contiguous() if weight.is_contiguous() else of_weight, learned[0])
    if learned[1] is not None and of_bias is not None:
        add_gradient(of_bias, learned[1])


def _convolution_backward(
    gradient: torch.Tensor,
    value: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: tuple,
    mask: tuple[bool, bool, bool],
) -> tuple:
    stride, padding, dilation, groups = geometry
    bias_sizes = None if bias is None else list(bias.shape)
    no_padding = [0] * len(stride)
    return aten.convolution_backward(
        gradient, value, weight, bias_sizes, stride, padding, dilation, False, no_padding, groups, mask
    )
