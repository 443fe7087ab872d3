"""The cuts of `autopipe` and of AutoPipe's planner, timed by the simulator: python -m tests.benchmarks.autopipe

`autopipe` has the smallest largest stage; `autopipe-planner` is the search of the AutoPipe paper, by its own simulation
without messages. Both are timed by this project's simulator, with messages and updates, beside the best cut near them:
of all cuts where there are few, else what moving bounds by one or two subgraphs leads to. Predicted, not measured, on
the devices of the recipes: one pipeline, one device per stage, micro-batches of one sample, memory without limit.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from math import comb

from tabulate import tabulate

from auto3d.search.axes import Candidate
from auto3d.search.make import PlanMaker
from launch.model.candidates import task
from launch.model.costs import cost_model, planning_subject
from launch.recipe.load import load
from launch.report.release import Target
from tests.targets import end

CASES = [  # recipe, stages, micro-batches, recomputation
    ("gpt1.4b", 4, 8, "none"),
    ("gpt1.4b", 8, 16, "none"),
    ("gpt1.4b", 8, 16, "full"),
    ("gpt1.4b", 8, 64, "full"),
    ("gpt2.5b", 8, 16, "full"),
    ("bert48", 4, 8, "none"),
    ("bert48", 8, 16, "none"),
    ("t5-11b", 4, 8, "full"),
    ("t5-11b", 8, 16, "none"),
    ("t5-11b", 8, 16, "full"),
    ("llama3-8b", 4, 8, "none"),
    ("llama3-8b", 8, 16, "full"),
]
ALL = 20_000  # every cut is simulated where there are at most this many
Bounds = tuple[int, ...]


def near(bounds: Bounds, blocks: int) -> Iterator[Bounds]:
    """Cuts with one or two bounds, or a run of neighbouring ones, moved by one or two blocks."""
    inner = range(1, len(bounds) - 1)
    sets = {*combinations(inner, 1), *combinations(inner, 2)}
    sets |= {tuple(range(first, last)) for first, last in combinations(range(1, len(bounds)), 2)}
    for places in sets:
        for steps in product((-2, -1, 1, 2), repeat=min(len(places), 2)):
            moved = list(bounds)
            for number, place in enumerate(places):
                moved[place] += steps[number] if len(places) == len(steps) else steps[0]
            if all(first < last for first, last in pairwise(moved)):
                yield tuple(moved)


def row(recipe_name: str, stages: int, micro_batches: int, recompute: str) -> tuple[list[str], float]:
    """(the case, the simulated milliseconds of an iteration under each cut, and the subgraphs of its stages; the time
    of the planner's cut over that of `autopipe`)."""
    cluster = [f"cluster.nodes={stages}", "cluster.devices_per_node=1", f"training.global_batch={micro_batches}"]
    recipe = load(recipe_name, cluster)
    subject = planning_subject(recipe, only_predicted=True)
    model, cuts = cost_model(recipe, subject), subject.cuts(1)
    maker, blocks = PlanMaker(subject, model, task(recipe)), len(cuts) - 1
    candidate = Candidate(
        dp=1, tp=1, pp=stages, micro_batch_size=1, schedule="1f1b", recompute=recompute, partition="autopipe"
    )

    @cache
    def seconds(bounds: Bounds) -> float:
        return model.seconds(maker.unlimited(replace(candidate, cuts=bounds)))

    def chosen_by(method: str) -> Bounds:
        stages = maker.unlimited(replace(candidate, partition=method)).stages
        return (0, *(cuts.index(stage.operations[-1][1]) for stage in stages))

    exact, theirs = chosen_by("autopipe"), chosen_by("autopipe-planner")
    if comb(blocks - 1, stages - 1) <= ALL:
        best = min(((0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1)), key=seconds)
    else:
        best = min(exact, theirs, key=seconds)
        while (better := min(near(best, blocks), key=seconds)) and seconds(better) < seconds(best):
            best = better
    times = [seconds(bounds) for bounds in (exact, theirs, best)]
    cells = [
        f"{recipe_name}, {stages} stages, {micro_batches} micro-batches, {recompute}",
        f"{1e3 * times[0]:.1f}",
        *(f"{1e3 * time:.1f} ({100 * (time / times[0] - 1):+.2f} %)" for time in times[1:]),
        *(" ".join(str(last - first) for first, last in pairwise(bounds)) for bounds in (exact, theirs)),
    ]
    return cells, times[1] / times[0]


HEADINGS = [
    "model, recomputation",
    "`autopipe`, ms",
    "`autopipe-planner`, ms",
    "best near, ms",
    "subgraphs of `autopipe`",
    "of `autopipe-planner`",
]

if __name__ == "__main__":
    rows = [row(*case) for case in CASES]
    print(tabulate([cells for cells, _ in rows], HEADINGS, tablefmt="github", disable_numparse=True))
    worst = max(ratio for _, ratio in rows)
    end([Target(what="time under AutoPipe's planner over that of the exact cut, largest", found=worst, wish=1.0)])
