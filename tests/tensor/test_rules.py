"""Every way that a rule gives to run a call is true: on shards and partial sums, the operator gives the same results.

Each call below is captured in a small program. For each of its ways the operands are turned into what each rank has of
them, the local operator runs on every rank, and its results and the gradients of its operands are put together again.
"""

import operator
from dataclasses import dataclass

import pytest
import torch
from torch import fx
from transformers.integrations import moe  # noqa: F401  it registers grouped_mm_fallback

from auto3d.capture.shard import Shard, joined
from auto3d.conversions import conversion_of
from auto3d.derived.slice_operators import WITH_EARLIER
from auto3d.runtime.messages.tensor_group import ConversionModule, VocabularyCrossEntropy, VocabularyEmbedding
from auto3d.runtime.verify.lockstep import Lockstep, LockstepGroup
from auto3d.tensor.collectives import VOCABULARY_CROSS_ENTROPY, VOCABULARY_EMBEDDING, split_of
from auto3d.tensor.operations import calls_of
from auto3d.tensor.rules import RULES, slices
from auto3d.tensor.rules.call import Call, Inner, Rule, Way
from auto3d.tensor_placement import COPIED, PARTIAL, WHOLE, Split, TensorPlacement, split_along
from tests.each import for_each
from tests.tensor.one_call import ways_of_call

