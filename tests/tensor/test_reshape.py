"""A reshape on shards gives the shards of the reshaped tensor, and no such reshape is missed: against brute force."""

from math import prod

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import fx

from auto3d.capture.shard import Shard
from auto3d.tensor.operations import calls_of
from auto3d.tensor.rules.call import Call, Rule, Way
from auto3d.tensor_placement import Split
from tests.tensor.one_call import ways_of_call

Shape = tuple[int, ...]


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """Two shapes of equally many elements, which often have borders between dimensions in common."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=5))
    others = draw(st.one_of(st.just(factors), st.permutations(factors)))
    return _grouped(draw, factors), _grouped(draw, others)


def _grouped(draw: st.DrawFn, factors: list[int]) -> Shape:
    ends = sorted(draw(st.sets(st.integers(1, len(factors)), max_size=4)) | {len(factors)})
    return tuple(prod(factors[first:last]) for first, last in zip([0, *ends], ends, strict=False))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Shape, Split, int]:
    """(shape, target, split, ranks); several blocks divide among the ranks, a single one may need padding."""
    shape, target = draw(reshapes())
    dim = draw(st.integers(0, len(shape) - 1))
    ranks = draw(st.integers(2, 4))
    parts = shape[dim] // ranks
    if shape[dim] % ranks or draw(st.booleans()):
        return shape, target, Split(dim, (shape[dim],)), ranks
    ends = sorted(draw(st.sets(st.integers(1, parts), max_size=4)) | {parts})
    return shape, target, Split(dim, tuple((b - a) * ranks for a, b in zip([0, *ends], ends, strict=False))), ranks


def carried(shape: Shape, target: Shape, split: Split, ranks: int) -> tuple[Call, Rule, list[Way]]:
    """A call, its rule and the ways to reshape a tensor of ``shape`` that is split as ``split``."""
    program = fx.Graph()
    operand = program.placeholder("operand")
    operand.meta["val"] = torch.empty(shape, device="meta")
    node = program.call_function(torch.ops.aten.view.default, (operand, list(target)))
    node.meta["val"] = torch.empty(target, device="meta")
    (call,) = calls_of(program)
    rule, ways = ways_of_call(call, ranks, {operand: [split]})
    return call, rule, [way for way in ways if way.needs[0].split == split]


def numbers(shape: Shape) -> torch.Tensor:
    """A number for each element; padding is 0."""
    return torch.arange(1, prod(shape) + 1).reshape(shape)


@given(cases())
@example(((6,), (3, 2), Split(0, (2, 2, 2)), 2))  # a fused weight of query, key and value
@example(((5, 4), (5, 2, 2), Split(0, (5,)), 2))
@example(((5, 4), (20,), Split(0, (5,)), 2))
@settings(max_examples=600)
def test_a_reshape_of_shards_gives_the_shards(case):
    shape, target, split, ranks = case
    call, rule, ways = carried(shape, target, split, ranks)
    for way in ways:
        operator, (_, local), _ = rule.localise(call, way, ranks)
        for rank in range(ranks):
            shard = operator(Shard(split, rank, ranks).of(numbers(shape)), local)
            assert torch.equal(shard, Shard(way.gives[0].split, rank, ranks).of(numbers(target)))
    if split.padding(ranks) == 0 and split.size > 1:
        assert {way.gives[0].split.dim for way in ways} == splittable(shape, target, split, ranks)


def splittable(shape: Shape, target: Shape, split: Split, ranks: int) -> set[int]:
    """The dimensions of ``target`` of which every rank has some elements in full, in their order, after a reshape."""
    shards = [Shard(split, rank, ranks).of(numbers(shape)) for rank in range(ranks)]
    found = set()
    for dim, size in enumerate(target):
        if size % ranks == 0:
            local = [size // ranks if other == dim else length for other, length in enumerate(target)]
            mine = [shard.reshape(local) for shard in shards]
            first, *has = (
                each.movedim(dim, 0).flatten()[:: each.numel() // each.shape[dim]].tolist()
                for each in (numbers(target), *mine)
            )
            if all(set(each) <= set(first) for each in has) and all(
                torch.equal(each, numbers(target).index_select(dim, torch.tensor([first.index(n) for n in own])))
                for each, own in zip(mine, has, strict=True)
            ):
                found.add(dim)
    return found
