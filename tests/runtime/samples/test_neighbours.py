"""What ranks read of their neighbours takes no more than its share of an iteration, and is all of it in turn."""

from types import SimpleNamespace

import pytest

from auto3d.runtime.samples.neighbours import BUDGET_US, LEAST_EVERY, MOST_US, Neighbour, compared


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("cost_us", [1, 125, 300, 1000, 1001, 7000, MOST_US])
def test_it_costs_no_more_than_its_share_and_each_place_has_its_turn(micro_batches: int, cost_us: int):
    iterations = 40 * LEAST_EVERY
    found = [
        compared(each, micro_batches=micro_batches, cost_us=cost_us, is_due=False) for each in range(3, 3 + iterations)
    ]
    for each in found:
        assert set(each) <= set(range(micro_batches))
        assert len(each) * cost_us < BUDGET_US + cost_us
    assert sum(map(len, found)) * cost_us <= iterations * BUDGET_US + MOST_US
    if micro_batches * cost_us <= BUDGET_US:
        assert all(set(each) == set(range(micro_batches)) for each in found)
    else:  # as many as the budget allows
        assert sum(map(len, found)) >= iterations * BUDGET_US // cost_us - 1
    assert set().union(*found) == set(range(micro_batches))


def test_what_costs_nothing_is_compared_whole_and_something_is_where_that_is_due():
    assert set(compared(7, micro_batches=5, cost_us=0, is_due=False)) == set(range(5))
    assert not compared(3, micro_batches=5, cost_us=MOST_US, is_due=False)
    assert len(compared(3, micro_batches=5, cost_us=MOST_US, is_due=True)) == 1


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_each_reader_is_the_neighbour_of_one_and_in_another_pipeline_if_there_are_several(dp: int, replicas: int):
    of = {}
    for pipeline in range(dp):
        for replica in range(replicas):
            plan, schedule = SimpleNamespace(dp=dp), SimpleNamespace(slices=2)
            layout = SimpleNamespace(
                plan=plan, schedule=schedule, pipeline=pipeline, replica=replica, replicas=replicas, micro_batches=8
            )
            found = Neighbour.of(layout, 1)
            if dp * replicas == 1:
                assert found is None
                return
            other, rest = divmod(found.first, 4)
            assert rest == 0
            assert (other != pipeline) == (dp > 1)
            of[pipeline, replica] = other, found.replica
    assert sorted(of.values()) == sorted(of), "each has one"
    assert all(mine != other for mine, other in of.items())
