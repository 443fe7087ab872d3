from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pairwise import pairs, pairwise_cover, sample_of


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.data())
@settings(max_examples=50, deadline=None)
def test_every_possible_pair_is_covered_by_few_cases(sizes, data):
    whole = [dict(zip("abcde", values, strict=False)) for values in product(*map(range, sizes))]
    cases = data.draw(st.lists(st.sampled_from(whole), min_size=1, unique_by=lambda case: tuple(case.values())))
    for case in cases:
        if case["a"] == 0:
            del case["a"]  # an axis that not every case has
    chosen = pairwise_cover(cases)
    assert {pair for position in chosen for pair in pairs(cases[position])} == {
        p for case in cases for p in pairs(case)
    }
    assert len(set(chosen)) == len(chosen)

    few = sample_of(cases, once="ab")
    pairs_of_others = [{p for p in pairs(case) if not {p[0][0], p[1][0]} & set("ab")} for case in cases]
    assert set().union(*(pairs_of_others[position] for position in few)) == set().union(*pairs_of_others)
    for axis in "ab":
        assert {cases[position].get(axis) for position in few} >= {case[axis] for case in cases if axis in case}
    assert len(set(few)) == len(few)


def test_the_cover_of_a_full_product_is_small():
    cases = [dict(zip("abcde", values, strict=True)) for values in product(range(5), repeat=5)]
    assert 25 <= len(pairwise_cover(cases)) <= 45  # of 3125; 25 is the least, and is only reached by Latin squares
