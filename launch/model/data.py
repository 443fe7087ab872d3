"""A recipe's data, opened and checked before a training reads it."""

import sys
from collections.abc import Callable
from dataclasses import replace

from auto3d.capture.graph import Graph
from auto3d.data import DataSettings
from auto3d.data.batches import order_of
from auto3d.data.fit import check_fit
from auto3d.data.opening import open_source
from auto3d.data.sources import ENDLESS, SOURCES
from launch.recipe.data import data_settings
from launch.recipe.load import LoadedRecipe
from launch.store.files import RUNS, private_folder

PREPARED = ".data"  # folder in runs/ of data that was read once


def training_data(
    recipe: LoadedRecipe, graph: Graph | None = None, tell: Callable[[str], None] = lambda line: None
) -> DataSettings:
    """The recipe's data, for ranks that are forked afterwards; ``tell`` receives lines for the log.

    Tables are tokenised and written to files here, unless that is done, or while another process does it. Raises
    InputError for data that is missing, damaged, less than a global batch, or not as the inputs or ``graph`` need it.
    """
    values = recipe.values
    data = data_settings(values)
    if values.training.compute == "emulated":  # nothing reads it
        return data
    if data.source not in SOURCES:
        sys.path[:0] = [folder for folder in recipe.code_folders if folder not in sys.path]
    elif data.source not in ENDLESS:
        folder = private_folder(RUNS / PREPARED).resolve()
        data = replace(data, cache=folder, wait_s=values.training.timeout_s)
    source = open_source(data)
    order = order_of(data, source, seed=values.training.seed, global_batch=values.training.global_batch)
    if order is not None:
        for name in data.columns:
            source.column(0, name)  # a function's column is checked when it is read
        tell(f"data: {'; '.join(filter(None, (source.describe(), order.describe())))}")
    if graph is not None:
        check_fit(graph, data, source)
    return data


def check_data_fits(data: DataSettings, graph: Graph, *, emulated: bool) -> None:
    """Raise InputError if ``data``, which ``training_data`` has opened before, does not fit the model of ``graph``."""
    if not emulated and data.source in SOURCES:
        check_fit(graph, data, open_source(data))
