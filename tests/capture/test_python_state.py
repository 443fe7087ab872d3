"""State that a capture would freeze is refused with its line: counters, lists, Python's and numpy's draws, clocks."""

import itertools
import logging
import os
import random
import time
import uuid
from collections import OrderedDict
from random import random as draw
from time import perf_counter

import numpy as np
import pytest
import torch
from torch import nn

from auto3d.capture import faithful
from auto3d.capture.errors import CaptureError
from auto3d.capture.export import InputSpec
from auto3d.capture.model import capture
from tests.models import MODELS

ROWS = {"x": InputSpec(shape=(4,), dtype=torch.float32)}
COUNT, LOG = 0, []


class Layer(nn.Module):
    """A model that multiplies by ``scale()``; in each subclass, the refused line ends with ``# refused``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def scale(self, x: torch.Tensor) -> float:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.scale(x)).sum()


class Counter(Layer):
    steps = 0

    def scale(self, x):
        self.steps += 1  # refused
        return self.steps


class GlobalCounter(Layer):
    def scale(self, x):
        global COUNT
        COUNT += 1  # refused
        return COUNT


class ClassCounter(Layer):
    steps = 0

    def scale(self, x):
        ClassCounter.steps += 1  # refused
        return ClassCounter.steps


class DefaultCounter(Layer):
    def scale(self, x, seen=[]):  # noqa: B006
        seen.append(1)  # refused
        return len(seen)


class Schedule:
    def __init__(self) -> None:
        self.step = 0

    def next(self) -> int:
        self.step += 1  # refused
        return self.step


class Scheduled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.schedules = {"scale": [Schedule()]}

    def scale(self, x):
        return self.schedules["scale"][0].next()


class Iterates(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def scale(self, x):
        return next(self.numbers)  # refused


class Logs(Layer):
    def scale(self, x):
        LOG.append(1)  # refused
        return 1


class LayerDrop(Layer):
    def scale(self, x):
        return 0 if random.random() < 0.5 else 1  # refused


class ImportedDraw(Layer):
    def scale(self, x):
        return 0 if draw() < 0.5 else 1  # refused


class NumpyNoise(Layer):
    def scale(self, x):
        return float(np.random.rand())  # refused


class OwnGenerator(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(1)

    def scale(self, x):
        return float(self.random.normal())  # refused


class OwnRandom(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(1)

    def scale(self, x):
        return self.random.random()  # refused


class Remembers(Layer):
    before = None

    def scale(self, x):
        scale = 1 if self.before is None else self.before
        self.before = x.detach()  # refused
        return scale


class FirstTime(Layer):
    done = False

    def scale(self, x):
        if not self.done:
            self.done = True  # refused
            return 2
        return 1


class Clock(Layer):
    def scale(self, x):
        return time.time()  # refused


class ImportedClock(Layer):
    def scale(self, x):
        return perf_counter()  # refused


class Entropy(Layer):
    def scale(self, x):
        return uuid.uuid4().int % 7  # refused


class EntropyInBranch(Layer):
    def scale(self, x):
        return 2 if os.urandom(1)[0] < 3 else 1  # refused


class EntropyInNames(Layer):
    """Draws names, all of which differ, and uses none of them as a number."""

    def scale(self, x):
        sizes = {f"axis {uuid.uuid4()}": size for size in (2, 3)}
        assert len(sizes) == 2
        return sum(sizes.values())


class Seeds(Layer):
    def scale(self, x):
        torch.manual_seed(1)  # refused
        return 1


class Fails(OrderedDict):
    """A mapping whose items cannot be read, as transformers' lists of all models where a package is missing."""

    def items(self):
        raise ValueError("could not find a package")

    __iter__ = __len__ = keys = values = items


FAILS = Fails()


class BesideWhatFails(Layer):
    """Its module has a global that cannot be read."""

    def scale(self, x):
        return 1 if type(FAILS) is Fails else 2


def test_containers_are_read_without_their_own_code():
    assert len(capture(BesideWhatFails, ROWS, 3).graph.nodes)


PLACE = "test_python_state.py, line"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Counter, ["attribute steps of Counter"]),
        (GlobalCounter, ["test_python_state.COUNT"]),
        (ClassCounter, ["ClassCounter.steps"]),
        (DefaultCounter, ["DefaultCounter.scale"]),
        (Scheduled, ["attribute schedules of Scheduled"]),
        (Iterates, ["attribute numbers of Iterates"]),
        (Logs, ["test_python_state.LOG"]),
        (LayerDrop, ["Python's random state"]),
        (ImportedDraw, ["Python's random state"]),
        (NumpyNoise, ["numpy's random state"]),
        (OwnGenerator, ["attribute random of OwnGenerator"]),
        (OwnRandom, ["attribute random of OwnRandom"]),
        (Remembers, ["attribute before of Remembers"]),
        (FirstTime, ["attribute done of FirstTime"]),
        (Clock, ["reads a clock"]),
        (ImportedClock, ["reads a clock"]),
        (Entropy, ["random bytes"]),
        (EntropyInBranch, ["random bytes"]),
        (Seeds, ["torch's random seed"]),
    ],
)
def test_state_that_changes_between_forwards_is_refused_with_its_line(model, words):
    with pytest.raises(CaptureError) as caught:
        capture(model, ROWS, 3)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in [*words, PLACE])
    number = int(message.split(PLACE)[1].split(":")[0].split(",")[0])
    with open(__file__) as source:
        line = source.read().splitlines()[number - 1]
    assert line.endswith("# refused")


class CachesSize(Layer):
    size = None

    def scale(self, x):
        if self.size is None:
            self.size = x.shape[-1]
        return 1 / self.size


class ShowsOutput(Layer):
    def scale(self, x):
        self.shown = x * 2
        return self.shown


class SeedsPython(Layer):
    def scale(self, x):
        random.seed(1)
        return random.random()


class Warns(Layer):
    def scale(self, x):
        logging.getLogger(__name__).warning("scaled")
        return 1


@pytest.mark.parametrize("model", [CachesSize, ShowsOutput, SeedsPython, Warns, EntropyInNames])
def test_what_every_forward_does_alike_is_captured(model):
    assert capture(model, ROWS, 3).graph.trained == {"layer.weight", "layer.bias"}


@pytest.mark.parametrize("model", ["gpt2-dropout", "bert", "t5", "llama", "averaging", "residual"])
def test_ordinary_models_change_no_state_so_that_one_trace_is_enough(model, monkeypatch):
    def second_trace(*_: object) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr(faithful, "_check_repeats", second_trace)
    build, data = MODELS[model]
    capture(build, data.input_specs(), 2)
