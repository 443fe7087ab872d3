"""Layers that are alike are derived once: the work beside bookkeeping does not grow with their number."""

from collections import Counter
from functools import partial, wraps

import pytest

from auto3d.capture import alike, operation_cost
from auto3d.capture.model import capture
from auto3d.derived.planned_split import planned_split
from auto3d.derived.shards import tensor_parallel
from auto3d.derived.slices import sliced
from auto3d.share import Share
from auto3d.tensor import derive, operations, ways
from tests.models import TEXT, gpt2, llama

COUNTED = {
    "rules": (operations, "rule_of"),
    "ways": (ways._Ways, "_ways_of"),
    "wanted splits": (ways._Wanted, "_of_operation"),
    "options": (derive._Search, "_options_of"),
    "transitions": (derive._Search, "_transitions_of"),
    "steps of the search": (derive._Search, "_step"),
    "operators that run": (alike, "_result"),
    "operators whose cost is measured": (operation_cost, "_cost"),
}
MODELS = {
    "gpt2": lambda layers: gpt2(n_layer=layers),
    "llama": lambda layers: llama(num_hidden_layers=layers),
}


@pytest.fixture
def counts(monkeypatch):
    found = Counter()

    def counted(name, function):
        @wraps(function)
        def call(*args, **kwargs):
            found[name] += 1
            return function(*args, **kwargs)

        return call

    for name, (owner, attribute) in COUNTED.items():
        monkeypatch.setattr(owner, attribute, counted(name, getattr(owner, attribute)))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_more_layers_take_no_more_work(counts, name):
    found = []
    for layers in (3, 5):
        captured = capture(partial(MODELS[name], layers), TEXT.input_specs(), 2)
        counts.clear()
        tensor_parallel(captured, Share(tp=2), split=planned_split(captured, Share(tp=2), rules={}))
        sliced(captured, 2)
        found.append(dict(counts))
    assert found[0] == found[1]
    assert found[0].keys() == COUNTED.keys()
