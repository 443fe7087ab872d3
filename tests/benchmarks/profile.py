"""Compare predictions from a profile of this machine with measurements: python -m tests.benchmarks.profile [RECIPE ...]

For each recipe, in a new folder, this runs the commands of a user: `auto3d profile`, `tune`, and `sweep`, which runs
the plans that tune did not try. Exits with 1 if the plan that tune chose is not among the best ones.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from scipy.stats import spearmanr
from tabulate import tabulate

from auto3d.cost.model import CostModel
from auto3d.cost.profile import Profile
from auto3d.plan import Plan
from auto3d.runtime.measurement import Environment, Measurement, Status
from launch.console.tables import TABLES
from launch.model.costs import subject_of
from launch.recipe.load import LoadedRecipe, load
from launch.recipe.settings import cluster, training
from launch.report.release import Target
from tests.targets import end

RECIPES = ("tiny", "small")
OF_BEST = 1.05  # limit of the time of tune's plan over that of the best plan
HEADS = ["dp", "pp", "micro-\nbatch", "schedule", "predicted\n(s)", "measured\n(s)", "error", "tried\nby tune"]


def main() -> None:
    targets = []
    for name in sys.argv[1:] or RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            targets.append(compare(load(name), Path(folder)))
    end(targets)


def compare(recipe: LoadedRecipe, folder: Path) -> Target:
    """Print the table of one recipe; returns how the plan that tune chose compares with the best."""

    def auto3d(*arguments: str) -> str:
        command = [sys.executable, "-m", "launch.main", *arguments]
        return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout

    print(auto3d("profile", recipe.name))
    print(auto3d("tune", recipe.name), flush=True)
    chosen = Plan.from_json((folder / TABLES / recipe.name / "best_plan.json").read_bytes())
    trials = folder / "runs" / recipe.name / "trials"
    tried = set(times_of(trials))
    auto3d("sweep", recipe.name)
    seconds = times_of(trials)
    records = json.loads(auto3d("table", recipe.name, "--json"))
    model = model_of(recipe, Profile.from_json((folder / "profiles" / f"{recipe.cluster_name}.json").read_bytes()))
    rows = [row(one, model, seconds, tried) for one in records]
    rows.sort(key=lambda row: row[4])
    predicted, times, errors = ([row[column] for row in rows] for column in (4, 5, 6))
    cells = [(*row[:4], f"{row[4]:.3f}", f"{row[5]:.3f}", f"{row[6]:+.1%}", row[7]) for row in rows]
    print(tabulate(cells, HEADS, "github", disable_numparse=True))
    tuned_s = seconds[chosen.to_json()]
    here, measured = Environment.here("cpu"), recipe.values.measure
    few = [error for error, record in zip(errors, rows, strict=True) if record[0] * record[1] <= here.cores]
    print(
        f"\n{recipe.name}: mean error {mean(map(abs, errors)):.1%}, of plans with at most a rank per core "
        f"{mean(map(abs, few)):.1%}, largest {max(errors, key=abs):+.1%}, Spearman "
        f"{spearmanr(predicted, times).statistic:.2f}. Of the fastest's time, the plan that is predicted fastest takes "
        f"{times[0] / min(times):.3f}, the one that tune chose {tuned_s / min(times):.3f}. Measured: medians of a "
        f"plan's trials, each the median of {measured.iterations} iterations after {measured.warmup_iterations} of "
        f"warm-up. {here.device}, "
        f"{here.cores} cores, load average {os.getloadavg()[1]:.1f}, torch {here.torch}.\n",
        flush=True,
    )
    what = f"{recipe.name}, tune's plan in times of the best"
    return Target(what=what, found=tuned_s / min(times), wish=OF_BEST, unit=" ×")


def times_of(trials: Path) -> dict[str, float]:
    """Plan as JSON -> seconds of an iteration: the median over its trials with status ok."""
    found: dict[str, list[float]] = {}
    for file in trials.glob("*/measurement.json"):
        measurement = Measurement.from_json(file.read_bytes())
        if measurement.status is Status.OK:
            found.setdefault(measurement.plan.to_json(), []).append(measurement.median_s)
    return {plan: median(times) for plan, times in found.items()}


def model_of(recipe: LoadedRecipe, profile: Profile) -> CostModel:
    subject = subject_of(recipe)
    return CostModel(
        profile.measured(cluster(recipe)),
        training(recipe.values),
        subject.work,
        times_at=profile.times_at(subject.work, subject.cuts),
    )


def row(record: dict[str, Any], model: CostModel, seconds: dict[str, float], tried: set[str]) -> tuple:
    """The row of one plan: degrees, predicted and measured seconds, error, and whether tune tried it."""
    plan = Plan.from_json(json.dumps(record["plan"]))
    predicted, measured = model.seconds(plan), seconds[plan.to_json()]
    degrees = plan.dp, plan.pp, plan.micro_batch_size, plan.schedule
    return *degrees, predicted, measured, predicted / measured - 1, "yes" if plan.to_json() in tried else ""


if __name__ == "__main__":
    main()
