"""Every way that a rule gives to run a call is true: on shards and partial sums, the operator gives the same results.

Each call below is captured in a small program. For each of its ways the operands are turned into what two ranks have of
them, the local operator runs on each rank, and its results and the gradients of its operands are put together again.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import fx

from auto3d.tensor.collectives import VOCABULARY_CROSS_ENTROPY, VOCABULARY_EMBEDDING, conversion_of
from auto3d.tensor.rules import RULES
from auto3d.tensor.rules.call import Call, Inner, Way
from auto3d.tensor.ways import calls_of, ways_of_call
from auto3d.tensor_placement import COPIED, PARTIAL, WHOLE, Split, TensorPlacement, split_along

aten = torch.ops.aten
RANKS = 2


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def integers(*shape: int, high: int = 4) -> torch.Tensor:
    return torch.randint(0, high, shape)


@dataclass(frozen=True)
class Example:
    operator: str
    args: tuple
    kwargs: dict


def call(operator: str, *args: object, **kwargs: object) -> Example:
    return Example(operator, args, kwargs)


torch.manual_seed(0)
PLAIN = "abs acos asin atan cos cosh celu ceil clone contiguous conj deg2rad detach digamma elu erf erfc erfinv "
PLAIN += (
    "exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma "
)
PLAIN += "log log10 log1p log2 log_sigmoid logical_not mish nan_to_num neg ones_like positive rad2deg reciprocal relu "
PLAIN += (
    "relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh trunc "
)
PLAIN += "zeros_like asinh atanh alias lift_fresh_copy empty_like"
BINARY = (
    "add sub mul div atan2 copysign eq fmax fmin fmod ge gt hypot le logaddexp lt maximum minimum ne pow remainder "
)
BINARY += "xlogy rsub true_divide multiply subtract divide logical_and logical_or logical_xor"
EXAMPLES = [
    *(call(name, positive(4, 2, 6)) for name in PLAIN.split()),
    *(
        call(name, positive(4, 2, 6), positive(*shape))
        for name in BINARY.split()
        for shape in ((4, 2, 6), (6,), (2, 1))
    ),
    call("floor_divide", integers(4, 6), integers(6) + 1),
    *(call(name, integers(4, 6), integers(6)) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")),
    *(call(name, normal(4, 6), 2.0) for name in ("add.Scalar", "mul.Scalar", "div.Scalar", "pow.Tensor_Scalar")),
    call("div.Tensor_mode", normal(4, 6), normal(4, 6), rounding_mode="floor"),
    call("where.self", normal(4, 6) > 0, normal(4, 6), normal(6)),
    call("masked_fill.Scalar", normal(4, 6), normal(6) > 0, 0.5),
    call("addcmul", normal(4, 6), normal(4, 6), normal(6)),
    call("addcdiv", normal(4, 6), normal(4, 6), positive(6)),
    call("lerp.Tensor", normal(4, 6), normal(4, 6), positive(6)),
    call("prelu", normal(2, 4, 6), positive(4)),
    call("type_as", normal(4, 6), normal(1)),
    call("to.dtype", normal(4, 6), torch.float32),
    call("_to_copy", normal(4, 6), dtype=torch.float32),
    call("dropout", normal(4, 6), 0.0, True),
    call("native_dropout", normal(4, 6), 0.0, True),
    call("clamp_min", normal(4, 6), 0.1),
    call("clamp", normal(4, 6), -0.5, 0.5),
    call("threshold", normal(4, 6), 0.1, 0.0),
    call("logit", positive(4, 6)),
    call("full_like", normal(4, 6), 2.0),
    *(call(name, normal(2, 4, 6), [2, 24]) for name in ("view", "reshape", "_unsafe_view")),
    call("view", normal(4, 6), [2, 2, 2, 3]),
    call("reshape", normal(4, 6, 2), [24, 2]),
    call("view", normal(2, 8, 6), [4, 4, 6]),
    call("flatten.using_ints", normal(2, 4, 6), 1, 2),
    call("unflatten.int", normal(2, 24), 1, [4, 6]),
    call("permute", normal(2, 4, 6), [2, 0, 1]),
    call("transpose.int", normal(2, 4, 6), 1, -1),
    *(call(name, normal(4, 6)) for name in ("t", "numpy_T", "mT")),
    call("unsqueeze", normal(4, 6), 1),
    call("squeeze.dim", normal(4, 1, 6), 1),
    call("expand", normal(4, 1, 6), [2, 4, 3, 6]),
    call("expand", normal(4, 1, 6), [-1, 3, -1]),
    call("repeat", normal(4, 1), [2, 1, 4]),
    call("repeat_interleave.self_int", normal(4, 6), 2, 0),
    call("roll", normal(4, 6), [1], [0]),
    call("flip", normal(4, 6), [1]),
    call("pad", normal(4, 6), [1, 1]),
    call("pad", normal(4, 6), [1, 1], "constant", 2.0),
    call("constant_pad_nd", normal(4, 6), [0, 0, 1, 0]),
    call("select.int", normal(4, 6, 2), 1, 2),
    call("unbind.int", normal(4, 3, 2), 1),
    call("stack", [normal(4, 6), normal(4, 6)], 1),
    *(call("cat", [normal(4, 6), normal(4, 2)], dim) for dim in (1, -1)),
    call("cat", [normal(2, 6), normal(4, 6)]),
    call("split.Tensor", normal(4, 12), 4, 1),
    call("split_with_sizes", normal(4, 12), [8, 4], 1),
    call("chunk", normal(4, 12), 3, -1),
    call("slice.Tensor", normal(4, 12), 1, 4, 8),
    call("slice.Tensor", normal(4, 12), 1, 0, 12, 2),
    call("narrow", normal(4, 12), 1, 4, 8),
    call("linear", normal(2, 4, 6), normal(8, 6), normal(8)),
    call("linear", normal(4, 6), normal(8, 6)),
    call("addmm", normal(8), normal(4, 6), normal(6, 8)),
    call("addmm", normal(4, 8), normal(4, 6), normal(6, 8)),
    call("mm", normal(4, 6), normal(6, 8)),
    call("bmm", normal(2, 4, 6), normal(2, 6, 8)),
    call("matmul", normal(2, 4, 6), normal(6, 8)),
    call("matmul", normal(2, 4, 4, 6), normal(4, 6, 8)),
    call("matmul", normal(4, 6), normal(6)),
    call("matmul", normal(6), normal(6, 8)),
    call("baddbmm", normal(2, 1, 8), normal(2, 4, 6), normal(2, 6, 8)),
    call("conv1d", normal(2, 4, 8), normal(6, 4, 3), normal(6)),
    call("conv2d", normal(2, 4, 6, 6), normal(6, 4, 3, 3), None, [1, 1], [1, 1]),
    call("conv2d", normal(2, 4, 6, 6), normal(8, 1, 3, 3), normal(8), [1, 1], [1, 1], [1, 1], 4),
    call("conv2d", normal(2, 4, 6, 6), normal(8, 2, 3, 3), normal(8), [1, 1], [1, 1], [1, 1], 2),
    call("conv3d", normal(2, 4, 4, 4, 4), normal(6, 4, 3, 3, 3), normal(6)),
    call("convolution", normal(2, 4, 8), normal(6, 4, 3), normal(6), [1], [0], [1], False, [0], 1),
    call("convolution", normal(2, 4, 8), normal(4, 6, 3), normal(6), [1], [0], [1], True, [0], 1),
    call("conv_transpose1d", normal(2, 4, 8), normal(4, 6, 3), normal(6)),
    call("conv_transpose2d.input", normal(2, 4, 6, 6), normal(4, 6, 2, 2), normal(6), [2, 2]),
    call("conv_transpose2d.input", normal(2, 4, 6, 6), normal(4, 3, 2, 2), normal(12), [2, 2], [0, 0], [0, 0], 4),
    call("conv_transpose3d.input", normal(2, 4, 2, 2, 2), normal(4, 6, 2, 2, 2), normal(6)),
    call("embedding", normal(8, 6), integers(2, 4, high=8)),
    call("embedding", normal(7, 6), integers(2, 4, high=7), 3),
    call("layer_norm", normal(2, 4, 6), [6], normal(6), normal(6)),
    call("native_layer_norm", normal(2, 4, 6), [6], normal(6), normal(6), 1e-5),
    call("rms_norm", normal(2, 4, 6), [6], normal(6)),
    call("_fused_rms_norm", normal(2, 4, 6), [6], normal(6), 1e-5),
    call("group_norm", normal(2, 8, 6), 4, normal(8), normal(8)),
    call("group_norm", normal(2, 8, 6), 1, normal(8), normal(8)),
    call("group_norm", normal(2, 8, 6), 2, None, None),
    call("batch_norm", normal(4, 6, 3), normal(6), normal(6), normal(6), positive(6), True, 0.1, 1e-5, False),
    call("batch_norm", normal(4, 6, 3), None, None, None, None, True, 0.1, 1e-5, False),
    *(call(f"{name}.int", normal(2, 4, 6), -1) for name in ("softmax", "log_softmax")),
    *(call(name, normal(2, 4, 6), -1, False) for name in ("_softmax", "_log_softmax")),
    *(call(name, normal(2, 4, 6), 1) for name in ("cumsum", "cumprod", "logcumsumexp", "glu")),
    *(call(name, normal(2, 4, 6), [1], keep) for name in ("amax", "amin", "logsumexp") for keep in (True, False)),
    *(call(f"{name}.dim", normal(2, 4, 6), [-1]) for name in ("var", "std")),
    *(call(f"{name}.dim", normal(2, 4, 6) > 0, 1) for name in ("any", "all")),
    *(call(name, normal(2, 4, 6), 1) for name in ("argmax", "argmin")),
    call("norm.ScalarOpt_dim", normal(2, 4, 6), 2, [1]),
    call("linalg_vector_norm", normal(2, 4, 6), 2, [1]),
    *(
        call(name, normal(2, 4, 6), dims, keep)
        for name in ("mean.dim", "sum.dim_IntList")
        for dims in ([-1], [0, 1])
        for keep in (True, False)
    ),
    *(call(name, normal(2, 4, 6)) for name in ("mean", "sum")),
    call("avg_pool1d", normal(2, 4, 6), [2]),
    call("avg_pool2d", normal(2, 4, 6, 6), [2, 2]),
    call("avg_pool3d", normal(2, 4, 4, 4, 4), [2, 2, 2]),
    call("max_pool1d", normal(2, 4, 6), [2]),
    call("max_pool2d", normal(2, 4, 6, 6), [2, 2]),
    call("max_pool3d", normal(2, 4, 4, 4, 4), [2, 2, 2]),
    call("max_pool2d_with_indices", normal(2, 4, 6, 6), [2, 2]),
    call("max_pool3d_with_indices", normal(2, 4, 4, 4, 4), [2, 2, 2]),
    *(call(f"adaptive_{kind}_pool{n}d", normal(2, 4, *[4] * n), [2] * n) for kind in ("avg", "max") for n in (1, 2, 3)),
    *(call(f"upsample_nearest{n}d", normal(2, 4, *[3] * n), [6] * n) for n in (1, 2, 3)),
    call("upsample_linear1d", normal(2, 4, 3), [6], False),
    *(call(f"upsample_{kind}2d", normal(2, 4, 3, 3), [6, 6], False) for kind in ("bilinear", "bicubic")),
    call("upsample_trilinear3d", normal(2, 4, 3, 3, 3), [6, 6, 6], False),
    call("cross_entropy_loss", normal(6, 8), integers(6, high=8)),
    call("cross_entropy_loss", normal(6, 8), integers(6, high=8), None, 2, 3, 0.1),
    call("scaled_dot_product_attention", normal(2, 4, 6, 2), normal(2, 4, 6, 2), normal(2, 4, 6, 2)),
    call("scaled_dot_product_attention", normal(2, 4, 6, 2), normal(2, 4, 6, 2), normal(2, 4, 6, 2), None, 0.0, True),
    call("scaled_dot_product_attention", normal(2, 4, 6, 2), normal(2, 4, 8, 2), normal(2, 4, 8, 2), normal(4, 6, 8)),
    call("scaled_dot_product_attention", normal(2, 4, 6, 2), normal(2, 2, 6, 2), normal(2, 2, 6, 2), enable_gqa=True),
    call("scaled_dot_product_attention", normal(2, 4, 6, 2), normal(2, 1, 6, 2), normal(2, 1, 6, 2), enable_gqa=True),
    call("index.Tensor", normal(4, 6, 2), [integers(3), integers(3, high=6)]),
    call("index.Tensor", normal(4, 6, 2), [integers(2, 3)]),
    call("index_select", normal(4, 6), 0, integers(3)),
]
RANDOM = {"bernoulli", "feature_dropout", "rand_like", "randn_like", "rrelu"}  # they draw other numbers on every rank
ALIASES = set(  # written like another operator, which has examples, or not made by an export
    "acosh to lift lift_fresh logsigmoid mvlgamma clamp_max bitwise_not clip __and__ __or__ __xor__ "  # noqa: SIM905
    "bitwise_left_shift bitwise_right_shift view_as reshape_as swapaxes swapdims expand_as broadcast_to concat "
    "concatenate _native_batch_norm_legit_functional".split()
)


def overload(operator: str) -> torch._ops.OpOverload:
    packet = getattr(aten, operator.partition(".")[0])
    name = operator.partition(".")[2]
    order = ("Tensor", "default", "Tensor_Tensor") if operator in BINARY.split() else ("default", "Tensor")
    return getattr(packet, name or next(n for n in order if n in packet.overloads()))


@pytest.mark.parametrize("operator", sorted(RULES.keys() - RANDOM - ALIASES))
def test_an_operator_has_examples(operator):
    assert any(example.operator.partition(".")[0] == operator for example in EXAMPLES)


def captured_call(example: Example) -> tuple[Call, list[torch.Tensor]]:
    """The call on placeholders whose values are on meta, and the tensors that they stand for."""
    program, tensors = fx.Graph(), []

    def placeholder(tensor: torch.Tensor) -> fx.Node:
        node = program.placeholder(f"operand_{len(tensors)}")
        learns = tensor.is_floating_point() and not (example.operator == "batch_norm" and len(tensors) >= 3)
        node.meta["val"] = tensor.to("meta").requires_grad_(learns)
        tensors.append(tensor)
        return node

    def argument(value: object) -> object:
        if isinstance(value, list):
            return [argument(each) for each in value]
        return placeholder(value) if isinstance(value, torch.Tensor) else value

    args = tuple(argument(each) for each in example.args)
    node = program.call_function(overload(example.operator), args, example.kwargs)
    node.meta["val"] = node.target(*fx.node.map_arg(args, lambda each: each.meta["val"]), **example.kwargs)
    if not isinstance(node.meta["val"], torch.Tensor):
        for number, value in enumerate(node.meta["val"]):
            program.call_function(__import__("operator").getitem, (node, number)).meta["val"] = value
    return calls_of(program)[0], tensors


def parts_of(tensor: torch.Tensor, placement: TensorPlacement) -> list[torch.Tensor]:
    """What each rank has of ``tensor``; terms of a partial sum are any that add up to it."""
    if placement == PARTIAL:
        noise = torch.randn_like(tensor)
        return [tensor - noise, noise]
    if placement.split is None:
        return [tensor.clone() for _ in range(RANKS)]
    return [shard_of(tensor, placement.split, rank) for rank in range(RANKS)]


def shard_of(tensor: torch.Tensor, split: Split, rank: int) -> torch.Tensor:
    runs = []
    for (first, last), size in zip(split.ranges(rank, RANKS), split.local_blocks(RANKS), strict=True):
        run = tensor.narrow(split.dim, first, last - first)
        missing = [0] * (2 * (tensor.dim() - 1 - split.dim)) + [0, size - (last - first)]
        runs.append(torch.nn.functional.pad(run, missing))
    return torch.cat(runs, split.dim).clone()


def together(parts: list[torch.Tensor], placement: TensorPlacement) -> torch.Tensor:
    """The tensor that the ranks have as ``parts``; fails if they should be equal and are not."""
    if placement == PARTIAL:
        return sum(parts[1:], parts[0])
    if placement.split is None:
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0], equal_nan=True)
        return parts[0]
    split, start, runs = placement.split, 0, []
    for block, size in zip(split.blocks, split.local_blocks(RANKS), strict=True):
        run = torch.cat([part.narrow(split.dim, start, size) for part in parts], split.dim)
        runs.append(run.narrow(split.dim, 0, block))
        start += size
    return torch.cat(runs, split.dim)


def gradient_placement(placement: TensorPlacement) -> TensorPlacement:
    """A copied tensor has a partial gradient, a partial one a whole gradient."""
    return {COPIED: PARTIAL, PARTIAL: WHOLE}.get(placement, placement)


def splits_of(tensor: torch.Tensor) -> list[Split]:
    """Splits of each dimension that two ranks can have: in one block, and in two."""
    found = []
    for dim, size in enumerate(tensor.shape):
        found += [Split(dim, (size,))] if size > 1 else []
        found += [Split(dim, (size // 2, size // 2))] if size % 4 == 0 else []
        found += [Split(dim, (size - 2, 2))] if size % 2 == 0 and size > 4 else []
    return found


def run(target: object, args: object, kwargs: object, values: dict[fx.Node, torch.Tensor], rank: int) -> object:
    """The result of a local call; the operators of a program that is split have their meaning here."""

    def value_of(argument: object) -> object:
        if isinstance(argument, Inner):
            return run(argument.target, argument.args, {}, values, rank)
        if isinstance(argument, fx.Node):
            return values[argument]
        return type(argument)(map(value_of, argument)) if isinstance(argument, list | tuple) else argument

    args = value_of(tuple(args))
    conversion = conversion_of(target)
    if conversion is not None:
        assert conversion.name == "scatter_copy"
        return shard_of(args[0], Split(args[2], tuple(args[3])), rank)
    if target is VOCABULARY_EMBEDDING:
        weight, indices, padding_idx, size, _ = args
        first = rank * weight.shape[0]
        here = (indices >= first) & (indices < min(first + weight.shape[0], size))
        taken = weight[(indices - first).clamp(0, weight.shape[0] - 1)] * here.unsqueeze(-1)
        return torch.where((indices == padding_idx).unsqueeze(-1), taken.detach(), taken)
    return target(*args, **kwargs)


def floating(results: object) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=lambda number: f"{number}-{EXAMPLES[number].operator}")
def test_every_way_is_true(number):
    example = EXAMPLES[number]
    torch.manual_seed(number)
    called, tensors = captured_call(example)
    possible = {node: dict.fromkeys(splits_of(tensor)) for node, tensor in zip(called.operands, tensors, strict=True)}
    rule, ways = ways_of_call(called, RANKS, possible)
    assert any(way.needs[0].split or way.gives[0].split for way in ways) or example.operator not in NEVER_WHOLE
    for way in ways:
        check(called, rule, way, tensors)


NEVER_WHOLE = {
    "linear",
    "matmul",
    "conv2d",
    "embedding",
    "scaled_dot_product_attention",
    "layer_norm",
    "softmax.int",
    "view",
}


def check(called: Call, rule: object, way: Way, tensors: list[torch.Tensor]) -> None:
    target, args, kwargs = called.node.target, called.node.args, called.node.kwargs
    leaves = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
    is_written = called.operator == "batch_norm"  # its statistics have no gradient
    if is_written:
        leaves = [leaf.detach() if place >= 3 else leaf for place, leaf in enumerate(leaves)]  # in place
    whole = floating(run(target, args, kwargs, dict(zip(called.operands, leaves, strict=True)), 0))
    weights = [torch.randn_like(each) if each.requires_grad else None for each in whole]
    _backward(whole, weights)
    if rule.localise is not None and any(each.split is not None for each in (*way.needs, *way.gives)):
        target, args, kwargs = rule.localise(way, RANKS)
    if target is VOCABULARY_CROSS_ENTROPY:
        return  # it communicates inside; tests/runtime/test_tensor_group.py compares it with torch's
    placed = [parts_of(tensor, need) for tensor, need in zip(tensors, way.needs, strict=True)]
    results, gradients, written = [], [], []
    for rank in range(RANKS):
        own = [parts[rank].clone() for parts in placed]
        own = [each.requires_grad_(leaf.requires_grad) for each, leaf in zip(own, leaves, strict=True)]
        found = floating(run(target, args, kwargs, dict(zip(called.operands, own, strict=True)), rank))
        results.append([each.detach() for each in found])
        given = [
            None if weight is None else parts_of(weight, each)[rank] if each.split else weight
            for weight, each in zip(weights, way.gives, strict=True)
        ]
        copied = [each == COPIED for each in way.gives]
        given = [
            weight if weight is None or not is_copied else weight * (0.25 if rank else 0.75)  # a term of the gradient
            for weight, is_copied in zip(given, copied, strict=True)
        ]
        _backward(found, given)
        gradients.append([torch.zeros_like(each) if each.grad is None else each.grad for each in own])
        written.append([each.detach() for each in own])
    for place, (expected, gives) in enumerate(zip(whole, way.gives, strict=True)):
        if called.operator != "empty_like":
            actual = together([each[place] for each in results], gives)
            torch.testing.assert_close(actual, expected.detach(), equal_nan=True, msg=lambda m: f"{way.needs[0]}: {m}")
    for place, (leaf, need) in enumerate(zip(leaves, way.needs, strict=True)):
        if leaf.requires_grad:
            expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            actual = together([each[place] for each in gradients], gradient_placement(need))
            torch.testing.assert_close(actual, expected, equal_nan=True, msg=lambda m: f"gradient, {way.needs[0]}: {m}")
        elif is_written:
            torch.testing.assert_close(together([each[place] for each in written], need), leaf)


def _backward(results: list[torch.Tensor], weights: list[torch.Tensor | None]) -> None:
    pairs = [
        (each, weight)
        for each, weight in zip(results, weights, strict=True)
        if weight is not None and each.requires_grad
    ]
    if pairs:
        torch.autograd.backward([each for each, _ in pairs], [weight for _, weight in pairs])


def test_a_wrong_way_is_found():
    """The columns of a softmax along them are not independent of each other."""
    called, tensors = captured_call(call("softmax.int", normal(4, 6), 1))
    with pytest.raises(AssertionError, match="split along 1"):
        check(called, RULES["softmax"](called), Way((split_along(1, 6),), (split_along(1, 6),)), tensors)
