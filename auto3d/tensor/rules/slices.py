"""Rules of the operators that only the program of a slice of the sequence has."""

from collections.abc import Callable

from auto3d.tensor.rules.call import Axis, Call, Rule


def _with_earlier(call: Call) -> Rule:
    """A value behind the values of earlier slices along one dimension: other dimensions pass through."""
    joined = call.argument("dim")
    return Rule(axes=tuple(Axis((dim,), (dim,)) for dim in range(len(call.shapes[0])) if dim != joined))


def _causal_rows(call: Call) -> Rule:
    """Rows of a mask [..., queries, keys]: all dimensions but these two pass through."""
    return Rule(axes=tuple(Axis((dim,), (dim,)) for dim in range(len(call.shapes[0]) - 2)))


RULES: dict[str, Callable[[Call], Rule]] = {"with_earlier": _with_earlier, "causal_rows": _causal_rows}
