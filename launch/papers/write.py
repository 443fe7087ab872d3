"""Rows and claims of an item -> results/papers: Markdown, CSV and a plot; and one page with all claims."""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tabulate import tabulate

from auto3d.plan import AUTO3D
from launch.papers.claims import Checked
from launch.papers.experiments import MADE
from launch.papers.figure import draw
from launch.papers.item import Claim, Item, Part
from launch.papers.row import Row
from launch.store.files import write_whole

HOW = {
    "simulated": "Simulated, not measured: by our cost model and simulator, on the figures of {cluster}.",
    "emulated": "Emulated: our runtime under each system's plan, with real processes, messages and gradient syncs; "
    "operations take the time that the cost model gives them.",
    "measured": "Measured: real training by our runtime under each column's plan.",
    "experiment": "",
}
HERE = (
    "*Measured here*: real trials, by our runtime, of the plans that are the fastest by that prediction; of several of "
    "a system, the fastest."
)
CLAIMS = "-claims.csv"  # ending of the file that the page of all claims is made from
CLAIM_COLUMNS = ("claim", "paper", "ours", "verdict")
MADE_COLUMN = "made"  # how our figure of the claim was made, or what it was compared with instead of the paper's figure
COMPARISONS = {
    "measured": "measured",
    "emulated": "emulated",
    "simulated": "simulated",
    "formula": "ours against a formula of the paper",
    "fit": "a fit of our own",
}
MEASURED = "measured here"
HERE_COLUMNS = (MEASURED, "verdict here")


@dataclass(frozen=True, kw_only=True)
class MadePart:
    """A part with its rows and its checked claims."""

    part: Part
    rows: Sequence[Row]
    claims: Sequence[Checked]
    here: Sequence[Row] = ()  # the same rows by measurement, if a predicted part was measured
    claims_here: Sequence[Checked] = ()


