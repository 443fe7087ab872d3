"""The alternatives of a paper, tried on all claims of its simulated parts: results/papers/PAPER-alternatives."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tabulate import tabulate

from launch.papers.alternatives import Alternatives, altered, can_be_altered, items_of, read_alternatives
from launch.papers.item import Item, file_of
from launch.papers.predict import predict_items
from launch.papers.write import claims_in
from launch.store.files import write_whole

ENDING = "-alternatives.csv"
SHIPPED = "as in the items"  # the column of the claims as the pages of the items have them
_COLUMNS = ("item", "number", "claim", "paper", "alternative", "ours", "verdict")  # number: line in NAME-claims.csv

Line = dict[str, str]


def try_alternatives(name: str, folder: Path, tell: Callable[[str], None]) -> list[Path]:
    """Make all claims of the paper ``name`` under each of its alternatives; returns the CSV file and the page.

    The items as they are shipped must have been made into ``folder`` before: their claims are the first column.
    """
    alternatives = read_alternatives(name)
    items = items_of(alternatives)
    lines: list[Line] = [line for item in items for line in _shipped(item, items[item], folder)]
    compared = {(line["item"], line["number"]) for line in lines}
    for label, alternative in alternatives.alternatives.items():
        tried = {item_name: item for item_name, item in items.items() if item_name not in alternative.without}
        changed = {
            file_of(item_name): changed_item
            for item_name, item in tried.items()
            if (changed_item := altered(item, alternative))
        }
        made = predict_items(changed, (), lambda line, label=label: tell(f"{label}: {line}"))  # type: ignore[misc]
        for file, parts in made.items():
            checked = [claim for number in sorted(parts) for claim in parts[number].claims]
            for number, checked_claim in zip(_numbers(items[file.stem]), checked, strict=True):
                if (file.stem, str(number)) in compared:
                    values = (
                        file.stem,
                        str(number),
                        checked_claim.claim.says,
                        checked_claim.paper,
                        label,
                        checked_claim.ours,
                        checked_claim.verdict,
                    )
                    lines.append(dict(zip(_COLUMNS, values, strict=True)))
    order = [SHIPPED, *alternatives.alternatives]
    lines.sort(key=lambda line: (line["item"], int(line["number"]), order.index(line["alternative"])))
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    files = {
        folder / f"{name}{ENDING}": text.getvalue(),
        folder / f"{name}-alternatives.md": _page(name, alternatives, lines),
    }
    for file, content in files.items():
        write_whole(file, content)
    return list(files)


def summary(folder: Path) -> list[str]:
    """Markdown lines for the page of all claims: what each alternative in ``folder`` explains, paper by paper."""
    lines = []
    for file in sorted(folder.glob(f"*{ENDING}")):
        name = file.name.removesuffix(ENDING)
        with file.open(newline="") as stored:
            rows = list(csv.DictReader(stored))
        lines += [
            f"[{name}]({name}-alternatives.md), claims reproduced:",
            "",
            _totals(read_alternatives(name), rows),
            "",
        ]
    words = "An alternative changes all simulated items of a paper alike; *there*: where figures chose its values."
    begin = ["## One set of assumptions for all items of a paper", "", words, ""]
    return [*begin, *lines, "## Claims", ""] if lines else []


def explained(folder: Path) -> dict[tuple[str, str], str]:
    """Item and line in NAME-claims.csv of a claim that differs -> which alternatives in ``folder`` reproduce it."""
    notes: dict[tuple[str, str], str] = {}
    for file in sorted(folder.glob(f"*{ENDING}")):
        with file.open(newline="") as stored:
            claims = _by_claim(csv.DictReader(stored))
        for claim, lines in claims.items():
            if not _holds(lines.pop(SHIPPED)):
                labels = ", ".join(label for label, line in lines.items() if _holds(line))
                notes[claim] = f"; reproduced under {labels}" if labels else "; under no alternative"
    return notes


def _by_claim(lines: Iterable[Line]) -> dict[tuple[str, str], dict[str, Line]]:
    """Item and number -> alternative -> line."""
    claims: dict[tuple[str, str], dict[str, Line]] = {}
    for line in lines:
        claims.setdefault((line["item"], line["number"]), {})[line["alternative"]] = line
    return claims


def _numbers(item: Item) -> list[int]:
    """The lines of NAME-claims.csv, from 1, that have the claims of parts that can be altered."""
    of_parts = [part for part in item.parts for _ in part.claims]
    return [number for number, part in enumerate(of_parts, 1) if can_be_altered(part)]


def _shipped(name: str, item: Item, folder: Path) -> list[Line]:
    claims = claims_in(folder / f"{name}-claims.csv") or []
    return [
        {
            "item": name,
            "number": str(number),
            "alternative": SHIPPED,
            **{key: claim[key] for key in _COLUMNS if key in claim},
        }
        for number in _numbers(item)
        if number <= len(claims) and (claim := claims[number - 1])["verdict"] != "not compared"
    ]


def _holds(line: Line) -> bool:
    return line["verdict"].startswith("reproduced")


def _totals(alternatives: Alternatives, lines: Sequence[Line]) -> str:
    table = []
    for label in (SHIPPED, *alternatives.alternatives):
        fitted = alternatives.alternatives[label].fitted if label != SHIPPED else []
        mine = [line for line in lines if line["alternative"] == label]
        cells = []
        for among in (
            [line for line in mine if line["item"] in fitted],
            [line for line in mine if line["item"] not in fitted],
        ):
            cells.append(f"{sum(map(_holds, among))} of {len(among)}" if among else "–")
        table.append((label, ", ".join(fitted) or "–", *cells, f"{sum(map(_holds, mine))} of {len(mine)}"))
    headings = ("alternative", "fitted on", "there", "in the other items", "in all")
    return tabulate(table, headings, "github", disable_numparse=True)


def _page(name: str, alternatives: Alternatives, lines: Sequence[Line]) -> str:
    claims = _by_claim(lines)
    labels = [SHIPPED, *alternatives.alternatives]
    table = []
    for (item, _), by_label in claims.items():
        first = next(iter(by_label.values()))
        cells = [f"{line['ours']} ({line['verdict']})" if (line := by_label.get(label)) else "–" for label in labels]
        table.append((f"[{item}]({item}.md)", first["claim"], first["paper"], *cells))
    never = [labelled for labelled in claims.values() if not any(map(_holds, labelled.values()))]
    always = sum(all(map(_holds, labelled.values())) for labelled in claims.values())
    several = len(claims) - len(never) - always
    counted = f"{always} are reproduced under every assumption, {several} under some, and {len(never)} under none"
    return "\n".join(
        [
            f"# Alternatives of {' and '.join(alternatives.papers)}",
            "",
            f"Again: `auto3d paper --alternatives {name}`. Each alternative changes all simulated parts of the paper's",
            "items alike. The figures of the items that it is fitted on chose its values; the other items test them.",
            "They are what-ifs: none is measured, unless its text says so.",
            "",
            *(f"- *{label}*: {alternative.text.strip()}" for label, alternative in alternatives.alternatives.items()),
            "",
            _totals(alternatives, lines),
            "",
            *([alternatives.text.strip(), ""] if alternatives.text else []),
            f"Of {len(claims)} claims, {counted}{':' if never else '.'}",
            "",
            *(
                f"- {first['item']}: {first['claim']}"
                for first in (next(iter(labelled.values())) for labelled in never)
            ),
            *([""] if never else []),
            "## All claims",
            "",
            tabulate(table, ("item", "claim", "paper", *labels), "github", disable_numparse=True),
            "",
        ]
    )
