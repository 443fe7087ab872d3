"""Run parts of a release, keep what they found, and write results/README.md: python -m tests.release [PART…]

Without a part all run, hours long; what is current is left out. The exit code is 1 if a part fails, or misses a target
without an entry in missed.yaml.
"""

import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from timeit import timeit

from auto3d.runtime.measurement import Environment
from launch.report.release import Record
from tests.release.page import FILE, page, state_of, unexplained
from tests.release.parts import PARTS, ROOT, Part
from tests.release.records import add_record, commit_here, read_figures

PAGE = "page"  # only writes the page


def run(part: Part) -> Record:
    """Run ``part`` and show its output; ended by Ctrl-C, it leaves no record."""
    with TemporaryDirectory() as folder:
        figures = Path(folder, "figures.jsonl")
        programs = str(Path(sys.executable).parent)
        environment = os.environ | {"AUTO3D_FIGURES": str(figures), "PATH": f"{programs}:{os.environ['PATH']}"}
        environment["MAKEFLAGS"] = "--no-print-directory"  # the last line of a part is its result
        commit, before, begun, last = commit_here(), pace(), time.monotonic(), ""
        process = subprocess.Popen(
            part.command,  # one of parts.py
            shell=True,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        seconds, code = round(time.monotonic() - begun, 1), process.wait()
        return Record(
            commit=commit,
            date=f"{datetime.now(UTC):%Y-%m-%d}",
            machine=_machine(),
            command=part.command,
            seconds=seconds,
            code=code,
            summary=last.replace(f"{ROOT}/", "")[:120].replace("|", "/"),
            figures=tuple(read_figures(figures)),
            pace=round((before + pace()) / 2, 2),
        )


def pace() -> float:
    """Seconds of a fixed loop of Python, the median of three."""
    return median(timeit("for i in range(10**7): s += i * i", "s = 0", number=1) for _ in range(3))


def _machine() -> str:
    return Environment.here("cpu").computer_and_software


def main() -> int:
    known = {part.name: part for part in PARTS}
    asked = sys.argv[1:]
    if wrong := [name for name in asked if name not in known and name != PAGE]:
        print(f"make release: there is no part {wrong[0]!r}; there are {', '.join([*known, PAGE])}", file=sys.stderr)
        return 2
    has_slurm = not subprocess.run("sinfo", shell=True, capture_output=True).returncode
    failed = []
    for part in [known[name] for name in asked if name != PAGE] or (PARTS if not asked else ()):
        if not asked and state_of(part) == "current":
            print(f"== {part.name}: current")
            continue
        if part.needs_slurm and not has_slurm:
            print(f"== {part.name}: not run, since no SLURM cluster answers; start one with make cluster-up NODES=4")
            failed.append(part.name)
            continue
        print(f"== {part.name}: {part.command} (about {part.minutes} minutes)", flush=True)
        try:
            record = run(part)
        except ValueError as error:
            print(f"make release: {error}", file=sys.stderr)
            return 2
        add_record(part, record)
        if record.code or unexplained(record):
            failed.append(part.name)
        FILE.write_text(page())
    FILE.write_text(page())
    if failed:
        print(f"failed, or missed a target without a reason in tests/release/missed.yaml: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
