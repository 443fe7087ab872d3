"""Rules of operators that compute each element of their result from the elements at its place."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

from auto3d.tensor.rules.call import Axis, Call, Rule

_LINEAR = "clone contiguous alias to _to_copy neg type_as lift lift_fresh lift_fresh_copy positive conj"
_ONE_OPERAND = (
    "abs acos acosh asin asinh atan atanh bernoulli bitwise_not ceil celu clamp clamp_max clamp_min cos cosh deg2rad "
    "detach digamma dropout elu empty_like erf erfc erfinv exp exp2 expm1 floor frac full_like gelu "
    "hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma log log10 log1p log2 log_sigmoid "
    "logical_not logit mish mvlgamma nan_to_num native_dropout ones_like rad2deg rand_like randn_like "
    "reciprocal relu relu6 round rrelu rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt "
    "square tan tanh threshold trunc zeros_like"
)
_SEVERAL = (
    "add addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor clip copysign div eq fill floor_divide fmax fmin "
    "fmod ge gt hypot le lerp logaddexp logical_and logical_or logical_xor lt masked_fill maximum minimum mul ne "
    "pow prelu remainder rsub sub true_divide where xlogy __and__ __or__ __xor__ bitwise_left_shift "
    "bitwise_right_shift divide multiply subtract __lshift__ __rshift__"
)


def _pointwise(call: Call) -> Rule:
    """Every dimension of the result is an axis, which operands have unless they are broadcast along it."""
    result = call.results[0]
    axes = []
    for dim, size in enumerate(result):
        places = [dim - len(result) + len(shape) for shape in call.shapes]
        operands = tuple(
            place if place >= 0 and (shape[place] == size and size > 1) else None
            for place, shape in zip(places, call.shapes, strict=True)
        )
        if size > 1 and any(place is not None for place in operands):
            axes.append(Axis(operands, (dim,) * len(call.results), padded=True))
    return Rule(axes=tuple(axes))


def _linear(call: Call) -> Rule:
    """A conversion to integers rounds, so it is not linear."""
    rounds = not call.node.meta["val"].is_floating_point()
    return Rule(axes=_pointwise(call).axes, linear=() if rounds else (frozenset({0}),))


def _sum(call: Call) -> Rule:
    """Both terms of a sum are partial, or neither; a number is not added to a partial value."""
    both = len(call.operands) == 2
    return Rule(axes=_pointwise(call).axes, linear=(frozenset({0, 1}),) if both else ())


def _product(call: Call) -> Rule:
    linear = tuple(frozenset({number}) for number in range(len(call.operands)))
    return Rule(axes=_pointwise(call).axes, linear=linear)


def _quotient(call: Call) -> Rule:
    """Padding is zero, so a divisor must have none: the gradient of a dividend that all ranks have would be NaN."""
    rounded = call.argument("rounding_mode") is not None
    dividend, divisor = call.operand_number("self"), call.operand_number("other")
    linear = () if rounded or dividend is None else (frozenset({dividend}),)
    axes = (replace(axis, padded=divisor is None or axis.operands[divisor] is None) for axis in _pointwise(call).axes)
    return Rule(axes=tuple(axes), linear=linear)


def _prelu(call: Call) -> Rule:
    """The weight has one element for each channel, dimension 1 of the input, or one for all."""
    shape = call.shapes[0]
    channels = 1 if len(shape) > 1 else 0
    per_channel = prod(call.shapes[1]) > 1
    axes = [Axis((dim, 0 if dim == channels and per_channel else None), (dim,)) for dim in range(len(shape))]
    return Rule(axes=tuple(axes))


def _feature_dropout(call: Call) -> Rule:
    """It drops whole channels of [samples, channels, ...], so ranks must not draw for parts of one channel."""
    return Rule(axes=tuple(axis for axis in _pointwise(call).axes if axis.results[0] in (0, 1)))


RULES: dict[str, Callable[[Call], Rule]] = {
    **dict.fromkeys((*_ONE_OPERAND.split(), *_SEVERAL.split()), _pointwise),
    **dict.fromkeys(_LINEAR.split(), _linear),
    **dict.fromkeys(("add", "sub", "subtract"), _sum),
    **dict.fromkeys(("mul", "multiply"), _product),
    **dict.fromkeys(("div", "divide", "true_divide"), _quotient),
    "broadcast_tensors": _pointwise,
    "prelu": _prelu,
    "feature_dropout": _feature_dropout,
}
