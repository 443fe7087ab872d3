"""An item -> its rows and checked claims."""

from functools import partial
from pathlib import Path

from launch.papers.claims import check
from launch.papers.item import Item
from launch.papers.rows import RowMaker
from launch.papers.write import MadePart
from launch.store.watcher import Watcher


def make_item(name: str, item: Item, file: Path, watcher: Watcher) -> list[MadePart]:
    """Make all parts of ``item``, which ``file`` declares; progress goes to ``watcher``."""
    maker = RowMaker(name, file, watcher)
    made = []
    for part in item.parts:
        rows = maker.rows(part)
        claims = [check(part, claim, rows, partial(maker.row, part)) for claim in part.claims]
        made.append(MadePart(part=part, rows=rows, claims=claims))
    return made
