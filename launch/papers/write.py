"""Rows and claims of an item -> results/papers: Markdown, CSV and a plot; and one page with all claims."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from launch.papers.claims import Checked
from launch.papers.figure import draw
from launch.papers.item import Item, Part
from launch.papers.row import Row
from launch.store.files import write_whole

HOW = {
    "simulated": "Simulated, not measured: by our cost model and simulator, on the figures of the paper's cluster.",
    "emulated": "Emulated: real processes, messages and gradient syncs; operations take the time that the cost model "
    "gives them.",
    "measured": "Measured: real training by our runtime.",
    "experiment": "",
}
CLAIMS = "-claims.csv"  # ending of the file that the page of all claims is made from
CLAIM_COLUMNS = ("claim", "paper", "ours", "verdict")


@dataclass(frozen=True, kw_only=True)
class MadePart:
    """A part with its rows and its checked claims."""

    part: Part
    rows: Sequence[Row]
    claims: Sequence[Checked]


def write_item(name: str, item: Item, made: Sequence[MadePart], folder: Path) -> list[Path]:
    """Write NAME.md, NAME.csv, NAME-claims.csv and, for each part that has a figure, NAME.svg; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = _figures(name, made)
    files = {
        f"{name}.md": _markdown(name, item, made, list(figures)),
        f"{name}.csv": _csv(made),
        f"{name}{CLAIMS}": _claims_csv(made),
        **{file: text for file, (text, _) in figures.items()},
    }
    for file, text in files.items():
        write_whole(folder / file, text)
    return [folder / file for file in files]


def write_index(items: Mapping[str, Item], folder: Path) -> Path:
    """Write README.md: all claims of the items that have been made, with a link to each item."""
    rows: list[tuple[str, ...]] = []
    for name, item in items.items():
        file = folder / f"{name}{CLAIMS}"
        if not file.is_file():
            rows.append((f"{item.paper}, {item.place}", item.title, "", "not made", ""))
            continue
        with file.open(newline="") as lines:
            for number, row in enumerate(csv.DictReader(lines)):
                place = f"[{item.paper}, {item.place}]({name}.md)" if number == 0 else ""
                rows.append((place, *(row[column] for column in CLAIM_COLUMNS)))
    text = "\n".join(
        [
            "# The papers' tables and figures, made again",
            "",
            "    make papers                     # all of them; or one: make paper ITEM=merak-fig10a",
            "",
            "*Reproduced*: within 10 % of the paper's figure, or of both ends of its range. Each page says what is",
            "simulated, emulated or measured, and which changed assumption makes a difference go away. Such an",
            "assumption, for example a slower link, is chosen to see its effect; it is not measured, unless the page",
            "says so.",
            "",
            tabulate(rows, ["item", "claim", "paper", "ours", "verdict"], "github", disable_numparse=True),
            "",
        ]
    )
    write_whole(folder / "README.md", text)
    return folder / "README.md"


def _figures(name: str, made: Sequence[MadePart]) -> dict[str, tuple[str, MadePart]]:
    """File name -> SVG text and part. The first plot has the item's name, others a number."""
    drawn = [one for one in made if one.part.figure is not None]
    files = [f"{name}.svg", *(f"{name}-{number}.svg" for number in range(2, len(drawn) + 1))]
    found = {}
    for file, one in zip(files, drawn, strict=False):
        assert one.part.figure is not None
        found[file] = draw(one.part, one.part.figure, one.rows), one
    return found


def _markdown(name: str, item: Item, made: Sequence[MadePart], figures: Sequence[str]) -> str:
    lines = [f"# {item.title}", "", f"{item.paper}, {item.place}. Again: `make paper ITEM={name}`", ""]
    if item.text:
        lines += [item.text.strip(), ""]
    remaining = list(figures)
    for one in made:
        lines += [f"## {one.part.title}", ""]
        if words := " ".join([HOW[one.part.how], one.part.text.strip(), *_made_on(one.rows)]).strip():
            lines += [words, ""]
        lines += [_grid(one), ""]
        if one.part.figure is not None:
            lines += [f"![{one.part.title}]({remaining.pop(0)})", ""]
        if problems := _problems(one.rows):
            lines += ["No value:", "", *problems, ""]
        if one.claims:
            lines += [_claims_table(one.claims), "", *_explanations(one.claims)]
    return "\n".join(lines).rstrip() + "\n"


def _made_on(rows: Sequence[Row]) -> list[str]:
    places = list(dict.fromkeys(row.made_on for row in rows if row.made_on))
    return [f"On {'; '.join(places)}."] if places else []


def _grid(one: MadePart) -> str:
    """Settings × systems: our quantity, and the paper's in brackets where it prints one."""
    systems = list(dict.fromkeys(row.system for row in one.rows))
    settings = list(dict.fromkeys(row.setting for row in one.rows))
    cells = {(row.setting, row.system): row for row in one.rows}
    quantity = one.part.quantity
    table = []
    for setting in settings:
        line = [", ".join(setting)]
        for system in systems:
            row = cells.get((setting, system))
            text = "–" if row is None or quantity not in row.values else _digits(row.values[quantity])
            printed = one.part.printed.get(system, {}).get(", ".join(setting))
            line.append(text if printed is None else f"{text} (paper {printed})")
        table.append(line)
    return tabulate(table, [quantity, *systems], "github", disable_numparse=True)


def _problems(rows: Sequence[Row]) -> list[str]:
    """One line per reason, with the rows that it leaves without values."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.problem:
            reasons.setdefault(row.problem, []).append(", ".join([*row.setting, row.system]))
    return [f"- {'; '.join(where)}: {reason}" for reason, where in reasons.items()]


def _claims_table(claims: Sequence[Checked]) -> str:
    rows = [_claim_row(checked) for checked in claims]
    return tabulate(rows, CLAIM_COLUMNS, "github", disable_numparse=True)


def _claim_row(checked: Checked) -> tuple[str, str, str, str]:
    return checked.claim.says, checked.paper, checked.ours, checked.verdict


def _explanations(claims: Sequence[Checked]) -> list[str]:
    """Notes of the claims, and the causes of differences with our figure once they are changed."""
    lines = []
    for checked in claims:
        again = {id(cause): found for cause, found in checked.causes}
        words = [checked.claim.note.strip()] if checked.claim.note else []
        for cause in checked.claim.because if checked.holds is False else []:
            found = again.get(id(cause))
            shown = f" With that changed, ours is {found.ours} ({found.verdict})." if found else ""
            words.append(f"{cause.text.strip()}{shown}")
        if words:
            lines += [f"*{checked.claim.says}*: {' '.join(words)}", ""]
    return lines


def _csv(made: Sequence[MadePart]) -> str:
    """Long form: one line per row and quantity."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ("part", "how", "setting", "system", "quantity", "ours", "paper", "difference", "plan", "problem")
    writer.writerow(columns)
    for one in made:
        for row in one.rows:
            place = one.part.title, one.part.how, ", ".join(row.setting), row.system
            printed = one.part.printed.get(row.system, {}).get(", ".join(row.setting), "")
            for quantity, value in row.values.items() or [(one.part.quantity, None)]:
                paper = printed if quantity == one.part.quantity else ""
                difference = "" if value is None or not isinstance(paper, float) else f"{value / paper - 1:.4f}"
                ours = "" if value is None else f"{value:.6g}"
                writer.writerow((*place, quantity, ours, paper, difference, row.plan, row.problem))
    return text.getvalue()


def _claims_csv(made: Sequence[MadePart]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CLAIM_COLUMNS)
    writer.writerows(_claim_row(checked) for one in made for checked in one.claims)
    return text.getvalue()


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
