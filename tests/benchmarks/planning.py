"""`auto3d plan` at real sizes: python -m tests.benchmarks.planning [--beside COMMIT] [NAME…]

Plans each recipe of real size, a mixed cluster of 512 GPUs, and each public model of recipes/public/, in a process of
its own: first with an empty cache, then with the cache of the first. Reports processor time with all child processes
and the peak memory of the largest process; and, from another run with --json, which also makes the plans of a sweep
ready to run, what the search looked at, simulated and left out, and the best plan. Prints the table and, without names,
writes it to results/search/planning.md.

``--beside COMMIT`` writes results/search/planning-beside.md: the processor time of cold plans here and at another
commit, which run at once and so meet the same machine: the ratio holds where seconds do not.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from tabulate import tabulate

from launch.report.release import Target
from tests.release.records import commit_here
from tests.targets import end

FILE = Path("results/search/planning.md")
BESIDE = Path("results/search/planning-beside.md")
ROUNDS = 3  # each plans a case by both commits at once
REAL = (
    "gpt1.4b", "gpt2.5b", "gpt8.3b", "gpt20b", "gpt175b", "bert48", "gpt2-64", "llama3-8b", "llama3-70b", "t5-11b",
    "vit-22b",
)  # fmt: skip
MIXED = [  # 32 nodes of 8 A100-80GB and 32 of 8 V100-32GB
    "cluster={nodes: 32, devices_per_node: 8, device: cuda, accelerator: A100-80GB, "
    "more: [{nodes: 32, devices_per_node: 8, accelerator: V100-32GB}]}",
    "training.global_batch=1024",
    "search.pp=[1,2,4,8,16,32]",
    "search.partition=[blocks,layer-assignment]",
    "search.placement=auto",
]
PUBLIC = sorted(file.stem for file in Path("recipes/public").glob("*.yaml"))
HEADINGS = (
    "recipe", "cold (s)", "warm (s)", "GiB", "candidates", "looked at", "simulated", "left out", "ended by",
    "best plan",
)  # fmt: skip
TEXT = """# Planning at real sizes

Made by `python -m tests.benchmarks.planning`: `auto3d plan RECIPE`, and `gpt20b` on 512 mixed GPUs. Simulated, not
measured. Seconds are processor time of the whole command with its child processes, with an empty cache and with that of
the first run; GiB is the peak memory of its largest process with an empty cache. What a search left out takes longer
than the twenty plans that it shows, unless something ended it.

{table}
"""


BESIDE_TEXT = """# Planning beside an earlier commit

Made by `python -m tests.benchmarks.planning --beside {other} {names}` at {here}.
Processor seconds of `auto3d plan` with an empty cache and with child processes, medians of {rounds} runs; "there" is
{other}, which ran at the same times. A busy machine takes longer for both, so that only the ratios can be compared with
other pages.

