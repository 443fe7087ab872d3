"""The report of a release: one HTML page with each part's runs, and the history of each of its figures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from auto3d.errors import InputError
from auto3d.words import counted

RUN = ("commit", "date", "seconds", "pace", "exit code", "machine", "last line")  # columns of the runs of a part
WIDTH, HEIGHT, MARGIN = 160, 28, 3  # pixels; a history is drawn so large


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure beside the wish for it. ``held`` is a looser bound, where the wish is known to be out of reach today."""

    what: str
    found: float
    wish: float
    held: float | None = None
    unit: str = ""
    least: bool = False  # the figure should be no less than that; else no more

    @property
    def bound(self) -> float:
        return self.wish if self.held is None else self.held

    def reaches(self, bound: float) -> bool:
        return self.found >= bound if self.least else self.found <= bound

    @property
    def missed(self) -> bool:
        """Whether even what is held is missed."""
        return not self.reaches(self.bound)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one run of a part of a release found."""

    commit: str
    date: str
    machine: str
    command: str
    seconds: float
    code: int  # exit code of the command
    summary: str  # the last line that it printed
    figures: tuple[Target, ...]
    pace: float | None = None  # seconds of a fixed loop beside it: how fast the machine was; None in older records


def records_in(file: Path) -> list[Record]:
    """The records of a part, oldest first; raises InputError if ``file`` has something else."""
    try:
        return [_record(json.loads(line)) for line in file.read_text().splitlines()]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{file}: no records of `make release`: {error}") from None


def _record(fields: dict[str, Any]) -> Record:
    return Record(**fields | {"figures": tuple(Target(**figure) for figure in fields["figures"])})


def shown_pace(record: Record) -> str:
    return "" if record.pace is None else f"{record.pace:.2f}"


def is_release(folder: Path) -> bool:
    """Whether ``folder`` has records of `make release`: a file PART.jsonl for each part that ran."""
    return folder.is_dir() and any(folder.glob("*.jsonl"))


def release_page(folder: Path) -> str:
    """The page of the records in ``folder``. It has no script, and needs no network."""
    parts = {file.stem: records_in(file) for file in sorted(folder.glob("*.jsonl"))}
    style = (files("launch.report") / "page" / "page.css").read_text(encoding="utf-8")
    newest = max(records[-1].date for records in parts.values())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>auto3d: report of a release</title>
<style>{style}</style>
</head>
<body>
<header><div>
<h1>Report of a release</h1>
<p>{counted(len(parts), "part")}, the newest run of {newest}. In a history a dot is a run, and the line the target.</p>
</div></header>
<main>
{"".join(_section(name, records) for name, records in parts.items())}
</main>
</body>
</html>
"""


def _section(name: str, records: Sequence[Record]) -> str:
    last = records[-1]
    failed = f', <span class="bad">failed with exit code {last.code}</span>' if last.code else ""
    runs = [
        (r.commit, r.date, f"{r.seconds:,.0f}", shown_pace(r), str(r.code), r.machine, r.summary)
        for r in reversed(records)
    ]
    return f"""<section>
<h2 id="{escape(name)}">{escape(name)}</h2>
<p class="note"><code>{escape(last.command)}</code>, {last.seconds:,.0f} s at {escape(last.commit)}{failed}</p>
{_figures(records)}
<details><summary>{counted(len(records), "run")}</summary>
{_table(RUN, [[escape(value) for value in run] for run in runs])}
</details>
</section>
"""


def _figures(records: Sequence[Record]) -> str:
    """A row for each figure of the last run."""
    rows = []
    for figure in records[-1].figures:
        same = [(record.commit, past) for record in records for past in record.figures if past.what == figure.what]
        sign = "≥" if figure.least else "≤"
        shown = f"{figure.found:,.4g}{escape(figure.unit)}"
        rows.append(
            [
                escape(figure.what),
                shown if figure.reaches(figure.wish) else f'<span class="bad">{shown}, missed</span>',
                f"{sign} {figure.wish:,.4g}{escape(figure.unit)}",
                _history(same),
            ]
        )
    return _table(("figure", "found", "target", "history"), rows) if rows else ""


def _history(runs: Sequence[tuple[str, Target]]) -> str:
    """A drawing of a figure over its runs, from the oldest to the newest, and of its last target."""
    wish = runs[-1][1].wish
    values = [figure.found for _, figure in runs]
    low, high = min([wish, *values]), max([wish, *values])

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (value - low) / (high - low or 1)

    def x(number: int) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (number / (len(runs) - 1) if len(runs) > 1 else 1)

    dots = "".join(
        f'<circle cx="{x(n):.1f}" cy="{y(figure.found):.1f}" r="2.5" fill="var(--accent)">'
        f"<title>{escape(commit)}: {figure.found:,.4g}{escape(figure.unit)}</title></circle>"
        for n, (commit, figure) in enumerate(runs)
    )
    line = " ".join(f"{x(n):.1f},{y(value):.1f}" for n, value in enumerate(values))
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{counted(len(runs), "run")}">'
        f'<line x1="0" x2="{WIDTH}" y1="{y(wish):.1f}" y2="{y(wish):.1f}" stroke="var(--hint)" stroke-dasharray="3"/>'
        f'<polyline points="{line}" fill="none" stroke="var(--accent)"/>{dots}</svg>'
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th class="text">{heading}</th>' for heading in headings)
    body = "".join("<tr>" + "".join(f'<td class="text">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
