"""Open the source of a DataSettings."""

from importlib import import_module
from typing import TYPE_CHECKING

from auto3d.data.interface import Source
from auto3d.data.sources import SOURCES, TABLES

if TYPE_CHECKING:
    from auto3d.data.settings import DataSettings


def open_source(settings: "DataSettings") -> Source:
    """The samples of ``settings``.

    A table is read once and kept as files, for which this waits, whichever process does it; a file of tokens is
    checked once. Raises DataError for data that is missing, damaged or not as the inputs need it.
    """
    if settings.source in TABLES:
        module = "auto3d.data.prepared"
    elif settings.source not in SOURCES:
        module = "auto3d.data.sources.own"
    else:
        module = f"auto3d.data.sources.{settings.source}"
    source: Source = import_module(module).open_source(settings)
    return source
