"""RaNNC by measured stages and by added-up operations (section IV-C): python -m tests.benchmarks.rannc_stages

In a new folder, this runs the commands of a user: `auto3d profile --stages`, then `auto3d partition --method rannc`
with that profile, and with the same profile without its stages. Both plans are trained in turns. It also compares, for
every candidate stage, the measured time with the sum over its operations.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from tabulate import tabulate

from auto3d.cost.profile import Profile
from auto3d.partition.methods.rannc import candidate_blocks
from auto3d.partition.methods.rannc.candidates import candidate_names
from auto3d.partition.methods.rannc.runs import Runs
from auto3d.plan import Plan
from auto3d.runtime.measurement import Environment
from launch.model.graphs import PlanningModel, default_micro_batch_size
from launch.model.stages import request_on
from launch.recipe.load import load
from launch.recipe.settings import cluster

MODEL = [
    "model.config.n_layer=4",
    "cluster.devices_per_node=2",
    "search.micro_batch_size=[2]",
    "training.iterations=12",
]
PLAN = ["plan.micro_batch_size=2"]
MEMORY_GIB = ["0.012", "0.016"]  # too little for one stage
WARMUP, TURNS = 2, 3  # iterations that do not count; trainings of each plan


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        auto3d(folder, "profile", "tiny", *MODEL, *PLAN, "--stages")
        file = folder / "profiles/laptop.json"
        profile = Profile.from_json(file.read_bytes())
        compare_candidates(profile)
        rows = []
        for memory in MEMORY_GIB:
            plans = {}
            for label, used in (("measured stages", profile), ("added-up operations", replace(profile, candidates=()))):
                file.write_text(used.to_json())
                plans[label] = folder / f"{label}.json"
                options = ["--method", "rannc", "--memory-gib", memory, "--plan", str(plans[label])]
                print(auto3d(folder, "partition", "tiny", *MODEL, *PLAN, *options).split("\n\n")[-1])
            seconds: dict[str, list[float]] = {label: [] for label in plans}
            for _ in range(TURNS):
                for label, plan in plans.items():
                    record = json.loads(
                        auto3d(folder, "train", "tiny", *MODEL, "--plan", str(plan), "--fresh", "--json")
                    )
                    seconds[label] += record["iteration_s"][WARMUP:]
            for label, plan in plans.items():
                found = Plan.from_json(plan.read_text())
                cuts = [stage.operations[0][0] for stage in found.stages[1:]]
                form = f"dp {found.dp}, pp {found.pp}, micro-batch {found.micro_batch_size}, cut before {cuts}"
                times = (f"{1e3 * each(seconds[label]):.1f}" for each in (median, min))
                rows.append((memory, label, form, *times))
    print(tabulate(rows, ["GiB", "times of", "plan", "ms, median", "ms, fastest"], disable_numparse=True))
    print(f"\n{Environment.here('cpu', cores=2).computer}, {TURNS} trainings of each plan in turns")


def auto3d(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "launch.main", *arguments]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def compare_candidates(profile: Profile) -> None:
    """Print the times of whole candidate stages over the sums of their operations, by number of blocks."""
    recipe = load("tiny", [*MODEL, *PLAN])
    planning = PlanningModel(recipe, predicted=True)
    machine, size = profile.measured(cluster(recipe)), default_micro_batch_size(recipe)
    request = request_on(machine, planning, profile, cuts=(), stages=None, micro_batch_size=size)
    profiles, blocks = candidate_blocks(request)
    sums = Runs(profiles.graph, blocks, profiles.costs).at(profiles.at(size))
    ratios: dict[int, list[float]] = {}
    for run, name in candidate_names(profiles.graph, blocks).items():
        if (seconds := profile.stage_seconds(name, size)) is not None:
            length = run[1] - run[0] + 1
            added_up = sums.forward_s[run] + sums.backward_s[run]
            ratios.setdefault(1 << (length - 1).bit_length(), []).append(sum(seconds) / added_up)
    rows = [
        (f"up to {most}", len(each), *np.quantile(each, (0, 0.5, 1)).round(2)) for most, each in sorted(ratios.items())
    ]
    print(tabulate(rows, ["blocks", "candidates", "least", "median", "most"]))
    print("time of the whole stage over the sum of its operations\n")


if __name__ == "__main__":
    main()
