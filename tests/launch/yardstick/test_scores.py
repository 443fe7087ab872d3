"""The scores, on small sets by hand and against plain definitions on random ones."""

import random
from itertools import combinations
from math import isnan
from statistics import mean, median

import pytest
from scipy.stats import spearmanr

from launch.yardstick.measured import FULLEST, ModelSizes, PublishedRun
from launch.yardstick.predictors import NOTHING, Predicted
from launch.yardstick.scores import rank_correlation, ranks, regret, scores

SIZES = ModelSizes(
    layers=2, hidden=8, heads=2, key_value_heads=1, ffn=32, gated=True, vocabulary=100, sequence=16, tied=False
)


def run(seconds=None, **fields):
    return PublishedRun(line=2, row={}, sizes=SIZES, **{"group": ("one",), "seconds": seconds, **fields})


def test_errors_count_what_was_measured_and_predicted():
    runs = [run(1.0), run(2.0), run(4.0, timed=False), run(5.0), run()]
    found = scores(runs, [Predicted(1.1), Predicted(1.6), Predicted(40.0), NOTHING, Predicted(1.0)], memory_bytes=None)
    assert found.time_error == pytest.approx((0.1 + 0.2) / 2)
    assert (found.timed, found.unpredicted) == (2, 1)
    assert isnan(found.memory_error)
    assert (found.ranks, found.judged) == (0, 0)


def test_memory_is_compared_rank_by_rank():
    each = run(memory=((0, 100.0), (0, 80.0), (1, 50.0), (FULLEST, 200.0)))
    found = scores([each], [Predicted(peaks=(90.0, 60.0))], memory_bytes=None)
    assert found.ranks == 4
    assert found.memory_error == pytest.approx(mean([0.1, 0.125, 0.2, 0.55]))
    assert scores([each], [Predicted(peaks=(100.0,))], memory_bytes=None).memory_error == pytest.approx(
        mean([0, 0.25, 1.0, 0.5])
    )


def test_times_relative_to_the_baseline():
    runs = [run(2.0, baseline=True), run(1.0), run(4.0), run(3.0, group=("other",))]
    found = scores(runs, [Predicted(4.0), Predicted(2.0), Predicted(4.0), Predicted(9.0)], memory_bytes=None)
    assert found.relative == 2  # the last has no baseline
    assert found.relative_error == pytest.approx((0.0 + 0.5) / 2)


def test_out_of_memory():
    """Four ran and three did not; the predictor refuses one that ran and two that did not. One is unknown."""
    ran = [True, True, True, True, False, False, False, None]
    peaks = [5.0, 6.0, 10.0, 11.0, 12.0, 20.0, 9.0, 50.0]
    found = scores([run(ran=each) for each in ran], [Predicted(peaks=(each,)) for each in peaks], memory_bytes=10.0)
    assert (found.precision, found.recall, found.accepted, found.judged) == (2 / 3, 2 / 3, 3 / 4, 7)
    all_ran = scores([run(ran=True)], [Predicted(peaks=(11.0,))], memory_bytes=10.0)
    assert isnan(all_ran.precision)  # nothing could be found
    assert all_ran.accepted == 0


@pytest.mark.parametrize("seed", range(30))
def test_order_and_regret_of_random_groups(seed):
    chance = random.Random(seed)
    runs, predicted = [], []
    for group in range(chance.randint(1, 4)):
        for _ in range(chance.randint(1, 7)):
            runs.append(run(float(chance.randint(1, 5)), group=(str(group),)))
            predicted.append(Predicted(float(chance.randint(1, 5))) if chance.random() < 0.8 else NOTHING)
    orders, regrets = [], []
    for group in dict.fromkeys(each.group for each in runs):
        inside = [(each, one) for each, one in zip(runs, predicted, strict=True) if each.group == group]
        known = [(one.seconds, each.seconds) for each, one in inside if one.seconds is not None]
        if len(known) > 2 and all(len(set(side)) > 1 for side in zip(*known, strict=True)):
            orders.append(spearmanr(*zip(*known, strict=True))[0])
        if known and len(inside) > 1:
            chosen = next(measured for said, measured in known if said == min(each for each, _ in known))
            regrets.append(chosen / min(each.seconds for each, _ in inside) - 1)
    found = scores(runs, predicted, memory_bytes=None)
    assert (found.ranked, found.chosen) == (len(orders), len(regrets))
    assert found.spearman == pytest.approx(mean(orders)) if orders else isnan(found.spearman)
    assert found.regret == pytest.approx(median(regrets)) if regrets else isnan(found.regret)


def test_equal_values_share_their_places():
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [2.5, 0.0, 2.5, 1.0]
    values = [random.Random(1).randint(0, 9) for _ in range(50)]
    counted = [sum(b < a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values]
    assert ranks(values) == counted
    assert sum(a > b for a, b in combinations(ranks(values), 2)) == sum(a > b for a, b in combinations(values, 2))


def test_a_group_without_choice_or_order():
    assert regret([(run(1.0), Predicted(1.0))]) is None
    assert regret([(run(1.0), NOTHING), (run(2.0), Predicted(1.0))]) == 1.0  # the fastest has no prediction
    assert rank_correlation([(run(1.0), Predicted(1.0)), (run(2.0), Predicted(2.0))]) is None
    assert rank_correlation([(run(1.0), Predicted(3.0))] * 4) is None


def test_sizes_of_a_model():
    """Attention with half as many key-value heads, a gated feed-forward, and an embedding and a head."""
    assert SIZES.layer_parameters == 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 32
    assert SIZES.parameters == 2 * SIZES.layer_parameters + 2 * 100 * 8
    assert SIZES.flops_per_sample == 16 * (6 * (2 * SIZES.layer_parameters + 800) + 12 * 2 * 8 * 16)
