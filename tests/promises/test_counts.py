"""What commands and a training cost, in counts that do not depend on the machine: none grows by a quarter unseen."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from auto3d.runtime.process.world import World, join, leave
from auto3d.runtime.rank import build_rank
from auto3d.runtime.settings import TrainingSettings
from auto3d.schedule import samples_at_once
from tests.benchmarks.programs import CASES, FEWER, Case, ours, per_layer
from tests.distributed.parity import ADAMW, make_plan
from tests.models import TRAINED, captured, precision_of
from tests.promises.counts import check, counted


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("state", ["empty", "filled"])  # in this order
def test_counts_of_a_dry_run(state: str, tmp_path: Path, cache: Path):
    dry_run = "sweep tiny launch.executor=slurm search.max_trials=2 --dry-run"
    check(f"dry run of tiny, {state} cache", counted(dry_run, tmp_path, cache, needs_torch=state == "empty")[0])


def test_modules_of_quick_commands():
    code = "import sys; from launch.main import main; sys.argv[0] = 'auto3d'\ntry: main()\nexcept SystemExit: pass\n"
    code += "print('modules', len(sys.modules))"
    found = {}
    for command in ("--help", "recipes", "keys", "status tiny"):
        done = subprocess.run(
            [sys.executable, "-c", code, *command.split()], capture_output=True, text=True, check=True
        )
        found[command] = int(done.stdout.split()[-1])
    check("modules imported", found)


def count_training(world: World, model: str, plan: Any) -> dict[str, int]:
    """Counts of one iteration of a rank, after one that warms it up."""
    settings = TrainingSettings(
        iterations=3,
        optimizer=ADAMW,
        device="cpu",
        threads_per_rank=1,
        timeout_s=60,
        precision=precision_of(model),
    )
    join(world, device=torch.device("cpu"), timeout_s=60)
    try:
        rank = build_rank(captured(model, samples_at_once(plan)), plan, settings, TRAINED[model][1], world)
        list(rank.executor.run(rank.programs[0], 0))
        found: Counter[str] = Counter()

        def note(frame: Any, event: str, argument: Any) -> None:
            found[event] += 1

        def sending(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                found["bytes"] += tensor.numel() * tensor.element_size()
                return function(tensor, *args, **kwargs)

            return call

        with (
            patch.object(dist, "isend", sending(dist.isend)),
            patch.object(dist, "all_reduce", sending(dist.all_reduce)),
        ):
            sys.setprofile(note)
            list(rank.executor.run(rank.programs[1], 1))
            sys.setprofile(None)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            list(rank.executor.run(rank.programs[2], 2))
        nodes = sum(event.name.startswith("autograd::engine::evaluate_function") for event in profiler.events())
        operations = len(rank.programs[1].steps)
        return {
            "Python calls per operation": round(found["call"] / operations),
            "calls of C per operation": round(found["c_call"] / operations),
            "autograd nodes": nodes,
            "bytes sent": found["bytes"],
        }
    finally:
        leave()


@pytest.mark.parametrize(("model", "dp", "pp"), [("gpt2", 1, 2), ("gpt2", 2, 1), ("llama@bfloat16", 1, 1)])
def test_counts_of_a_training(model: str, dp: int, pp: int, processes: Any):
    plan = make_plan(model, dp=dp, pp=pp, schedule="1f1b")
    first, *_ = processes.run(plan.ranks, count_training, model, plan)
    check(f"iteration of {model}, dp {dp}, pp {pp}, rank 0", first)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_counts_of_a_layer(case: Case):
    found = per_layer(case, ours, layers=FEWER + 1)
    del found["operators"]  # a processor's kernels may call others
    check(f"program of a layer of GPT-2, {case.name}", found)
