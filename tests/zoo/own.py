"""Entries of modules that a user writes."""

from tests.zoo.entry import Entry
from tests.zoo.own_gradients import gradients
from tests.zoo.own_sequences import attention, recurrent
from tests.zoo.own_state import state
from tests.zoo.own_structure import structure
from tests.zoo.own_tensors import tensors
from tests.zoo.own_vision import convolutions, generative

COLLECTIONS = (recurrent, attention, convolutions, generative, gradients, state, tensors, structure)
ENTRIES: list[Entry] = [entry for collection in COLLECTIONS for entry in collection.entries]
