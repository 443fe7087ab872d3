"""An item -> its rows and checked claims."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from launch.drivers.sweep import Retry
from launch.papers.claims import check
from launch.papers.item import Item, Part
from launch.papers.rows import RowMaker
from launch.papers.write import MadePart
from launch.store.trials import Command
from launch.store.watcher import Watcher


def make_item(
    name: str,
    item: Item,
    file: Path,
    watcher: Watcher,
    overrides: Sequence[str] = (),
    ready: Mapping[int, MadePart] | None = None,
) -> list[MadePart]:
    """Make all parts of ``item``, which ``file`` declares, under ``overrides``; progress goes to ``watcher``.

    ``ready`` has the parts that were made before, by their numbers.
    """
    maker, before = RowMaker(name, file, watcher, overrides), ready or {}
    return [before.get(number) or made_part(maker, part) for number, part in enumerate(item.parts)]


def made_part(maker: RowMaker, part: Part) -> MadePart:
    """The rows of ``part`` with its claims checked."""
    rows = maker.rows(part)
    claims = [check(part, claim, rows, partial(maker.row, part)) for claim in part.claims]
    return MadePart(part=part, rows=rows, claims=claims)


def measure_item(maker: RowMaker, item: Item, command: Command, *, retry: Retry, follow: bool) -> list[MadePart]:
    """Make ``item``, whose parts are all predicted, and measure the plans that are the fastest by prediction.

    The trials of all rows are one sweep. Without ``follow``, jobs are only submitted, and nothing is made.
    ``command`` is what `auto3d resume` shall run.
    """
    measured = maker.measured(item.parts, command, retry=retry, follow=follow)
    predicted = [made_part(maker, part) for part in item.parts] if follow else []
    return [
        replace(made, here=rows, claims_here=[check(made.part, claim, rows, None) for claim in made.part.claims])
        for made, rows in zip(predicted, measured, strict=follow)
    ]
