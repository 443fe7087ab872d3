"""Messages between two stages that slice a micro-batch differently, compared with moving every element by hand."""

from itertools import chain, product

import pytest

from auto3d.resplit import pieces
from tests.each import for_each

COUNTS = list(product(range(1, 7), repeat=2))


@for_each(("sources", "targets"), COUNTS)
@pytest.mark.parametrize("multiple", [1, 2, 5])
def test_every_element_arrives_where_it_belongs(sources, targets, multiple):
    length = 60 * multiple
    whole = list(range(length))
    own, given = length // sources, length // targets
    found = pieces(length, sources=sources, targets=targets)
    arrived = [[None] * given for _ in range(targets)]
    for piece in found:
        sent = whole[piece.source * own : (piece.source + 1) * own][piece.start : piece.start + piece.length]
        assert len(sent) == piece.length > 0, "inside the source's part"
        assert arrived[piece.target][piece.into : piece.into + piece.length] == [None] * piece.length, "once"
        arrived[piece.target][piece.into : piece.into + piece.length] = sent
    assert list(chain(*arrived)) == whole
    pairs = [(piece.source, piece.target) for piece in found]
    assert len(set(pairs)) == len(pairs), "one piece for a pair"
    assert pairs == sorted(pairs), "in the order of the elements"


@for_each(("sources", "targets"), COUNTS)
def test_halves_of_slices_have_the_elements_of_the_slices(sources, targets):
    """Every element of a half arrives in the half of the target that its place in the whole is in."""
    found = pieces(120, sources=sources, targets=targets, parts=2)
    own, given = 60 // sources, 60 // targets
    arrived = [-1] * 120
    for piece in found:
        first = (2 * piece.source + piece.source_part) * own + piece.start
        into = (2 * piece.target + piece.target_part) * given + piece.into
        assert piece.start + piece.length <= own, "inside the half"
        assert piece.into + piece.length <= given, "inside the half"
        arrived[into : into + piece.length] = range(first, first + piece.length)
    assert arrived == list(range(120))
    of_wholes = {(piece.source, piece.target) for piece in pieces(120, sources=sources, targets=targets)}
    assert {(piece.source, piece.target) for piece in found} == of_wholes, "between the same ranks"
    assert {piece.back() for piece in found} == set(pieces(120, sources=targets, targets=sources, parts=2))


@for_each(("sources", "targets"), COUNTS)
def test_gradients_go_the_same_way_back(sources, targets):
    there = pieces(60, sources=sources, targets=targets)
    assert {piece.back() for piece in there} == set(pieces(60, sources=targets, targets=sources))


@for_each(("sources", "targets"), COUNTS)
def test_a_copy_comes_from_one_rank_that_sends_samples_anyway(sources, targets):
    copies = pieces(None, sources=sources, targets=targets)
    assert [copy.target for copy in copies] == list(range(targets))
    assert {(copy.source, copy.target) for copy in copies} <= {
        (piece.source, piece.target) for piece in pieces(60, sources=sources, targets=targets)
    }
    if sources == targets:
        assert all(copy.source == copy.target for copy in copies)
