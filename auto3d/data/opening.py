"""Open the source of a DataKeys."""

from importlib import import_module

from auto3d.data.interface import Source
from auto3d.data.keys import DataKeys
from auto3d.data.sources import SOURCES, TABLES, own


def open_source(settings: DataKeys, seed: int | None = None) -> Source:
    """The samples of ``settings``; what code of the user's draws follows from ``seed``, if given.

    A table is read once and kept as files, for which this waits, whichever process does it; a file of tokens is
    checked once. Raises DataError for data that is missing, damaged or not as the inputs need it.
    """
    if settings.source not in SOURCES:
        return own.open_source(settings, seed)
    module = "auto3d.data.prepared" if settings.source in TABLES else f"auto3d.data.sources.{settings.source}"
    source: Source = import_module(module).open_source(settings)
    return source
