"""Run the zoo: python -m tests.zoo [--only PATTERN] [--jobs 2] [--write] (`make zoo` writes results/zoo.md; 20 minutes)

Exits with 1 if an entry is wrong, crashes, hangs, or is refused in words that a user does not know.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import re
from collections import Counter
from pathlib import Path

import click

from launch.report.release import Target
from tests.targets import end
from tests.zoo import custom, transformers_inputs, transformers_language, transformers_vision
from tests.zoo.drive import Finished, run_all, warm_up
from tests.zoo.outcome import FAULTS, Result
from tests.zoo.report import FILE, report

ENTRIES = [  # the long ones first
    *transformers_language.ENTRIES,
    *transformers_vision.ENTRIES,
    *transformers_inputs.ENTRIES,
    *custom.ENTRIES,
]


@click.command()
@click.option("--only", default="", help="Regular expression of the names or families to run.")
@click.option("--jobs", default=2, show_default=True, help="Number of entries that run at the same time.")
@click.option("--write", is_flag=True, help=f"Write {FILE}.")
@click.option("--log", type=click.Path(path_type=Path), help="File for the tracebacks of failing entries.")
@click.option("--list", "listed", is_flag=True, help="List the entries without running them.")
def main(only: str, jobs: int, write: bool, log: Path | None, listed: bool) -> None:
    """Train the models of the zoo with auto3d and with plain PyTorch, and compare them."""
    entries = [entry for entry in ENTRIES if re.search(only, entry.name) or re.search(only, entry.family)]
    if listed:
        for entry in entries:
            print(f"{entry.family:24} {entry.name}")
        return
    warm_up()
    finished: list[Finished] = []
    for one in run_all(entries, jobs=jobs):
        finished.append(one)
        reason = f": {one.outcome.reason}" if one.outcome.reason else ""
        print(f"{one.outcome.result:8} {one.seconds:5.1f} s  {one.entry.name}{reason}", flush=True)
        if log and one.outcome.detail:
            with log.open("a") as file:
                file.write(f"==== {one.entry.name}: {one.outcome.result}\n{one.outcome.detail}\n")
    counts = Counter(one.outcome.result for one in finished)
    print(f"{len(finished)} entries:", ", ".join(f"{number} {result}" for result, number in counts.items()))
    if write:
        order = {entry.name: number for number, entry in enumerate(ENTRIES)}
        FILE.write_text(report(sorted(finished, key=lambda one: order[one.entry.name])))
    wrong = sum(number for result, number in counts.items() if result in FAULTS)
    targets = [Target(what="models that are wrong", found=wrong, wish=0)]
    if len(finished) == len(ENTRIES):
        targets.append(Target(what="models that are right", found=counts[Result.RIGHT], wish=360, least=True))
    end(targets)


if __name__ == "__main__":
    main()
