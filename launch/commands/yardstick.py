"""`auto3d yardstick`."""

from pathlib import Path

import click

from auto3d.errors import InputError
from launch.commands.consoles import note
from launch.model.certainty import FILE
from launch.model.measured_layers import published
from launch.yardstick.certainty import known_errors_of, write_errors
from launch.yardstick.pages import write_pages
from launch.yardstick.program import program
from launch.yardstick.results import TRACES, predictors, replay_trace, score_set
from launch.yardstick.sets import SETS
from launch.yardstick.table import LEGEND, table


@click.command()
@click.option("--set", "sets", multiple=True, metavar="NAME", help="Only this set; may be repeated. [all]")
@click.option("--predictor", "names", multiple=True, metavar="NAME", help="Only this predictor; may be repeated. [all]")
@click.option("--program", "programs", multiple=True, metavar="CMD", help="Also score this program; may be repeated.")
@click.option(
    "--timeout", "limit_s", type=click.FloatRange(min=0, min_open=True), default=600.0, show_default=True,
    help="Seconds that a program may take for a set.",
)  # fmt: skip
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write README.md and pictures here; with all sets, also the errors that plans take for their intervals.",
)
@click.option("--list", "listing", is_flag=True, help="List sets and predictors; score none.")
def yardstick(
    sets: tuple[str, ...],
    names: tuple[str, ...],
    programs: tuple[str, ...],
    limit_s: float,
    out: Path | None,
    listing: bool,
) -> int:
    """Score predictors of time and memory on published runs.

    The sets are published measurements of real trainings that come with the project. CMD is a program that reads runs
    as CSV and writes predictions as CSV; docs/yardstick.md describes both, and what a score means.
    """
    known = predictors()
    if listing:
        for name, measured in SETS.items():
            click.echo(f"set\t{name}\t{measured.title}: {measured.source}")
        for name in TRACES:
            click.echo(f"set\t{name}\ta traced training, for the simulator alone")
        for name, predictor in known.items():
            click.echo(f"predictor\t{name}\t{predictor.title}")
        return 0
    _check("--set", sets, [*SETS, *TRACES])
    _check("--predictor", names, list(known))
    chosen = [predictor for name, predictor in known.items() if not names or name in names]
    chosen += [program(command, limit_s=limit_s) for command in programs]
    scored = [score_set(SETS[name], chosen, note) for name in SETS if not sets or name in sets]
    traces = [replay_trace(name) for name in TRACES if not sets or name in sets]
    click.echo(table(scored, traces))
    click.echo(f"\n{LEGEND}")
    if out is not None:
        for file in write_pages(scored, traces, out):
            note(f"written: {file}")
        if not sets and (errors := [known_errors.errors for known_errors in known_errors_of(scored)]):
            write_errors(errors, file := published(FILE))
            note(f"written: {file}")
    return 0


def _check(option: str, given: tuple[str, ...], known: list[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InputError(f"{option}: {unknown[0]!r} is not known; there are {', '.join(known)}")