aten = torch.ops.aten


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
PLAIN += "zeros_like asinh atanh alias lift_fresh_copy empty_like rand_like randn_like"
BINARY = (
    "add sub mul div atan2 copysign eq fmax fmin fmod ge gt hypot le logaddexp lt maximum minimum ne pow remainder "
)
BINARY += "xlogy rsub true_divide multiply subtract divide logical_and logical_or logical_xor"
BITWISE = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift "
BITWISE += "__and__ __or__ __xor__ __lshift__ __rshift__"
EXAMPLES = [
    call("with_earlier", normal(2, 4, 3, 6), 2, 5),
    call("causal_rows", torch.ones(2, 4, 6, 6).tril().bool(), 2, 4),
    *(call(name, positive(4, 2, 6)) for name in PLAIN.split()),
    *(
        call(name, positive(4, 2, 6), positive(*shape))
        for name in BINARY.split()
        for shape in ((4, 2, 6), (6,), (2, 1))
    ),
    call("floor_divide", integers(4, 6), integers(6) + 1),
    *(call(name, integers(4, 6), integers(6)) for name in BITWISE.split()),
    *(call(name, integers(4, 6)) for name in ("bitwise_not", "lift", "lift_fresh")),
    call("acosh", positive(4, 6) + 1),
    call("mvlgamma", positive(4, 6) + 1, 2),
    *(call(name, normal(4, 6), 2.0) for name in ("add.Scalar", "mul.Scalar", "div.Scalar", "pow.Tensor_Scalar")),
    call("div.Tensor_mode", normal(4, 6), normal(4, 6), rounding_mode="floor"),
    call("where.self", normal(4, 6) > 0, normal(4, 6), normal(6)),
    call("masked_fill.Scalar", normal(4, 6), normal(6) > 0, 0.5),
    call("addcmul", normal(4, 6), normal(4, 6), normal(6)),
    call("addcdiv", normal(4, 6), normal(4, 6), positive(6)),
    call("lerp.Tensor", normal(4, 6), normal(4, 6), positive(6)),
    *(call("prelu", normal(2, 4, 6), positive(*shape)) for shape in ((4,), (1,), ())),
    *(call(f"fill.{kind}", normal(4, 6), value) for kind, value in (("Scalar", 2.0), ("Tensor", normal()))),
    call("type_as", normal(4, 6), normal(1)),
    *(call("to.dtype", normal(4, 6), dtype) for dtype in (torch.float32, torch.int64)),
    call("to.other", normal(4, 6), integers(1)),
    call("_to_copy", normal(4, 6), dtype=torch.float32),
    call("dropout", normal(4, 6), 0.0, True),
    call("native_dropout", normal(4, 6), 0.0, True),
    call("feature_dropout", normal(4, 6, 2), 0.5, False),
    call("bernoulli", integers(4, 6, high=2).double()),
    call("rrelu", normal(4, 6)),
    *(call(name, normal(4, 6), 0.1) for name in ("clamp_min", "clamp_max")),
    *(call(f"{name}.Tensor", normal(4, 6), positive(6)) for name in ("clamp_min", "clamp_max")),
    *(call(name, normal(4, 6), -0.5, 0.5) for name in ("clamp", "clip")),
    call("clamp.Tensor", normal(4, 6), None, positive(6)),
    call("threshold", normal(4, 6), 0.1, 0.0),
    call("logit", positive(4, 6)),
    call("full_like", normal(4, 6), 2.0),
    *(call(name, normal(2, 4, 6), [2, 24]) for name in ("view", "reshape", "_unsafe_view")),
    call("view", normal(4, 6), [2, 2, 2, 3]),
    call("reshape", normal(4, 6, 2), [24, 2]),
    call("view", normal(2, 8, 6), [4, 4, 6]),
    call("view.dtype", integers(4, 6), torch.int32),
    *(call(name, normal(2, 4, 6), normal(*shape)) for name in ("view_as", "reshape_as") for shape in ((8, 6), (2, 24))),
    call("flatten.using_ints", normal(2, 4, 6), 1, 2),
    call("unflatten.int", normal(2, 24), 1, [4, 6]),
    call("permute", normal(2, 4, 6), [2, 0, 1]),
    call("transpose.int", normal(2, 4, 6), 1, -1),
    *(call(name, normal(2, 4, 6), 0, 2) for name in ("swapaxes", "swapdims")),
    *(call(name, normal(4, 6)) for name in ("t", "numpy_T", "mT")),
    call("mT", normal(2, 4, 6)),
    call("numpy_T", normal(2, 4, 6)),
    call("unsqueeze", normal(4, 6), 1),
    call("squeeze.dim", normal(4, 1, 6), 1),
    call("expand", normal(4, 1, 6), [2, 4, 3, 6]),
    call("expand", normal(4, 1, 6), [-1, 3, -1]),
    call("expand_as", normal(4, 1, 6), normal(2, 4, 8, 6)),
    call("broadcast_to", normal(4, 1, 6), [2, 4, 3, 6]),
    call("broadcast_tensors", [normal(4, 2, 6), normal(2, 1), normal(4, 1, 6)]),
    call("repeat", normal(4, 1), [2, 1, 4]),
    call("repeat_interleave.self_int", normal(4, 6), 2, 0),
    call("repeat_interleave.self_int", normal(4, 6), 2, -2, output_size=8),
    call("roll", normal(4, 6), [1], [0]),
    call("flip", normal(4, 6), [1]),
    call("pad", normal(4, 6), [1, 1]),
    call("pad", normal(4, 6), [1, 1], "constant", 2.0),
    call("constant_pad_nd", normal(4, 6), [0, 0, 1, 0]),
    call("select.int", normal(4, 6, 2), 1, 2),
    call("unbind.int", normal(4, 3, 2), 1),
    call("stack", [normal(4, 6), normal(4, 6)], 1),
    *(call(name, [normal(4, 6), normal(4, 2)], 1) for name in ("cat", "concat", "concatenate")),
    call("cat", [normal(4, 6), normal(4, 2)], -1),
    call("cat", [normal(2, 6), normal(4, 6)]),
    call("split.Tensor", normal(4, 12), 4, 1),
    call("split_with_sizes", normal(4, 12), [8, 4], 1),
    call("chunk", normal(4, 12), 3, -1),
    call("slice.Tensor", normal(4, 12), 1, 4, 8),
    call("slice.Tensor", normal(4, 12), 1, 0, 12, 2),
    *(call("narrow", normal(4, 12), 1, start, 4) for start in (4, -4)),
    call("narrow.Tensor", normal(4, 12), 1, torch.tensor(4), 8),
    call("slice_scatter", normal(4, 12), normal(4, 8), 1, 4, 12),
    call("select_scatter", normal(4, 12, 2), normal(4, 2), 1, 3),
    call("linear", normal(2, 4, 6), normal(8, 6), normal(8)),
    call("linear", normal(4, 6), normal(8, 6)),
    call("addmm", normal(8), normal(4, 6), normal(6, 8)),
    call("addmm", normal(4, 8), normal(4, 6), normal(6, 8)),
    call("linear", normal(2, 4, 6), normal(6)),
    call("linear", normal(6), normal(8, 6), normal(8)),
    call("addmm", normal(4, 1), normal(4, 6), normal(6, 8), beta=0.5, alpha=2),
    call("mm", normal(4, 6), normal(6, 8)),
    call("mv", normal(4, 6), normal(6)),
    call("dot", normal(6), normal(6)),
    call("outer", normal(4), normal(6)),
    call("bilinear", normal(2, 4, 6), normal(2, 4, 8), normal(10, 6, 8), normal(10)),
    call("bilinear", normal(4, 6), normal(4, 8), normal(10, 6, 8)),
    call("einsum", "bsd,edf->besf", [normal(2, 4, 6), normal(8, 6, 10)]),
    call("einsum", "bse, besf, efd -> bsd", [normal(2, 4, 6), normal(2, 6, 4, 8), normal(6, 8, 2)]),
    call("einsum", "ZA,aZ", [normal(4, 6), normal(8, 4)]),
    call("einsum", "...d,hd->h...", [normal(2, 4, 6), normal(8, 6)]),
    call("einsum", "i...j,...j", [normal(4, 2, 1, 6), normal(8, 6)]),
    call("einsum", "bd,cd->bc", [normal(4, 6), normal(7, 1)]),
    call("einsum", "iij->ij", [normal(4, 4, 6)]),
    call("einsum", "ij->j", [normal(4, 6)]),
    call("tensordot", normal(2, 4, 6), normal(6, 2, 8), [2, 0], [-3, 1]),
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
    call("grouped_mm_fallback", normal(6, 8), normal(3, 8, 4), torch.tensor([1, 4, 6])),
    call("_grouped_mm", normal(6, 32).float(), normal(3, 32, 16).float(), torch.tensor([1, 4, 6], dtype=torch.int32)),
    call("embedding", normal(8, 6), integers(2, 4, high=8)),
    call("embedding", normal(7, 6), integers(2, 4, high=7), 3),
    call("embedding", normal(8, 6), integers(2, 4, high=3), -1, True),
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
    call("avg_pool2d", normal(4, 6, 6), [2, 2]),
    call("max_pool2d", normal(4, 6, 6), [2, 2]),
    call("max_pool3d_with_indices", normal(4, 4, 4, 4), [2, 2, 2]),
    call("max_pool1d_with_indices", normal(2, 4, 6), [2]),
    call("max_pool2d_with_indices", normal(2, 4, 6, 6), [2, 2]),
    call("max_pool3d_with_indices", normal(2, 4, 4, 4, 4), [2, 2, 2]),
    *(call(f"adaptive_{kind}_pool{n}d", normal(2, 4, *[4] * n), [2] * n) for kind in ("avg", "max") for n in (1, 2, 3)),
    *(call(f"upsample_nearest{n}d", normal(2, 4, *[3] * n), [6] * n) for n in (1, 2, 3)),
    call("upsample_linear1d", normal(2, 4, 3), [6], False),
    *(call(f"upsample_{kind}2d", normal(2, 4, 3, 3), [6, 6], False) for kind in ("bilinear", "bicubic")),
    call("upsample_trilinear3d", normal(2, 4, 3, 3, 3), [6, 6, 6], False),
    call("cross_entropy_loss", normal(6, 8), integers(6, high=8)),
    call("cross_entropy_loss", normal(6, 8), integers(6, high=8), None, 2, 3, 0.1),
    call("cross_entropy_loss", normal(6, 7), integers(6, high=7), None, 0),
    call("scaled_dot_product_attention", normal(2, 4, 6, 2), normal(2, 4, 6, 2), normal(2, 4, 6, 2)),
    call("scaled_dot_product_attention", normal(2, 4, 6, 2), normal(2, 4, 6, 2), normal(2, 4, 6, 2), None, 0.0, True),
    call("scaled_dot_product_attention", normal(2, 4, 6, 2), normal(2, 4, 8, 2), normal(2, 4, 8, 2), normal(4, 6, 8)),
    call("scaled_dot_product_attention", normal(2, 4, 6, 2), normal(2, 1, 6, 2), normal(2, 1, 6, 2)),
    call("scaled_dot_product_attention", normal(1, 4, 6, 2), normal(2, 4, 6, 2), normal(2, 1, 6, 2)),
    call("scaled_dot_product_attention", normal(2, 4, 6, 2), normal(2, 2, 6, 2), normal(2, 2, 6, 2), enable_gqa=True),
    call("scaled_dot_product_attention", normal(2, 4, 6, 2), normal(2, 1, 6, 2), normal(2, 1, 6, 2), enable_gqa=True),
    call("index.Tensor", normal(4, 6, 2), [integers(3), integers(3, high=6)]),
    call("index.Tensor", normal(4, 6, 2), [integers(2, 3)]),
    call("index_select", normal(4, 6), 0, integers(3)),
]
UNDEFINED = {"empty_like", "rand_like", "randn_like"}  # their values differ on every rank
MORE_RANKS = [  # sizes that three and four ranks divide
    call("add", normal(12, 24), normal(24)),
    call("mul", normal(12, 24), normal(24)),
    call("div", normal(), positive(2, 13)),
    call("div", normal(2, 13), positive(2, 1)),
    call("view", normal(2, 12, 24), [2, 288]),
    call("reshape", normal(2, 24, 24), [48, 2, 12]),
    call("view_as", normal(12, 24), normal(12, 12, 2)),
    call("transpose.int", normal(12, 24), 0, 1),
    call("split.Tensor", normal(12, 36), 12, 1),
    call("split_with_sizes", normal(4, 36), [24, 12], 1),
    call("slice.Tensor", normal(4, 36), 1, 12, 36),
    call("cat", [normal(12, 24), normal(12, 12)], 1),
    call("expand", normal(12, 1, 24), [12, 2, 24]),
    call("linear", normal(2, 12, 24), normal(36, 24), normal(36)),
    call("addmm", normal(36), normal(12, 24), normal(24, 36)),
    call("matmul", normal(12, 4, 24), normal(24, 13)),
    call("baddbmm", normal(12, 1, 24), normal(12, 4, 12), normal(12, 12, 24)),
    call("einsum", "bsd,vd->bsv", [normal(2, 12, 24), normal(13, 24)]),
    call("tensordot", normal(12, 4, 24), normal(24, 13), [2], [0]),
    call("conv1d", normal(2, 12, 8), normal(24, 12, 3), normal(24)),
    call("conv1d", normal(2, 24, 8), normal(48, 2, 3), normal(48), [1], [1], [1], 12),
    call("conv_transpose1d", normal(2, 12, 8), normal(12, 24, 3), normal(24)),
    call("embedding", normal(13, 12), integers(2, 12, high=13), 5),
    call("layer_norm", normal(12, 24, 6), [6], normal(6), normal(6)),
    call("group_norm", normal(2, 24, 6), 12, normal(24), normal(24)),
    call("softmax.int", normal(12, 24, 6), -1),
    call("sum.dim_IntList", normal(12, 24), [1]),
    call("mean.dim", normal(12, 24), [0]),
    call("cross_entropy_loss", normal(6, 13), integers(6, high=13), None, 1, 3, 0.1),
    call("scaled_dot_product_attention", *(normal(2, 12, 4, 2) for _ in range(3))),
    call("scaled_dot_product_attention", normal(2, 12, 4, 2), *(normal(2, 2, 4, 2) for _ in range(2)), enable_gqa=True),
    call("index.Tensor", normal(4, 12, 24), [integers(3)]),
]


