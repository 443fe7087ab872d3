"""Every recipe is planned from an empty cache, and those for a cluster print the scripts of their jobs."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from auto3d.schedule import parse_schedule, write_schedule
from launch.model.candidates import candidate_of
from launch.recipe.load import load
from tests.promises.counts import COMMITTED, check, counted
from tests.promises.running import ROOT, run

RECIPES = sorted(file.stem for file in (ROOT / "recipes").glob("*.yaml"))
LONGEST_FIRST = sorted(RECIPES, key=lambda name: (name[:3] != "gpt", name))
OF_PAPERS = ("gpt1.4b", "gpt2.5b", "gpt8.3b", "gpt20b", "gpt175b", "bert48", "gpt2-64")
SCRIPTS = ("gpt20b", "mixed", "tiny")


@cache
def published_plans() -> dict[str, tuple[str, str]]:
    """Recipe -> the seconds and the degrees of its best plan in results/search/planning.md."""
    text = (ROOT / "results/search/planning.md").read_text()
    rows = re.findall(r"^\| (\S+) +\|.* ([\d.]+) s: (dp \d+ × tp \d+ × pp \d+), ", text, re.MULTILINE)
    return {name: (seconds, degrees) for name, seconds, degrees in rows}


@pytest.mark.parametrize("name", LONGEST_FIRST)
def test_a_recipe_is_planned_from_an_empty_cache(name: str, tmp_path: Path):
    short = "search.order_seconds=1" if "synthesized" in (ROOT / f"recipes/{name}.yaml").read_text() else ""
    cache = tmp_path / "cache"
    has_counts = f"plan {name}, empty cache" in COMMITTED
    if has_counts:
        counts, printed = counted(f"plan {name}", tmp_path, cache, needs_torch=True)
        check(f"plan {name}, empty cache", counts)
    else:
        printed = run(f"auto3d plan {name} {short}", tmp_path, cache=cache)
    assert "why the best is best" in printed
    best = re.search(r"^([\d.]+) +(?:\S+–\S+ +)?(\d+) +(\d+) +(\d+) ", printed, re.MULTILINE)
    assert best, printed
    if name in published_plans():
        seconds, dp, tp, pp = best.groups()
        assert published_plans()[name] == (f"{float(seconds):.4g}", f"dp {dp} × tp {tp} × pp {pp}")
    if name in OF_PAPERS:
        check_own_plan(name, printed[best.start() :].splitlines()[0])
    if name in SCRIPTS:
        dry_run = f"sweep {name} launch.executor=slurm search.max_trials=2 --dry-run"
        if has_counts:
            counts, printed = counted(dry_run, tmp_path, cache, needs_torch=True)
            check(f"dry run of {name} after it", counts)
        else:
            printed = run(f"auto3d {dry_run}", tmp_path, cache=cache)
        check_scripts(printed)


def check_own_plan(name: str, best: str) -> None:
    """The recipe's own plan, for a training, is the best that its search finds: the first row of what `plan` prints."""
    own = candidate_of(load(name).values.plan)
    schedule, options = parse_schedule(own.schedule)
    sync = str(options.pop("sync", own.sync))
    words = re.split(r"  +", best)[2:]  # after the seconds, and the interval
    wanted = [own.dp, own.tp, own.pp, own.micro_batch_size, write_schedule(schedule, options), own.recompute]
    assert words[:8] == [*map(str, wanted), own.partition, own.placement]
    assert words[8:] == ([] if sync == "lazy" else [f"sync={sync}"])


def check_scripts(printed: str) -> None:
    """The shell takes the scripts that a dry run prints."""
    scripts = re.split(r"(?m)^(?=#!/bin/bash)", printed)[1:]
    assert scripts, printed[-2000:]
    for script in scripts:
        assert "#SBATCH --nodes=" in script
        assert "srun" in script
        text = "\n".join(line for line in script.splitlines() if not line.startswith("auto3d"))
        assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0, text
