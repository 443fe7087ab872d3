"""Entries of modules written as users write them."""

from tests.zoo.custom_gradients import gradients
from tests.zoo.custom_sequences import attention, recurrent
from tests.zoo.custom_state import state
from tests.zoo.custom_structure import structure
from tests.zoo.custom_tensors import tensors
from tests.zoo.custom_vision import convolutions, generative
from tests.zoo.entry import Entry

COLLECTIONS = (recurrent, attention, convolutions, generative, gradients, state, tensors, structure)
ENTRIES: list[Entry] = [entry for collection in COLLECTIONS for entry in collection.entries]