def write_item(name: str, item: Item, made: Sequence[MadePart], folder: Path, changed: str = "") -> list[Path]:
    """Write NAME.md, NAME.csv, NAME-claims.csv and, for each part that has a figure, NAME.svg; returns the files.

    ``changed`` is the command that made them where it changes the item; empty: the item is as it is shipped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = _figures(name, made)
    files = {
        f"{name}.md": _markdown(name, item, made, list(figures), changed),
        f"{name}.csv": _csv(made),
        f"{name}{CLAIMS}": _claims_csv(made),
        **{file: text for file, (text, _) in figures.items()},
    }
    for file, text in files.items():
        write_whole(folder / file, text)
    return [folder / file for file in files]


def write_index(
    items: Mapping[str, Item],
    folder: Path,
    after_totals: Sequence[str] = (),
    explained: Mapping[tuple[str, str], str] = MappingProxyType({}),
) -> Path:
    """Write README.md: all claims of the items that have been made, with a link to each item.

    ``after_totals`` has further lines of Markdown, which come before the claims. ``explained`` says, by
    item and number of a claim that differs, which alternatives reproduce it.
    """
    rows: list[tuple[str, ...]] = []
    columns: tuple[str, ...] = CLAIM_COLUMNS
    totals: dict[str, Counter[tuple[str, str]]] = {}  # paper -> how made and verdict -> claims
    for name, item in items.items():
        claims = claims_in(folder / f"{name}{CLAIMS}")
        if claims is None:
            rows.append((f"{item.paper}, {item.place}", item.title, "", "not made", ""))
        else:
            for number, row in enumerate(claims):
                place = f"[{item.paper}, {item.place}]({name}.md)" if number == 0 else ""
                if made := row.pop(MADE_COLUMN, ""):  # files of earlier versions do not have it
                    totals.setdefault(item.paper, Counter())[made, row["verdict"].split(",")[0]] += 1
                columns = max(columns, tuple(row), key=len)
                if row["verdict"].startswith(("differs", "not reproduced")):
                    row["verdict"] += explained.get((name, str(number + 1)), "")
                rows.append((place, *row.values()))
    text = "\n".join(
        [
            "# The papers' tables and figures, made again",
            "",
            "    make papers                     # all of them; or one: make paper ITEM=merak-fig10a",
            "",
            "*Reproduced*: within 10 % of the paper's figure; of a ratio, within 10 % of its gain, so that 1.02 is a",
            "fifth of 1.10. Of a range, each of our settings must lie in it or so near to it, and a setting in which",
            "our system does not run counts against it. Each page says what is simulated, emulated or measured, and",
            "which changed assumption makes a difference go away. It is chosen to see its effect, and is not measured",
            "unless the page says so.",
            "",
            _totals(totals),
            "",
            *after_totals,
            tabulate(rows, ["item", *columns], "github", disable_numparse=True),
            "",
        ]
    )
    write_whole(folder / "README.md", text)
    return folder / "README.md"


def items_in(folder: Path) -> list[str]:
    """The names of the items that were made into ``folder``."""
    return [file.name.removesuffix(CLAIMS) for file in folder.glob(f"*{CLAIMS}")]


def claims_in(file: Path) -> list[dict[str, str]] | None:
    """The claims of an item that was made; None if it was not."""
    if not file.is_file():
        return None
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def _totals(totals: Mapping[str, Counter[tuple[str, str]]]) -> str:
    """Papers × how our figures were made: how many of the claims that can be compared are reproduced."""
    rows = []
    for paper, counts in [*totals.items(), ("all", sum(totals.values(), Counter()))]:
        cells = [f"{counts[kind, 'reproduced']} of {_compared(counts, kind)}" for kind in COMPARISONS]
        left = sum(number for (_, verdict), number in counts.items() if verdict == "not compared")
        rows.append((paper, *(cell if cell != "0 of 0" else "–" for cell in cells), left))
    headings = ["claims reproduced", *COMPARISONS.values(), "without a figure in the paper"]
    return tabulate(rows, headings, "github", disable_numparse=True)


def _compared(counts: Counter[tuple[str, str]], kind: str) -> int:
    return sum(number for (made, verdict), number in counts.items() if made == kind and verdict != "not compared")


def _figures(name: str, made: Sequence[MadePart]) -> dict[str, tuple[str, MadePart]]:
    """File name -> SVG text and part. The first plot has the item's name, others a number."""
    drawn = [made_part for made_part in made if made_part.part.figure is not None]
    files = [f"{name}.svg", *(f"{name}-{number}.svg" for number in range(2, len(drawn) + 1))]
    figures = {}
    for file, made_part in zip(files, drawn, strict=False):
        assert made_part.part.figure is not None
        figures[file] = draw(made_part.part, made_part.part.figure, made_part.rows), made_part
    return figures


def _markdown(name: str, item: Item, made: Sequence[MadePart], figures: Sequence[str], changed: str) -> str:
    again = f"Changed and cut. Again: `{changed}`" if changed else f"Again: `make paper ITEM={name}`"
    cluster = "the cluster that this command names" if " cluster" in changed else "the paper's cluster"
    lines = [f"# {item.title}", "", f"{item.paper}, {item.place}. {again}", ""]
    if item.text:
        lines += [item.text.strip(), ""]
    remaining = list(figures)
    for made_part in made:
        lines += [f"## {made_part.part.title}", ""]
        if words := " ".join(
            [
                HOW[made_part.part.how].format(cluster=cluster),
                *_by_peers(made_part.part),
                made_part.part.text.strip(),
                *_made_on(made_part.rows),
            ]
        ).strip():
            lines += [words, ""]
        if made_part.here:
            lines += [" ".join([HERE, *_made_on(made_part.here)]), ""]
        lines += [_grid(made_part), ""]
        if made_part.part.figure is not None:
            lines += [f"![{made_part.part.title}]({remaining.pop(0)})", ""]
        if problems := _problems(made_part.rows):
            lines += ["No value:", "", *problems, ""]
        if problems := _problems(made_part.here):
            lines += ["Not measured:", "", *problems, ""]
        if made_part.claims:
            lines += [_claims_table(made_part), "", *_explanations(made_part.claims)]
    return "\n".join(lines).rstrip() + "\n"


def _made_on(rows: Sequence[Row]) -> list[str]:
    places = list(dict.fromkeys(row.made_on for row in rows if row.made_on))
    return [f"On {'; '.join(places)}."] if places else []