def overload(name: str) -> torch._ops.OpOverload:
    namespace = torch.ops.transformers if name.startswith("grouped_mm") else aten
    namespace = torch.ops.auto3d if name in slices.RULES else namespace
    packet = getattr(namespace, name.partition(".")[0])
    chosen = name.partition(".")[2]
    tensors = BINARY.split() + BITWISE.split()
    order = ("Tensor", "default", "Tensor_Tensor") if name in tensors else ("default", "Tensor")
    return getattr(packet, chosen or next(n for n in order if n in packet.overloads()))


@pytest.mark.parametrize("name", sorted(RULES))
def test_an_operator_has_examples(name):
    assert any(example.operator.partition(".")[0] == name for example in EXAMPLES)


def captured_call(example: Example) -> tuple[Call, list[torch.Tensor]]:
    """The call on placeholders whose values are on meta, and the tensors that they stand for."""
    program, tensors, learning = fx.Graph(), [], {}

    def placeholder(tensor: torch.Tensor) -> fx.Node:
        node = program.placeholder(f"operand_{len(tensors)}")
        learns = tensor.is_floating_point() and not (example.operator == "batch_norm" and len(tensors) >= 3)
        learning[node] = tensor.clone().requires_grad_(learns)
        node.meta["val"] = _on_meta(learning[node])
        tensors.append(tensor)
        return node

    def argument(value: object) -> object:
        if isinstance(value, list):
            return [argument(each) for each in value]
        return placeholder(value) if isinstance(value, torch.Tensor) else value

    args = tuple(argument(each) for each in example.args)
    node = program.call_function(overload(example.operator), args, example.kwargs)
    value = STAND_IN.get(node.target, node.target)(*fx.node.map_arg(args, learning.get), **example.kwargs)
    if isinstance(value, torch.Tensor):
        node.meta["val"] = _on_meta(value)
    else:
        node.meta["val"] = tuple(map(_on_meta, value))
        for number, each in enumerate(node.meta["val"]):
            program.call_function(operator.getitem, (node, number)).meta["val"] = each
    return calls_of(program)[0], tensors


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def parts_of(tensor: torch.Tensor, placement: TensorPlacement, ranks: int) -> list[torch.Tensor]:
    """What each rank has of ``tensor``; terms of a partial sum are any that add up to it."""
    if placement == PARTIAL:
        noise = [torch.randn_like(tensor) for _ in range(ranks - 1)]
        return [tensor - sum(noise), *noise]
    if placement.split is None:
        return [tensor.clone() for _ in range(ranks)]
    return [Shard(placement.split, rank, ranks).of(tensor).clone() for rank in range(ranks)]


