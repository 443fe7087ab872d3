"""AMP's tables: each strategy tries its own plans, and statistics are those of their times."""

import csv
from math import isfinite
from statistics import mean, stdev

import pytest

from launch.model.measured_layers import published
from launch.papers.experiments import amp
from launch.papers.experiments.amp import (
    ANNEALING,
    BEST,
    FEW,
    MEAN,
    MEGATRON,
    RANDOM,
    TUNED,
    WHOLE,
    published_strategies,
    strategies,
)


def test_published_trials_of_each_strategy():
    """The heuristics' picks by hand; AMP's first ten include one without a result."""
    found = {
        (row.system, row.setting[0]): row
        for row in published_strategies(
            tell=lambda line: None, recipe="published/t4x16-gpt2", file="t4x16_gpt2_trials.csv", devices_per_node=4
        )
    }
    with published("t4x16_gpt2_trials.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    times = [float(row["measured_s"]) for row in rows]
    picked = {"1": (1, 16, 1), "2": (2, 8, 1), "4": (2, 8, 1), "8": (4, 4, 1), "16": (4, 2, 2)}  # tp, dp, pp
    by_plan = {
        (row["micro_batch_size"], (int(row["tp"]), int(row["dp"]), int(row["pp"]))): time
        for row, time in zip(rows, times, strict=True)
    }
    heuristic = [by_plan[each] for each in picked.items()]
    annealed = [time for _, time in sorted(zip((float(row["paper_predicted_s"]) for row in rows), times, strict=True))]
    expected = {
        MEGATRON: heuristic,
        RANDOM: [time for time in times if isfinite(time)],
        ANNEALING: [time for time in annealed[:10] if isfinite(time)],
    }
    assert len(expected[RANDOM]) == 47
    assert len(expected[ANNEALING]) == 9
    for system, tried in expected.items():
        assert found[system, BEST].values["iteration_s"] == min(tried)
        assert found[system, MEAN].values["iteration_s"] == pytest.approx(mean(tried))
        assert found[system, MEAN].values["standard_deviation_s"] == pytest.approx(stdev(tried))


def test_strategies_try_plans_of_their_space_at_the_times_of_the_true_cluster(monkeypatch):
    monkeypatch.setattr(amp, "SEEDS_OF_FEW", 3)
    variants = {
        "one speed": {"known": {"cluster.more[0].accelerator": "V100-16GB-amp"}},
        "both": {"systems": [WHOLE]},
    }
    changes = {"cluster": "amp-mixed", "search.tp": [1, 2], "search.micro_batch_size": [1, 2]}
    made = list(
        strategies(
            tell=lambda line: None, recipe="published/p3-mixed-gpt2", changes=changes, variants=variants, seeds=2
        )
    )
    best = {(row.setting[1], row.system): row.values["iteration_s"] for row in made if row.setting[0] == BEST}
    mean_of = {(row.setting[1], row.system): row.values for row in made if row.setting[0] == MEAN}
    assert all(best[key] <= values["iteration_s"] for key, values in mean_of.items())
    for system in (RANDOM, FEW, ANNEALING):
        assert best["one speed", system] >= best["one speed", WHOLE]
    assert best["one speed", TUNED] <= best["one speed", MEGATRON]
    assert mean_of["one speed", ANNEALING]["trials"] == 10
    assert mean_of["one speed", FEW]["trials"] <= 10 < mean_of["one speed", RANDOM]["trials"] <= 50
    assert best["both", WHOLE] < best["one speed", WHOLE], "stages for the true speeds are faster"
    assert {key for key in best if key[0] == "both"} == {("both", WHOLE)}