def _grid(made_part: MadePart) -> str:
    """Settings × systems: our quantity, and the paper's in brackets where it has a figure; then what was measured."""
    systems = list(dict.fromkeys(row.system for row in made_part.rows))
    settings = list(dict.fromkeys(row.setting for row in made_part.rows))
    cells = {(row.setting, row.system): row for row in made_part.rows}
    here = {(row.setting, row.system): row for row in made_part.here}
    quantity = made_part.part.quantity
    table = []
    for setting in settings:
        line = [", ".join(setting)]
        for system in systems:
            text = _cell(cells.get((setting, system)), quantity)
            printed = made_part.part.printed.get(system, {}).get(", ".join(setting))
            line.append(text if printed is None else f"{text} (paper {printed})")
            if here:
                line.append(_cell(here.get((setting, system)), quantity))
        table.append(line)
    headings = [name for system in systems for name in (system, *[f"{system}, {MEASURED}"] * bool(here))]
    return tabulate(table, [quantity, *headings], "github", disable_numparse=True)


def _cell(row: Row | None, quantity: str) -> str:
    return "–" if row is None or quantity not in row.values else _digits(row.values[quantity])


def _by_peers(part: Part) -> list[str]:
    """The columns of ``part`` that other systems make, in words."""
    engines = {system: overrides.get("search.engine", [AUTO3D]) for system, overrides in part.systems.items()}
    return [f"{system} is made by {', '.join(names)} itself." for system, names in engines.items() if names != [AUTO3D]]


def _problems(rows: Sequence[Row]) -> list[str]:
    """One line per reason, with the rows that it leaves without values."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.problem:
            reasons.setdefault(row.problem, []).append(", ".join([*row.setting, row.system]))
    return [f"- {'; '.join(where)}: {reason}" for reason, where in reasons.items()]


def _claims_table(made_part: MadePart) -> str:
    return tabulate(_claim_rows(made_part), _claim_columns(made_part), "github", disable_numparse=True)


def _claim_columns(made_part: MadePart) -> tuple[str, ...]:
    return (*CLAIM_COLUMNS, *HERE_COLUMNS) if made_part.here else CLAIM_COLUMNS


def _claim_rows(made_part: MadePart) -> list[tuple[str, ...]]:
    rows = [(checked.claim.says, checked.paper, checked.ours, checked.verdict) for checked in made_part.claims]
    if not made_part.here:
        return [*rows]
    return [(*row, checked.ours, checked.verdict) for row, checked in zip(rows, made_part.claims_here, strict=True)]


def _explanations(claims: Sequence[Checked]) -> list[str]:
    """Notes of the claims, and the causes of differences with our figure once they are changed."""
    lines = []
    for checked in claims:
        again = {id(cause): outcome for cause, outcome in checked.causes}
        words = [checked.claim.note.strip()] if checked.claim.note else []
        for cause in checked.claim.because if checked.holds is False else []:
            with_change = again.get(id(cause))
            shown = f" With that changed, ours is {with_change.ours} ({with_change.verdict})." if with_change else ""
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
    for made_part in made:
        for how, row in [
            *((made_part.part.how, row) for row in made_part.rows),
            *((MEASURED, row) for row in made_part.here),
        ]:
            place = made_part.part.title, how, ", ".join(row.setting), row.system
            printed = made_part.part.printed.get(row.system, {}).get(", ".join(row.setting), "")
            for quantity, value in row.values.items() or [(made_part.part.quantity, None)]:
                paper = printed if quantity == made_part.part.quantity else ""
                difference = "" if value is None or not isinstance(paper, float) else f"{value / paper - 1:.4f}"
                ours = "" if value is None else f"{value:.6g}"
                writer.writerow((*place, quantity, ours, paper, difference, row.plan, row.problem))
    return text.getvalue()


def _claims_csv(made: Sequence[MadePart]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([MADE_COLUMN, *max((_claim_columns(made_part) for made_part in made), key=len)])
    for made_part in made:
        made_so = [_made(made_part.part, checked.claim) for checked in made_part.claims]
        writer.writerows((how, *row) for how, row in zip(made_so, _claim_rows(made_part), strict=True))
    return text.getvalue()


def _made(part: Part, claim: Claim) -> str:
    """A key of COMPARISONS."""
    if claim.source != "paper":
        return claim.source
    return part.how if part.experiment is None else MADE[part.experiment]


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