{table}
"""


@dataclass(frozen=True)
class Case:
    """A recipe with overrides, and the wishes for its planning from an empty cache."""

    name: str
    command: tuple[str, ...]
    cold_s: float
    warm_s: float
    gib: float = 1.5


CASES = (
    *(Case(name, (name,), 15 if name == "gpt175b" else 12, 7.5 if name == "gpt175b" else 6) for name in REAL),
    Case("gpt20b on 512 mixed GPUs", ("gpt20b", *MIXED), 17, 8.5),
    *(Case(f"public/{name}", (f"recipes/public/{name}.yaml",), 20, 20) for name in PUBLIC),
)


@dataclass(frozen=True)
class Planned:
    """One run of `auto3d plan`; ``error`` is its message if it gave no plan."""

    processor_s: float
    peak_bytes: int
    printed: str
    error: str


def plan(case: Case, cache: str, *options: str, clone: Path = Path()) -> Planned:
    """Run `auto3d plan` by the code of ``clone``."""
    command = [sys.executable, "-m", "launch.main", "plan", *case.command, *options]
    with TemporaryFile() as out, TemporaryFile() as errors:
        environment = os.environ | {"AUTO3D_CACHE": cache}
        process = subprocess.Popen(command, env=environment, cwd=clone, stdout=out, stderr=errors)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        error = errors.read().decode().strip().splitlines()[-1] if process.returncode else ""
        return Planned(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, out.read().decode(), error)


def plan_cold(case: Case, clone: Path) -> float:
    """Processor seconds of a plan with an empty cache."""
    with TemporaryDirectory() as cache:
        planned = plan(case, cache, clone=clone)
    if planned.error:
        raise SystemExit(f"{case.name}: {planned.error}")
    return planned.processor_s


def row(case: Case, cold: Planned, warm: Planned, record: Mapping[str, Any]) -> tuple[str, ...]:
    figures = f"{cold.processor_s:.1f}", f"{warm.processor_s:.1f}", f"{cold.peak_bytes / 2**30:.2f}"
    if not record:
        return (case.name, *figures, *[""] * 5, cold.error)
    best = record["candidates"][0]
    counts = [record[name] for name in ("size", "looked_at", "simulated")]
    degrees = " × ".join(f"{key} {best[key]}" for key in ("dp", "tp", "pp"))
    found = f"{best['predicted_s']:.4g} s: {degrees}, micro-batch {best['micro_batch_size']}, {best['schedule']}"
    return case.name, *figures, *map(str, [*counts, record["left"]["candidates"]]), record["ended_by"], found


def compare(commit: str, cases: Sequence[Case]) -> str:
    """The page of cold plans here and at ``commit``."""
    rows = []
    with TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", ".", folder], check=True)
        subprocess.run(["git", "-C", folder, "checkout", "--quiet", commit], check=True)
        for case in cases:
            with ThreadPoolExecutor(2) as both:
                pairs = [tuple(both.map(plan_cold, [case] * 2, [Path(), Path(folder)])) for _ in range(ROUNDS)]
            here, there = (median(seconds) for seconds in zip(*pairs, strict=True))
            ratios = sorted(mine / other for mine, other in pairs)
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            rows.append((case.name, f"{here:.1f}", f"{there:.1f}", f"{median(ratios):.2f}", spread))
            print(*rows[-1], sep="  ", flush=True)
    table = tabulate(
        rows, ("recipe", "here (s)", "there (s)", "ratio", "range"), tablefmt="github", disable_numparse=True
    )
    names = " ".join(f'"{case.name}"' if " " in case.name else case.name for case in cases)
    return BESIDE_TEXT.format(other=commit, names=names, here=commit_here(), rounds=ROUNDS, table=table)


def main() -> None:
    parser = ArgumentParser(prog="python -m tests.benchmarks.planning")
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; all if none is named")
    parser.add_argument("--beside", metavar="COMMIT", help="compare cold plans with this commit")
    options = parser.parse_args()
    names = options.names
    if unknown := set(names) - {case.name for case in CASES}:
        parser.error(f"there is no {min(unknown)!r}; there are {', '.join(case.name for case in CASES)}")
    cases = [case for case in CASES if not names or case.name in names]
    if options.beside:
        BESIDE.write_text(compare(options.beside, cases))
        return
    rows, targets = [], []
    for case in cases:
        with TemporaryDirectory() as cache:
            cold, warm, detailed = plan(case, cache), plan(case, cache), plan(case, cache, "--json")
        record = {} if cold.error else json.loads(detailed.printed)
        rows.append(row(case, cold, warm, record))
        print(*rows[-1], sep="  ", flush=True)
        targets += [
            Target(what=f"{case.name}, cold", found=cold.processor_s, wish=case.cold_s, unit=" s"),
            Target(what=f"{case.name}, warm", found=warm.processor_s, wish=case.warm_s, unit=" s"),
            Target(what=f"{case.name}, memory", found=cold.peak_bytes / 2**30, wish=case.gib, unit=" GiB"),
            Target(what=f"{case.name}, plans", found=len(record.get("candidates", [])), wish=1, least=True),
        ]
    text = TEXT.format(table=tabulate(rows, HEADINGS, tablefmt="github", disable_numparse=True))
    print(text)
    if not names:
        FILE.write_text(text)
    end(targets)


if __name__ == "__main__":
    main()
