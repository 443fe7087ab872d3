"""AMP's tables (Li et al. 2022, section 5): the best and the mean of the plans that each strategy tries.

A trial is a plan at its time by our simulator, or by published measurements.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from json import dumps
from math import inf, isfinite
from statistics import mean, median, stdev
from typing import Any

from auto3d.search.algorithms import AMP_TRIALS
from auto3d.search.algorithms.amp import TILINGS
from auto3d.search.search import Search
from launch.model.measured_layers import published
from launch.model.predictions import predict, read_candidates
from launch.model.search import search_recipe
from launch.papers.row import Row
from launch.recipe.load import load

TRIED_AT_RANDOM = 50  # candidates of the random search
SEEDS_OF_FEW = 25  # few plans differ more from seed to seed
BEST, MEAN = "Min", "Mean"
MEGATRON, RANDOM, ANNEALING, FEW = "Megatron", "RS", "SA", "10 at random"
TUNED, WHOLE = "all plans of Megatron-LM", "all plans of AMP's space"
AMP_AXES = {
    "search.schedule": ["1f1b"],
    "search.partition": ["layer-assignment"],
    "search.placement": list(TILINGS),
    "prediction.method": "amp",  # the costs by which stages are cut
}
MEGATRON_AXES = {"search.schedule": ["1f1b"], "search.partition": ["blocks"], "search.placement": ["megatron"]}
EVERY = 10**5  # more candidates than the spaces have
_SEARCHES: dict[str, dict[str, Any]] = {
    MEGATRON: {"search.algorithm": "megatron"},
    RANDOM: {**AMP_AXES, "search.algorithm": "random", "search.candidates": TRIED_AT_RANDOM, "search.trials": EVERY},
    FEW: {**AMP_AXES, "search.algorithm": "random", "search.candidates": AMP_TRIALS, "search.trials": AMP_TRIALS},
    ANNEALING: {"search.algorithm": "amp", "prediction.method": "amp"},
    WHOLE: {**AMP_AXES, "search.algorithm": "exhaustive", "search.candidates": EVERY, "search.trials": EVERY},
    TUNED: {**MEGATRON_AXES, "search.algorithm": "exhaustive", "search.candidates": EVERY, "search.trials": EVERY},
}


def strategies(
    *,
    tell: Callable[[str], None],
    recipe: str,
    changes: Mapping[str, Any],
    variants: Mapping[str, Mapping[str, Any]],
    seeds: int,
) -> Iterator[Row]:
    """The time of the best plan and the mean over the plans that each strategy tries on the cluster of ``recipe``.

    Trials are plans at their times by the simulator. The annealing (SA) ranks plans by AMP's own cost model and tries
    the first 10; the random search (RS) tries 50. For both, the medians over ``seeds`` seeds count. Without a cost
    model, the annealing would try 10 plans at random; for these, the medians over 25 seeds count. ``changes`` are keys
    of the recipe. A variant has further keys of the cluster on which plans run (``all``) and of the cluster that AMP's
    space and cost model know (``known``), and the ``systems`` that it is about (default: all).
    """
    for label, variant in variants.items():
        true = {**changes, **variant.get("all", {})}
        simulator = _searched(recipe, {**true, **_SEARCHES[MEGATRON]}).maker.model
        for system in variant.get("systems", _SEARCHES):
            tell(f"{recipe}, {label}: {system}")
            known = true if system in (MEGATRON, TUNED) else {**true, **variant.get("known", {})}
            runs = []
            number = {RANDOM: seeds, ANNEALING: seeds, FEW: SEEDS_OF_FEW}.get(system, 1)
            for seed in range(1, 1 + number):
                ranked = _searched(recipe, {**known, **_SEARCHES[system], "search.seed": seed}).ranked()
                tried = ranked[:AMP_TRIALS] if system == ANNEALING else ranked
                runs.append(
                    [(float(simulator.seconds(ranked_plan.plan)), str(ranked_plan.candidate)) for ranked_plan in tried]
                )
            times = [[seconds for seconds, _ in run] for run in runs]
            yield from _summary(times, system, label, min(runs[0])[1])


def _searched(recipe: str, keys: Mapping[str, Any]) -> Search:
    written = [f"{key}={dumps(value)}" for key, value in {"search.seconds": 1e7, **keys}.items()]
    return search_recipe(load(recipe, written))


def published_strategies(
    *, tell: Callable[[str], None], recipe: str, file: str, devices_per_node: int
) -> Iterator[Row]:
    """The same statistics over published real trials, of which each strategy takes its own.

    AMP ranks by its own published predictions, we rank by our simulator. The mean is over trials with a
    result.
    """
    tell(f"{recipe}: {file}")
    loaded = load(recipe)
    rows = read_candidates(loaded, str(published(file)))
    with published(file).open(newline="") as lines:
        theirs = [float(row["paper_predicted_s"]) for row in csv.DictReader(lines)]
    ours = [prediction.seconds or inf for prediction in predict(loaded, rows)]
    times = [float(row["measured_s"]) for row in rows]
    chosen = {
        MEGATRON: _heuristic(rows, times, devices_per_node),
        RANDOM: range(len(rows)),
        ANNEALING: sorted(range(len(rows)), key=theirs.__getitem__)[:AMP_TRIALS],
        "our ranking": sorted(range(len(rows)), key=ours.__getitem__)[:AMP_TRIALS],
    }
    for system, places in chosen.items():
        tried = [times[place] for place in places if isfinite(times[place])]
        best = min(places, key=times.__getitem__)
        words = " ".join(f"{key}={rows[best][column]}" for key, column in _COLUMNS.items())
        yield from _summary([tried], system, "", words)


_COLUMNS = {"dp": "dp", "tp": "tp", "pp": "pp", "micro-batch": "micro_batch_size"}


def _heuristic(rows: Sequence[Mapping[str, str]], times: Sequence[float], devices_per_node: int) -> list[int]:
    """For each micro-batch size, the trial with a result of the smallest tp × pp, and among equals of the largest
    tp."""
    best: dict[str, tuple[tuple[int, int], int]] = {}
    for place, row in enumerate(rows):
        tp, pp = int(row["tp"]), int(row["pp"])
        if isfinite(times[place]) and tp <= devices_per_node:
            choice = (tp * pp, -tp), place
            best[row["micro_batch_size"]] = min(choice, best.get(row["micro_batch_size"], choice))
    return [place for _, place in best.values()]


def _summary(runs: Sequence[Sequence[float]], system: str, label: str, plan: str) -> Iterable[Row]:
    """The rows of one strategy: ``runs`` has the times of its trials, by seed."""
    deviations = [stdev(run) if len(run) > 1 else 0.0 for run in runs]
    lasting = {BEST: median(map(min, runs)), MEAN: median(map(mean, runs))}
    for setting, seconds in lasting.items():
        values = {"iteration_s": seconds, "trials": float(len(runs[0]))}
        if setting == MEAN:
            values["standard_deviation_s"] = median(deviations)
        where = (setting, label) if label else (setting,)
        yield Row(setting=where, system=system, values=values, plan=plan if setting == BEST else "")
