"""Entries of modules that a user writes."""

from tests.zoo.entry import Entry

ENTRIES: list[Entry] = []
