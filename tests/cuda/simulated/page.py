"""Writes results/cuda/simulated.md from the records beside it: python -m tests.cuda.simulated.page"""

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tabulate import tabulate

from auto3d.runtime.measurement import Environment
from tests.distributed.parity_report import error_text
from tests.release.records import commit_here

FOLDER = Path("results/cuda")
DIFFERENCES = {"CPU": "CPU runtime", "plain": "plain", "float32": "float32", "plain from float32": "plain from float32"}


def made_here() -> dict[str, str]:
    """The engine's last commit, the date and the software, for a record; raises ValueError if files were changed."""
    commit_here()
    last = ["git", "rev-list", "-1", "--abbrev-commit", "--abbrev=12", "HEAD", "--", "auto3d"]
    engine = subprocess.run(last, capture_output=True, text=True, check=True).stdout.strip()
    here = Environment.here("cpu")
    software = f"torch {here.torch}, transformers {here.transformers}, Python {here.python}"
    return {"engine": engine, "date": date.today().isoformat(), "software": software}


def words_of(made: dict[str, str]) -> str:
    """What ``made_here`` has given, for a reader."""
    return f"{made['software']}, engine of commit {made['engine']}, {made['date']}"


def summary(records: Sequence[dict[str, Any]]) -> str:
    """How many cells are right, how many of them equal in bits, and the largest difference of the others."""
    right = [each["differences"]["CPU"] for each in records if each["right"]]
    equal = sum(error == 0 for error in right)
    largest = f", the others to {error_text(max(right))}" if equal < len(right) else ""
    return f"{len(right)} of {len(records)} cells are right; {equal} equal the CPU runtime in bits{largest}"


def cells(records: Sequence[dict[str, Any]]) -> str:
    names = {name: title for name, title in DIFFERENCES.items() if any(name in each["differences"] for each in records)}
    rows = []
    for each in records:
        found = each["differences"]
        errors = (error_text(found[name]) if name in found else "" for name in names)
        rows.append((each["case"], each["ranks"], "right" if each["right"] else "**wrong**", *errors))
    return tabulate(rows, ("cell", "ranks", "result", *names.values()), tablefmt="pipe", disable_numparse=True)


def scale() -> str:
    """What `scale` found, and whether counts and memory are as they should be."""
    found = json.loads((FOLDER / "simulated_scale.json").read_text())
    table = tabulate(found["rows"], found["columns"], tablefmt="pipe", disable_numparse=True)
    right = "are" if found["right"] else "are **not**"
    return f"{table}\n\nCounts and device memory {right} those of a plan of fewer pipelines. {words_of(found)}."


def main() -> None:
    lines = (FOLDER / "simulated.jsonl").read_text().splitlines()
    latest = {each["case"]: each for each in map(json.loads, lines)}
    low = [each for name, each in sorted(latest.items()) if "@" in name]
    full = [each for name, each in sorted(latest.items()) if "@" not in name]
    software = Counter(map(words_of, latest.values()))
    text = TEXT.format(
        low=cells(low),
        of_low=summary(low),
        full=cells(full),
        of_full=summary(full),
        scale=scale(),
        software="; ".join(f"{made} ({count} cells)" for made, count in software.items()),
    )
    (FOLDER / "simulated.md").write_text(text)


TEXT = """\
# On simulated GPUs

Cells of the suite's sample of the grids, trained by the CUDA build of torch on simulated GPUs
([docs](../../docs/runtime.md#simulated-gpus)), each by the last run that was recorded: `make cuda PART=grid
ARGS="--record results/cuda/simulated.jsonl"`; a cell without a run is not here. Made with {software}.

*CPU runtime*: the largest difference of any loss, norm, gradient, parameter or buffer from the same plan on CPUs, whose
ranks add as the simulated NCCL does; 0 is equal in bits. *plain*: the largest error of any gradient from plain PyTorch,
in the form of the bound of [parity.md](../parity.md).

## bfloat16

{of_low}.

*plain* is plain PyTorch in bfloat16 on a simulated GPU, whose every iteration begins with the weights of our run: 1e-5
is allowed where no rank sums in bfloat16. Where tensor-parallel ranks do, *float32* is the error from plain PyTorch in
float32, which may be at most twice as large as *plain from float32*, the error of plain PyTorch in bfloat16.

{low}

## float32

{of_full}.

{full}

## One rank of many

`make cuda PART=scale ARGS="--record results/cuda/simulated_scale.json"`: one rank of plans of tp 4, pp 8 and 1, 2 or 16
pipelines, whose other ranks do not exist. Times are processor time of the main thread, on a busy machine.

{scale}

Made by `python -m tests.cuda.simulated.page` from the records beside this page.
"""

if __name__ == "__main__":
    main()
