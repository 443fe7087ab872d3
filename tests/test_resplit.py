"""Messages between two stages that slice a micro-batch differently, compared with moving every element by hand."""

from itertools import chain, product

import pytest

from auto3d.resplit import pieces

COUNTS = list(product(range(1, 7), repeat=2))


@pytest.mark.parametrize(("sources", "targets"), COUNTS)
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


@pytest.mark.parametrize(("sources", "targets"), COUNTS)
def test_gradients_go_the_same_way_back(sources, targets):
    there = pieces(60, sources=sources, targets=targets)
    assert {piece.back() for piece in there} == set(pieces(60, sources=targets, targets=sources))


@pytest.mark.parametrize(("sources", "targets"), COUNTS)
def test_a_copy_comes_from_one_rank_that_sends_samples_anyway(sources, targets):
    copies = pieces(None, sources=sources, targets=targets)
    assert [copy.target for copy in copies] == list(range(targets))
    assert {(copy.source, copy.target) for copy in copies} <= {
        (piece.source, piece.target) for piece in pieces(60, sources=sources, targets=targets)
    }
    if sources == targets:
        assert all(copy.source == copy.target for copy in copies)
