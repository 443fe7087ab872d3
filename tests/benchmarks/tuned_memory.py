"""The tensors that the plans of a tuned recipe hold, on CPUs: python -m tests.benchmarks.tuned_memory

Trains two iterations under each plan that `auto3d tune t5-little-memory` tried, and writes a table to
results/synthesis-tune: for each rank the GiB of all tensors alive at once in the second iteration, counted after each
operator, and the GiB that the estimate predicts. The exit code is 1 if they differ by more than TOLERANCE on a rank.
"""

from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from auto3d.capture.model import CapturedModel
from auto3d.data import DataSettings
from auto3d.plan import Plan
from auto3d.runtime.process.world import World
from auto3d.runtime.settings import OptimizerSettings
from auto3d.schedule import samples_at_once
from launch.model.build import captured_model
from launch.recipe.data import data_settings
from launch.recipe.load import load
from launch.recipe.settings import optimizer_settings
from launch.report.release import Target
from tests.live_tensors import Peak, peak_of_rank
from tests.processes import ProcessPool
from tests.targets import end

FOLDER = Path("results/synthesis-tune/t5-little-memory")
TOLERANCE = 0.1
_models: dict[int, CapturedModel] = {}  # captured before there are ranks, which inherit them


def main() -> None:
    torch.set_num_threads(1)
    recipe = load("t5-little-memory", [])
    settings = data_settings(recipe.values), optimizer_settings(recipe.values)
    plans = {file.stem: Plan.from_json(file.read_bytes()) for file in sorted((FOLDER / "plans").glob("*.json"))}
    for size in {samples_at_once(plan) for plan in plans.values()}:
        _models[size] = captured_model(recipe, size)
    rows, worst = [], 0.0
    with ProcessPool(max(plan.ranks for plan in plans.values())) as pool:
        for name, plan in plans.items():
            for rank, (peak, predicted) in enumerate(pool.run(plan.ranks, _peak_of, plan, *settings)):
                rows.append([name, rank, *(f"{one.total / 2**30:.3f}" for one in (peak, predicted)), peak.at])
                worst = max(worst, abs(predicted.total / peak.total - 1))
    table = tabulate(rows, ["plan", "rank", "held GiB", "predicted GiB", "peak at"], tablefmt="github", floatfmt=".3f")
    (FOLDER / "memory.md").write_text(f"Written by `python -m tests.benchmarks.tuned_memory`.\n\n{table}\n")
    end([Target(what="largest error of the estimate", found=100 * worst, wish=100 * TOLERANCE, unit=" %")])


def _peak_of(world: World, plan: Plan, data: DataSettings, optimizer: OptimizerSettings) -> tuple[Peak, Any]:
    return peak_of_rank(world, _models[samples_at_once(plan)], data, plan, optimizer)


if __name__ == "__main__":
    main()
