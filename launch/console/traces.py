"""The traces of a training's ranks: merged into one file, and compared with the prediction in a table."""

import gzip
import json
from collections.abc import Callable, Sequence

from tabulate import tabulate

from auto3d.plan import Plan
from auto3d.runtime.watch.merged_trace import ComparedOperations, compared, merged
from auto3d.runtime.watch.of_rank import TracedIteration
from auto3d.runtime.watch.rank_trace import RankTrace
from auto3d.simulate.cells import WORDS
from launch.model.predictions import predicted_timeline
from launch.recipe.load import LoadedRecipe


def merge(recipe: LoadedRecipe, plan: Plan, traced: TracedIteration, tell: Callable[[str], None]) -> None:
    """Write the traces of all ranks, and the simulated timeline of ``plan``, into one file beside their folder.

    ``tell`` gets the file and a table of predicted and measured times, by stage and kind of operation.
    """
    ranks = [RankTrace.read(file) for file in traced.files]
    timeline, based_on = predicted_timeline(recipe, plan)
    folder = traced.files[0].parent
    file = folder.with_name(f"{folder.name}.json.gz")
    with gzip.open(file, "wt", compresslevel=4) as stream:
        json.dump(merged(ranks, timeline, tp=plan.tp), stream)
    tell(f"iteration {traced.iteration} is traced in {file}; open it in ui.perfetto.dev")
    tell(comparison(compared(ranks, timeline)))
    tell(f"predicted by {based_on}" if timeline is not None else f"nothing is predicted: {based_on}")


def comparison(rows: Sequence[ComparedOperations]) -> str:
    """The table of predicted and measured times."""
    cells = [
        [
            row.stage,
            WORDS[row.kind],
            row.count,
            None if row.predicted_s is None else 1e3 * row.predicted_s,
            1e3 * row.measured_s,
            row.ratio,
        ]
        for row in rows
    ]
    headings = ["stage", "operation", "count", "predicted ms", "measured ms", "ratio"]
    return tabulate(cells, headers=headings, floatfmt=".3f", missingval="-")
