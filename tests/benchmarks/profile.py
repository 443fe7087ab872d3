"""Predicted by a profile of this machine beside measured, for every plan of a sweep: python -m tests.benchmarks.profile

For each recipe: profile, then each plan of its search space as the sweep's own trial, then `auto3d tune`. Exits with 1
where the plan that tune chooses is not among the best of all.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from scipy.stats import spearmanr
from tabulate import tabulate

from auto3d.cost.model import CostModel
from auto3d.cost.profile import Profile
from auto3d.plan import Plan
from auto3d.runtime.measurement import Environment, Measurement, Status
from launch import candidates
from launch.capture import PlanningModel
from launch.costs import subject_of
from launch.profile import measure_profile, table
from launch.recipe import LoadedRecipe, load
from launch.settings import cluster, training
from launch.trial import measure

RECIPES = ("tiny", "small")
PASSES = 3  # over all plans, so that what disturbs the machine for a minute does not decide one plan's time
OF_BEST = 1.05  # the plan that tune chooses takes at most so much of the best one's time
HEADS = ["dp", "pp", "micro-\nbatch", "schedule", "predicted\n(s)", "measured\n(s)", "error", "fastest to\nslowest (s)"]


def main() -> int:
    problems = []
    for name in sys.argv[1:] or RECIPES:
        problems += compare(load(name))
    print("\n".join(problems) or "every plan that tune chose is among the best")
    return 1 if problems else 0


def compare(recipe: LoadedRecipe) -> list[str]:
    """Print the table of one recipe; returns what is not as it should be."""
    profile = measure_profile(recipe, Console(stderr=True))
    print(f"\n{table(profile)}\n", flush=True)
    subject = subject_of(recipe)
    model = CostModel(
        profile.measured(cluster(recipe)),
        training(recipe.values),
        subject.work,
        times_at=profile.times_at(subject.work, subject.cuts),
    )
    plans = candidates.runnable(recipe, candidates.find(recipe, PlanningModel(recipe).graph))
    measured: dict[int, list[float]] = {number: [] for number in range(len(plans))}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(PASSES):
            for number, plan in enumerate(plans):
                measurement = measure(recipe, plan, Path(folder))
                assert measurement.status is Status.OK, measurement.error
                measured[number] += measurement.iteration_s
                print_progress(number, measurement)
    rows = []
    for number, plan in enumerate(plans):
        seconds, time = model.seconds(plan), median(measured[number])
        spread = f"{min(measured[number]):.3f} to {max(measured[number]):.3f}"
        rows.append((plan.dp, plan.pp, plan.micro_batch_size, plan.schedule, seconds, time, seconds / time - 1, spread))
    rows.sort(key=lambda row: row[4])
    cells = [(*row[:4], f"{row[4]:.3f}", f"{row[5]:.3f}", f"{row[6]:+.1%}", row[7]) for row in rows]
    predicted, times, errors = ([row[place] for row in rows] for place in (4, 5, 6))
    picked = times[0] / min(times)
    best = tuned(recipe, profile)
    chosen = next(median(measured[number]) for number, plan in enumerate(plans) if plan == best) / min(times)
    print(tabulate(cells, HEADS, "github", disable_numparse=True))
    here = Environment.here("cpu")
    print(
        f"\n{recipe.name}: mean error {mean(map(abs, errors)):.1%}, largest {max(errors, key=abs):+.1%}, Spearman "
        f"{spearmanr(predicted, times).statistic:.2f}; the plan that is predicted fastest takes {picked:.3f} of the "
        f"fastest's time, the one that tune chose after {recipe.values.search.trials} trials {chosen:.3f}. Measured: "
        f"medians of {PASSES} trials of {recipe.values.measure.iterations} iterations after "
        f"{recipe.values.measure.warmup_iterations} of warm-up. {here.device}, {here.cores} cores, load average "
        f"{os.getloadavg()[1]:.1f}, torch {here.torch}."
    )
    return [] if chosen <= OF_BEST else [f"{recipe.name}: tune's plan takes {chosen:.3f} of the fastest's time"]


def tuned(recipe: LoadedRecipe, profile: Profile) -> Plan:
    """What `auto3d tune` chooses by this profile and its own trials."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "profile.json").write_text(profile.to_json())
        command = [sys.executable, "-m", "launch.main", "tune", recipe.name, "prediction.profile=profile.json"]
        subprocess.run(command, cwd=folder, check=True)
        return Plan.from_json(Path(folder, "results", recipe.name, "best_plan.json").read_bytes())


def print_progress(number: int, measurement: Measurement) -> None:
    plan = measurement.plan
    what = f"dp={plan.dp} pp={plan.pp} micro-batch={plan.micro_batch_size} {plan.schedule}"
    print(f"  {number + 1} {what}: {measurement.median_s:.3f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
