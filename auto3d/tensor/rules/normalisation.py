"""Rules of norms, softmax, sums, pooling and losses: they compute along some dimensions and not along others."""

from collections.abc import Callable
from typing import Any

from auto3d.tensor.collectives import VOCABULARY_CROSS_ENTROPY
from auto3d.tensor.rules.call import WHOLE, Axis, Call, Rule, Split, TensorPlacement, Way
from auto3d.tensor_placement import PlacementKind


def _along_last(call: Call) -> Rule:
    """Norms over the last dimensions, whose sizes are an argument; weight and bias have these dimensions only."""
    shape = call.shapes[0]
    others = (None,) * (len(call.operands) - 1)
    normalised = len(call.argument("normalized_shape"))
    results = len(call.results)
    return Rule(axes=tuple(Axis((dim, *others), (dim,) * results) for dim in range(len(shape) - normalised)))


def _group_norm(call: Call) -> Rule:
    """value [batch, channels, ...]; each group of channels is normalised, with a weight and a bias per channel."""
    state = (0,) * (len(call.operands) - 1)
    groups = int(call.argument("num_groups"))

    def localise(call: Call, way: Way, shards: int) -> tuple[Any, tuple, dict]:
        value, _, *rest = call.node.args
        split = way.needs[0].split
        count = groups // shards if split is not None and split.dim == 1 else groups
        return call.node.target, (value, count, *rest), call.node.kwargs

    channels = () if groups < 2 else (Axis((1, *state), (1,), together=call.shapes[0][1] // groups),)
    samples = Axis((0, *(None for _ in state)), (0,))
    return Rule(axes=(samples, *channels), localise=localise)


def _batch_norm(call: Call) -> Rule:
    """value [batch, channels, ...]; each channel has its own statistics, so channels are independent."""
    return Rule(axes=(Axis((1,) + (0,) * (len(call.operands) - 1), (1,) * len(call.results)),))


def _along_one(call: Call) -> Rule:
    """Operators along one dimension, ``dim``, of a tensor that keeps its shape."""
    shape = call.shapes[0]
    along = int(call.argument("dim")) % max(1, len(shape))
    return Rule(
        axes=tuple(Axis((dim,), (dim,) * len(call.results)) for dim in range(len(shape)) if dim != along),
    )


def _reduced_dims(call: Call) -> tuple[set[int], bool]:
    shape = call.shapes[0]
    dims = call.argument("dim")
    dims = [dims] if isinstance(dims, int) else dims
    reduced = {dim % len(shape) for dim in dims} if dims else set(range(len(shape)))
    return reduced, bool(call.argument("keepdim", False))


def _kept_axes(call: Call) -> list[Axis]:
    """One axis for each dimension that a reduction keeps."""
    reduced, keepdim = _reduced_dims(call)
    axes = []
    for dim in range(len(call.shapes[0])):
        if dim not in reduced:
            place = dim if keepdim else dim - sum(other < dim for other in reduced)
            axes.append(Axis((dim,), (place,) * len(call.results)))
    return axes


def _reduction(call: Call) -> Rule:
    return Rule(axes=tuple(_kept_axes(call)))


def _mean(call: Call) -> Rule:
    return Rule(axes=tuple(_kept_axes(call)), linear=(frozenset({0}),))


def _sum(call: Call) -> Rule:
    reduced, _ = _reduced_dims(call)
    sums = [Axis((dim,), (None,)) for dim in sorted(reduced)]
    return Rule(axes=(*_kept_axes(call), *sums), linear=(frozenset({0}),))


def _pooling(call: Call) -> Rule:
    """[batch, channels, ...] or [channels, ...]: every channel is pooled or interpolated by itself."""
    pooled = next(int(letter) for letter in call.operator if letter.isdigit())
    others = len(call.shapes[0]) - pooled
    return Rule(axes=tuple(Axis((dim,), (dim,) * len(call.results)) for dim in range(others)))


def _cross_entropy(call: Call) -> Rule:
    """Logits [tokens, classes] whose classes are split, and labels that are numbers of classes."""
    logits, labels = call.shapes[:2]
    indices = not call.operands[1].meta["val"].is_floating_point()
    if len(logits) != 2 or len(labels) != 1 or not indices or len(call.operands) != 2:
        return Rule()
    classes = TensorPlacement(PlacementKind.SPLIT, Split(1, (logits[1],)))
    way = Way((classes, WHOLE), (WHOLE,))
    options = (
        int(call.argument("reduction", 1)),
        int(call.argument("ignore_index", -100)),
        float(call.argument("label_smoothing", 0.0)),
    )

    def localise(call: Call, chosen: Way, shards: int) -> tuple[Any, tuple, dict]:
        if chosen != way:
            return call.node.target, call.node.args, call.node.kwargs
        return VOCABULARY_CROSS_ENTROPY, (*call.operands, *options, logits[1], shards), {}

    return Rule(special=(way,), localise=localise)


RULES: dict[str, Callable[[Call], Rule]] = {
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), _along_last),
    **dict.fromkeys(
        ("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "glu"), _along_one
    ),
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    **dict.fromkeys(
        ("amax", "amin", "logsumexp", "var", "std", "any", "all", "argmax", "argmin", "norm", "linalg_vector_norm"),
        _reduction,
    ),
    "mean": _mean,
    "sum": _sum,
    **dict.fromkeys(
        (
            *(f"{kind}_pool{n}d" for kind in ("avg", "max", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)),
            *(f"max_pool{n}d_with_indices" for n in (1, 2, 3)),
            *(
                f"upsample_{kind}"
                for kind in (
                    "nearest1d",
                    "nearest2d",
                    "nearest3d",
                    "bilinear2d",
                    "bicubic2d",
                    "linear1d",
                    "trilinear3d",
                )
            ),
        ),
        _pooling,
    ),
    **dict.fromkeys(("cross_entropy_loss",), _cross_entropy),
}
