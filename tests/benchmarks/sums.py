"""What gradient sums cost the compute beside them, predicted and measured: python -m tests.benchmarks.sums

Two processes train a GPT-2 with many parameters and few tokens, whose sums take as long as some of its operations,
under two-way pipelines with their sums beside compute or after it. `auto3d profile` measures the two figures of such
sums, and `auto3d sweep` the plans. Exits with 1 if predictions with these figures have a larger mean error than those
without.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean

from tabulate import tabulate

from auto3d.cost.profile import Profile
from auto3d.plan import Plan
from launch.recipe.load import load
from launch.report.release import Target
from tests.benchmarks.profile import model_of, times_of
from tests.targets import end

RECIPE = "tiny"
OVERRIDES = [
    "cluster.devices_per_node=2",
    "data.sequence_length=4",
    "model.config.n_embd=256",
    "training.global_batch=4",
    "training.optimizer=sgd",
    "search.dp=[1]",
    "search.pp=[2]",
    "search.micro_batch_size=[1]",
    "search.schedule=[chimera,gems]",
    "search.sync=[lazy,eager]",
    "measure.warmup_iterations=3",
    "measure.iterations=20",
]
HEADS = ["schedule", "sync", "without (s)", "with (s)", "measured (s)", "error without", "error with"]


def main() -> None:
    recipe = load(RECIPE, OVERRIDES)
    with tempfile.TemporaryDirectory() as folder:
        for verb in ("profile", "sweep"):
            command = [sys.executable, "-m", "launch.main", verb, RECIPE, *OVERRIDES]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        profile = Profile.from_json((Path(folder) / "profiles" / f"{recipe.cluster_name}.json").read_bytes())
        measured = times_of(Path(folder) / "runs" / RECIPE / "trials")
    assert profile.sums is not None, "two ranks sum"
    models = [model_of(recipe, one) for one in (replace(profile, sums=None), profile)]
    rows = []
    for text, seconds in measured.items():
        plan = Plan.from_json(text)
        predicted = [model.seconds(plan) for model in models]
        sync = str(plan.schedule_options.get("sync", "lazy"))
        rows.append((plan.schedule, sync, *predicted, seconds, *(one / seconds - 1 for one in predicted)))
    rows.sort()
    cells = [(*row[:2], *(f"{time:.4f}" for time in row[2:5]), *(f"{error:+.1%}" for error in row[5:])) for row in rows]
    print(tabulate(cells, HEADS, "github", disable_numparse=True))
    sums, (start_s, slowdown) = profile.sums, profile.sums.start_and_slowdown
    delays = ", ".join(
        f"{size // 1024} KiB: {1e3 * time:.2f} and {1e3 * lost:.2f}"
        for size, time, lost in zip(sums.sizes, sums.seconds, sums.lost_s, strict=True)
    )
    print(
        f"\nFigures: start {1e3 * start_s:.2f} ms, slowdown {slowdown:.2f}. Milliseconds of a sum, and those by which "
        f"it delays compute: {delays}. {profile.host}; load average at the end {os.getloadavg()[0]:.1f}.\n"
    )
    without, with_figures = (mean(abs(row[column]) for row in rows) for column in (5, 6))
    what = f"mean error of {len(rows)} plans with the figures of sums, in times of that without ({without:.1%})"
    end([Target(what=what, found=with_figures / without, wish=1.0, unit=" ×")])


if __name__ == "__main__":
    main()
