"""Rules of sums of products over dimensions that have names: einsum, tensordot, outer and bilinear."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from auto3d.tensor.rules.call import Axis, Call, Rule

_BATCH = -1  # the name of an equation's last broadcast dimension; dimensions before it are -2, -3 and so on
_Name = str | int


def _einsum(call: Call) -> Rule:
    """Every letter is an axis; axes that the result lacks are summed."""
    if call.operands != tuple(call.argument("tensors")):
        return Rule()
    inputs, _, output = str(call.argument("equation")).replace(" ", "").partition("->")
    if "->" not in str(call.argument("equation")):  # letters that occur once, in alphabetical order
        letters = sorted(set(inputs) - {",", "."})
        output = "..." * ("..." in inputs) + "".join(letter for letter in letters if inputs.count(letter) == 1)
    operands = [_named(text, len(shape)) for text, shape in zip(inputs.split(","), call.shapes, strict=True)]
    return Rule(axes=_axes(call, operands, _named(output, len(call.results[0]))), product=len(operands) > 1)


def _named(letters: str, dims: int) -> list[_Name]:
    """The name of each of ``dims`` dimensions; three dots stand for as many as the letters leave over.

    Of "b...i" and 4 dimensions: b, -2, -1, i.
    """
    before, dots, after = letters.partition("...")
    rest = dims - len(before) - len(after) if dots else 0
    return [*before, *range(_BATCH - rest + 1, _BATCH + 1), *after]


def _tensordot(call: Call) -> Rule:
    """The dimensions ``dims_self`` of the first operand are summed with ``dims_other`` of the second."""
    left = [dim % len(call.shapes[0]) for dim in call.argument("dims_self")]
    right = [dim % len(call.shapes[1]) for dim in call.argument("dims_other")]
    first: list[_Name] = list(range(len(call.shapes[0])))
    second: list[_Name] = [f"other {dim}" for dim in range(len(call.shapes[1]))]
    for mine, other in zip(left, right, strict=True):
        second[other] = mine
    kept = [*(n for n in first if n not in left), *(n for d, n in enumerate(second) if d not in right)]
    return Rule(axes=_axes(call, [first, second], kept), product=True)


def _outer(call: Call) -> Rule:
    return Rule(axes=_axes(call, ["i", "j"], "ij"), product=True)


def _bilinear(call: Call) -> Rule:
    """values [..., first] and [..., second], weight [out, first, second], bias [out]."""
    batch = list(range(len(call.shapes[0]) - 1))
    names: list[Sequence[_Name]] = [[*batch, "first"], [*batch, "second"], ["out", "first", "second"], ["out"]]
    axes = _axes(call, names[: len(call.operands)], [*batch, "out"])
    bias = frozenset({3} if len(call.operands) == 4 else ())
    return Rule(axes=tuple(replace(a, added=bias) if a.results == (None,) else a for a in axes), product=True)


def _axes(call: Call, operands: Sequence[Sequence[_Name]], result: Sequence[_Name]) -> tuple[Axis, ...]:
    """One axis for each name of a dimension; none if an operand has a name twice, which takes a diagonal."""
    if any(len(set(names)) < len(names) for names in operands):
        return ()
    axes = []
    for name in dict.fromkeys(name for names in operands for name in names):
        places = [names.index(name) if name in names else None for names in operands]
        sizes = [1 if place is None else shape[place] for place, shape in zip(places, call.shapes, strict=True)]
        size = max(sizes)
        if size == 1:
            continue
        has = tuple(place if length == size else None for place, length in zip(places, sizes, strict=True))
        is_kept = name in result
        axes.append(
            Axis(
                has,
                (result.index(name) if is_kept else None,),
                padded=is_kept and sum(place is not None for place in has) == 1,
            )
        )
    return tuple(axes)


RULES: dict[str, Callable[[Call], Rule]] = {
    "einsum": _einsum,
    "tensordot": _tensordot,
    "outer": _outer,
    "bilinear": _bilinear,
}
