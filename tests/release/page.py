"""results/README.md: the newest record of every part of a release, with what missed its target and why."""

from pathlib import Path

import yaml
from tabulate import tabulate

from launch.report.release import Record, Target, shown_pace
from tests.release.parts import PARTS, Part
from tests.release.records import changed_since, records_of

FILE = Path("results/README.md")
MISSED: dict[str, str] = yaml.safe_load(Path(__file__).with_name("missed.yaml").read_text()) or {}
FIGURES = ("part", "figure", "found", "target", "met")
HEADINGS = ("part", "commit", "date", "command", "seconds", "pace", "result", "targets met", "state")
TEXT = """# Results

Written by `make release`; `make release PART=NAME` runs one part, and `make release PART=page` only writes this page.
Each part keeps every run with its commit in `results/release/`. *out of date*: the code of files that the part tries
was changed after that commit. *pace*: seconds of ten million steps of a loop of Python before and after the part, the
mean; where it is larger, the machine was slower, and so is every time of that part.

{table}

## Targets that are missed

{missed}

## Figures

Of the newest run of each part.

{figures}

## Machines

{machines}
"""


def state_of(part: Part) -> str:
    """What is to be said about the newest record of ``part``."""
    records = records_of(part)
    if not records:
        return "never run"
    if records[-1].code:
        return f"**failed** (exit code {records[-1].code})"
    if unexplained(records[-1]):
        return "**misses a target without a reason**"
    try:
        changed = changed_since(records[-1], part)
    except ValueError:
        return "out of date: its commit is unknown here"
    return f"out of date: {len(changed)} files changed" if changed else "current"


def unexplained(record: Record) -> list[Target]:
    """The figures that miss their targets and have no reason in missed.yaml."""
    return [figure for figure in record.figures if figure.missed and figure.what not in MISSED]


def _cells(figure: Target) -> tuple[str, str, str]:
    """Its name, what was found, and the target."""
    sign = "≥" if figure.least else "≤"
    return figure.what, f"{figure.found:,.4g}{figure.unit}", f"{sign} {figure.wish:,.4g}{figure.unit}"


def page() -> str:
    rows, figures, missed, machines = [], [], [], {}
    for part in PARTS:
        records = records_of(part)
        if not records:
            rows.append((part.name, "", "", f"`{part.command}`", "", "", "", "", "never run"))
            continue
        last = records[-1]
        machines.setdefault(last.machine, []).append(part.name)
        short = [figure for figure in last.figures if figure.missed]
        state = state_of(part)
        targets = f"{len(last.figures) - len(short)} of {len(last.figures)}" if last.figures else "–"
        run = last.commit, last.date, f"`{last.command}`", f"{last.seconds:.0f}", shown_pace(last), last.summary
        rows.append((part.name, *run, targets, state))
        figures += [(part.name, *_cells(one), "no" if one.missed else "yes") for one in last.figures]
        for one in short:
            what, found, target = _cells(one)
            missed.append(f"- {part.name}: {what}: {found} ({target}). {MISSED.get(what, '**no reason given**')}")
    return TEXT.format(
        table=tabulate(rows, HEADINGS, tablefmt="github", disable_numparse=True),
        missed="\n".join(missed) or "None.",
        figures=tabulate(figures, FIGURES, tablefmt="github", disable_numparse=True),
        machines="\n".join(f"- {machine}: {', '.join(names)}" for machine, names in machines.items()) or "None.",
    )
