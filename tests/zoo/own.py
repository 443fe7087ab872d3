"""Entries of modules that a user writes."""

from tests.zoo import own_code, own_sequences, own_vision
from tests.zoo.entry import Entry

COLLECTIONS = [*own_sequences.COLLECTIONS, *own_vision.COLLECTIONS, *own_code.COLLECTIONS]
ENTRIES: list[Entry] = [entry for collection in COLLECTIONS for entry in collection.entries]
