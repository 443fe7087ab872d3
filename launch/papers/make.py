"""An item -> its rows and checked claims."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from launch.drivers.sweep import Retry
from launch.papers.claims import check
from launch.papers.item import Item
from launch.papers.rows import RowMaker
from launch.papers.write import MadePart
from launch.store.trials import Command
from launch.store.watcher import Watcher


def make_item(name: str, item: Item, file: Path, watcher: Watcher, overrides: Sequence[str] = ()) -> list[MadePart]:
    """Make all parts of ``item``, which ``file`` declares, under ``overrides``; progress goes to ``watcher``."""
    return _made(RowMaker(name, file, watcher, overrides), item)


def _made(maker: RowMaker, item: Item) -> list[MadePart]:
    made = []
    for part in item.parts:
        rows = maker.rows(part)
        claims = [check(part, claim, rows, partial(maker.row, part)) for claim in part.claims]
        made.append(MadePart(part=part, rows=rows, claims=claims))
    return made


def measure_item(maker: RowMaker, item: Item, command: Command, *, retry: Retry, follow: bool) -> list[MadePart]:
    """Make ``item``, whose parts are all predicted, and measure the plans that are the fastest by prediction.

    The trials of all rows are those of one sweep. Without ``follow``, jobs are only submitted, and nothing is made.
    ``command`` is what `auto3d resume` shall run.
    """
    measured = maker.measured(item.parts, command, retry=retry, follow=follow)
    return [
        replace(made, here=rows, claims_here=[check(made.part, claim, rows, None) for claim in made.part.claims])
        for made, rows in zip(_made(maker, item) if follow else (), measured, strict=follow)
    ]
