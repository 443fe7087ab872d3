"""Public models at their published sizes: python -m tests.benchmarks.public_models [NAME…]

`auto3d plan` on each recipe of recipes/public/, in a process of its own: first with an empty cache, then with the cache
of the first. Reports processor time with all child processes, the peak memory of the largest process, what the search
looked at and simulated, and the best plan. Prints the table and, without names, writes it to
results/public/README.md.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from tabulate import tabulate

from tests.targets import Target, end

RECIPES = Path("recipes/public")
FILE = Path("results/public/README.md")
COLD_S, MEMORY_GIB = 20, 1.5  # wished for each model
HEADINGS = (
    "model",
    "cold (s)",
    "warm (s)",
    "GiB cold",
    "GiB warm",
    "candidates",
    "looked at",
    "simulated",
    "best plan",
)
TEXT = """# Public models

Made by `python -m tests.benchmarks.public_models`: `auto3d plan public/NAME`. Simulated, not measured. Seconds are
processor time of the whole command with its child processes, with an empty cache and with that of the first run; GiB is
the peak memory of its largest process.

{table}
"""


@dataclass(frozen=True)
class Planned:
    """One run of `auto3d plan`; ``error`` is its message if it gave no plan."""

    processor_s: float
    peak_bytes: int
    record: dict[str, Any]
    error: str


def plan(name: str, cache: str) -> Planned:
    command = [sys.executable, "-m", "launch.main", "plan", str(RECIPES / f"{name}.yaml"), "--json"]
    with TemporaryFile() as out, TemporaryFile() as errors:
        process = subprocess.Popen(command, env=os.environ | {"AUTO3D_CACHE": cache}, stdout=out, stderr=errors)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        record = json.loads(out.read()) if process.returncode == 0 else {}
        error = "" if record else errors.read().decode().strip().splitlines()[-1]
    return Planned(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, record, error)


def row(name: str, cold: Planned, warm: Planned) -> tuple[str, ...]:
    record = cold.record
    times = (f"{one.processor_s:.1f}" for one in (cold, warm))
    sizes = (f"{one.peak_bytes / 2**30:.2f}" for one in (cold, warm))
    if not record:
        return name, *times, *sizes, "", "", "", cold.error
    best = record["candidates"][0]
    candidates = len(record["candidates"]) + sum(one["count"] for one in record["infeasible"])
    degrees = " × ".join(f"{key} {best[key]}" for key in ("dp", "tp", "pp"))
    return (
        *(name, *times, *sizes, str(candidates), str(record["looked_at"]), str(record["simulated"])),
        f"{best['predicted_s']:.4g} s: {degrees}, micro-batch {best['micro_batch_size']}, {best['schedule']}",
    )


def main() -> None:
    names = sys.argv[1:] or sorted(file.stem for file in RECIPES.glob("*.yaml"))
    rows, targets = [], []
    for name in names:
        with TemporaryDirectory() as cache:
            cold, warm = plan(name, cache), plan(name, cache)
        rows.append(row(name, cold, warm))
        print(*rows[-1], sep="  ", flush=True)
        targets += [
            Target(what=f"{name}, cold", found=cold.processor_s, wish=COLD_S, unit=" s"),
            Target(what=f"{name}, memory", found=cold.peak_bytes / 2**30, wish=MEMORY_GIB, unit=" GiB"),
            Target(what=f"{name}, plans", found=len(cold.record.get("candidates", [])), wish=1, least=True),
        ]
    text = TEXT.format(table=tabulate(rows, HEADINGS, tablefmt="github", disable_numparse=True))
    print(text)
    if not sys.argv[1:]:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(text)
    end(targets)


if __name__ == "__main__":
    main()
