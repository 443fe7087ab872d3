"""The certainty of the order of plans that were tried on a noisy machine."""

from math import exp
from random import Random

import pytest

from auto3d.search.certainty import CERTAIN, PlanComparison, compare_plans, contenders


def tuned(random: Random, true: list[float], noise: float, trials: int) -> tuple[int, PlanComparison, int]:
    """(fastest plan after one trial each, the final comparison, unused trials) of a simulated tuning."""

    def trial(plan: int) -> float:
        return true[plan] * exp(random.gauss(0, noise))

    times = [[trial(plan)] for plan in range(len(true))]
    once, unused = compare_plans(times).fastest, trials - len(true)
    while unused > 1 and (again := contenders(times, unused // 2)):
        for plan in again[:unused]:
            times[plan].append(trial(plan))
            unused -= 1
    return once, compare_plans(times), unused


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("gap", [0.0, 0.01, 0.03, 0.1])
def test_a_certain_order_is_right_and_repeated_trials_find_a_faster_plan(noise, gap):
    """Nine plans, each slower than the one before by ``gap``; 15 trials, the default."""
    random, runs = Random(1), 150
    wrong = certain = lost_once = lost = unused = 0
    for _ in range(runs):
        true = [1 + gap * place for place in range(9)]
        random.shuffle(true)
        once, comparison, left = tuned(random, true, noise, 15)
        lost_once += true[once] - 1
        lost += true[comparison.fastest] - 1
        if comparison.certainty >= CERTAIN:
            certain += 1
            unused += left
            wrong += true[comparison.fastest] > 1
    assert wrong <= (1 - CERTAIN) * runs
    assert lost <= lost_once
    if gap >= 5 * noise:
        assert certain > 0.95 * runs
        assert unused > certain, "trials end once the order is certain"
    if gap == 0:
        assert certain <= (1 - CERTAIN) * runs, "equal plans have no order"


def test_single_trials_say_nothing_of_their_spread():
    comparison = compare_plans([[1.0], [1.2], [3.0]])
    assert (comparison.fastest, comparison.doubts, comparison.certainty) == (0, (0.0, 0.5, 0.5), 0.0)
    assert contenders([[1.2], [1.0], [3.0]], 2) == [1, 0], "the fastest two"
    assert contenders([[1.0]], 2) == []


def test_plans_that_are_clearly_slower_are_not_tried_again():
    times = [[1.0, 1.02, 0.99], [1.01, 1.03, 1.0], [2.0]]
    assert contenders(times, 3) == [0, 1]
    comparison = compare_plans(times)
    assert comparison.doubts[2] < 0.001
    assert 0.1 < comparison.doubts[1] < 0.5