def together(parts: list[torch.Tensor], placement: TensorPlacement) -> torch.Tensor:
    """The tensor that the ranks have as ``parts``; fails if they should be equal and are not."""
    if placement == PARTIAL:
        return sum(parts[1:], parts[0])
    if placement.split is not None:
        return joined(parts, placement.split)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], equal_nan=True)
    return parts[0]


def gradient_placement(placement: TensorPlacement) -> TensorPlacement:
    """A copied tensor has a partial gradient, a partial one a whole gradient."""
    return {COPIED: PARTIAL, PARTIAL: WHOLE}.get(placement, placement)


def splits_of(tensor: torch.Tensor, ranks: int) -> list[Split]:
    """Splits of each dimension: in one block, which may be padded, in two equal ones and in two that differ."""
    found = []
    for dim, size in enumerate(tensor.shape):
        found += [Split(dim, (size,))] if size > 1 else []
        found += [Split(dim, (size // 2, size // 2))] if size % (2 * ranks) == 0 else []
        found += [Split(dim, (size - ranks, ranks))] if size % ranks == 0 and size > 2 * ranks else []
    return found


def run(target: object, args: object, kwargs: dict, values: dict, group: LockstepGroup | None) -> object:
    """The result of a local call on one rank of ``group``; None stands for one process."""

    def value_of(argument: object) -> object:
        if isinstance(argument, Inner):
            return run(argument.target, argument.args, {}, values, group)
        if isinstance(argument, fx.Node):
            return values[argument]
        return type(argument)(map(value_of, argument)) if isinstance(argument, list | tuple) else argument

    args = value_of(tuple(args))
    if (conversion := conversion_of(target)) is not None:
        return ConversionModule(conversion, split_of(args), group, "a value")(*args)
    if target is VOCABULARY_EMBEDDING:
        return VocabularyEmbedding(group)(*args)
    if target is VOCABULARY_CROSS_ENTROPY:
        return VocabularyCrossEntropy(group, "a loss")(*args)
    return STAND_IN.get(target, target)(*args, **kwargs)


def behind_zeros(value: torch.Tensor, dim: int, earlier: int) -> torch.Tensor:
    shape = [earlier if place == dim else size for place, size in enumerate(value.shape)]
    return torch.cat([value.new_zeros(shape), value], dim)


STAND_IN = {WITH_EARLIER: behind_zeros}  # a stage runs it with the values that it keeps


def results_of(value: object) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def ways_of(example: Example, ranks: int) -> tuple[Call, list[torch.Tensor], Rule, tuple[Way, ...]]:
    called, tensors = captured_call(example)
    splits = [dict.fromkeys(splits_of(tensor, ranks)) for tensor in tensors]
    return called, tensors, *ways_of_call(called, ranks, dict(zip(called.operands, splits, strict=True)))


CASES = [(example, 2) for example in EXAMPLES] + [(example, ranks) for example in MORE_RANKS for ranks in (3, 4)]


SLOW = [number for number, (_, ranks) in enumerate(CASES) if ranks > 3]  # three ranks show that there may be more
FAST = [number for number in range(len(CASES)) if number not in SLOW]


def every_way_is_true(number: int) -> None:
    example, ranks = CASES[number]
    torch.manual_seed(number)
    called, tensors, rule, ways = ways_of(example, ranks)
    is_split = any(way.needs[0].split or way.gives[0].split for way in ways)
    assert is_split or example.operator not in NEVER_WHOLE
    for way in ways:
        check_sizes(called, way)
        check(called, rule, way, tensors, ranks)


test_every_way_is_true = for_each("number", FAST)(every_way_is_true)
test_every_way_on_more_ranks_is_true = pytest.mark.soak(for_each("number", SLOW)(every_way_is_true))


NEVER_WHOLE = {
    "_grouped_mm",
    "grouped_mm_fallback",
    "linear",
    "matmul",
    "conv1d",
    "conv2d",
    "embedding",
    "scaled_dot_product_attention",
    "layer_norm",
    "softmax.int",
    "view",
    "view_as",
    "reshape_as",
    "expand_as",
    "cross_entropy_loss",
}


def check_sizes(called: Call, way: Way) -> None:
    """A way places every operand and every result, each split along a dimension that it has."""
    for placements, shapes in ((way.needs, called.shapes), (way.gives, called.results)):
        assert len(placements) == len(shapes)
        for placement, shape in zip(placements, shapes, strict=True):
            if placement.split is not None:
                assert placement.split.size == shape[placement.split.dim]


def check(called: Call, rule: Rule, way: Way, tensors: list[torch.Tensor], ranks: int) -> None:
    target, args, kwargs = called.node.target, called.node.args, called.node.kwargs
    leaves = [
        tensor.clone().requires_grad_(node.meta["val"].requires_grad)
        for tensor, node in zip(tensors, called.operands, strict=True)
    ]
    whole = results_of(run(target, args, kwargs, dict(zip(called.operands, leaves, strict=True)), None))
    weights = [torch.randn_like(each) if each.requires_grad else None for each in whole]
    _backward(whole, weights)
    if rule.localise is not None and any(each.split is not None for each in (*way.needs, *way.gives)):
        target, args, kwargs = rule.localise(called, way, ranks)
    placed = [parts_of(tensor, need, ranks) for tensor, need in zip(tensors, way.needs, strict=True)]
    given = [
        [None] * ranks if weight is None else _gradients(weight, gives, ranks)
        for weight, gives in zip(weights, way.gives, strict=True)
    ]

    def on_rank(group: LockstepGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        own = [
            parts[group.shard].clone().requires_grad_(leaf.requires_grad)
            for parts, leaf in zip(placed, leaves, strict=True)
        ]
        found = results_of(run(target, args, kwargs, dict(zip(called.operands, own, strict=True)), group))
        _backward(found, [each[group.shard] for each in given])
        return [each.detach() for each in found], own

    outcomes = Lockstep(ranks).run(on_rank)
    for place, (expected, gives) in enumerate(zip(whole, way.gives, strict=True)):
        found = [results[place] for results, _ in outcomes]
        if called.operator in UNDEFINED:
            assert {each.shape for each in found} == {gives.local_shape(expected.shape, ranks)}
            continue
        actual = together(found, gives)
        torch.testing.assert_close(actual, expected.detach(), equal_nan=True, msg=lambda m: f"{way.needs[0]}: {m}")
    for place, (leaf, need) in enumerate(zip(leaves, way.needs, strict=True)):
        own = [each[place] for _, each in outcomes]
        if leaf.requires_grad:
            found = [torch.zeros_like(each) if each.grad is None else each.grad for each in own]
            actual = together(found, gradient_placement(need))
            expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(actual, expected, equal_nan=True, msg=lambda m: f"gradient, {way.needs[0]}: {m}")
        else:  # batch_norm writes its statistics in place
            torch.testing.assert_close(together(own, need), leaf)


def _gradients(weight: torch.Tensor, gives: TensorPlacement, ranks: int) -> list[torch.Tensor]:
    """The gradient that each rank gets of a result: of a copied one, a term of it."""
    if gives == COPIED:
        return [weight * (rank + 1) * 2 / (ranks * (ranks + 1)) for rank in range(ranks)]
    return parts_of(weight, gives, ranks) if gives.split is not None else [weight] * ranks


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
        check(called, RULES["softmax"](called), Way((split_along(1, 6),), (split_along(1, 6),)), tensors, 2)


@pytest.mark.parametrize(
    ("example", "dims"),
    [
        (call("avg_pool2d", normal(4, 6, 6), [2, 2]), {0}),
        (call("max_pool1d", normal(4, 6), [2]), {0}),
        (call("feature_dropout", normal(4, 6, 2), 0.5, True), {0, 1}),
        (call("view.dtype", integers(4, 6), torch.int32), set()),
    ],
    ids=lambda each: each.operator if isinstance(each, Example) else "",
)
def test_what_is_pooled_or_dropped_together_is_not_split(example, dims):
    _, _, _, ways = ways_of(example, 2)
    assert {way.needs[0].split.dim for way in ways if way.needs[0].split is not None} == dims


def test_a_conversion_to_integers_does_not_keep_a_partial_sum():
    _, _, _, ways = ways_of(call("to.dtype", normal(4, 6), torch.int64), 2)
    assert all(PARTIAL not in way.needs for way in ways)
