"""`auto3d report`."""

from pathlib import Path

import click

from auto3d.errors import InputError
from auto3d.words import counted
from launch.commands.consoles import err
from launch.commands.options import OUTPUT_FILE, recipe_command
from launch.console.output import write_text
from launch.console.progress import search_progress
from launch.console.tables import TABLES
from launch.recipe.load import load
from launch.report.data import report_of
from launch.report.page import page_of
from launch.report.release import is_release, release_page


@recipe_command
@click.option("--output", "file", type=OUTPUT_FILE, help="Write to this file. [tables/RECIPE/report.html]")
def report(recipe: str, overrides: tuple[str, ...], file: str | None) -> int:
    """Write one HTML page about RECIPE's last sweep or tune, or about a search.

    The page has the table, predicted against measured times, timelines, memory over time, where the time goes, and the
    reasons of refused candidates. It needs no network, and no folder of this machine stands in it. Where nothing was
    measured, it shows the search of `auto3d plan`, and says so.

    For a folder with records of `make release` in place of RECIPE, such as results/release, it is the report of that
    release: the runs of each part, and the history of each figure beside its target.
    """
    if is_release(Path(recipe)):
        return _report_release(Path(recipe), overrides, file)
    loaded = load(recipe, overrides)
    with search_progress(err) as tell:
        made = report_of(loaded, tell)
    path = _write(page_of(made, [loaded.folder]), file, loaded.name)
    measured = sum(row.trials > 0 for row in made.rows)
    print(f"written: {path}, {counted(len(made.rows), 'plan')}, {measured} of them measured")
    for remark in made.remarks:
        print(remark)
    return 0


def _report_release(folder: Path, overrides: tuple[str, ...], file: str | None) -> int:
    if overrides:
        raise InputError(f"{overrides[0]}: the report of a release takes no keys of a recipe")
    print(f"written: {_write(release_page(folder), file, 'release')}")
    return 0


def _write(page: str, file: str | None, name: str) -> Path:
    """Write ``page`` to ``file``, or else to the folder of ``name`` in TABLES; returns where it is."""
    path = Path(file) if file else TABLES / name / "report.html"
    if not file:
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(str(path), page)
    return path
