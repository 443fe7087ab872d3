"""The zoo's driver reports right, refused, wrong, crashed and hung entries as such."""

import os
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from auto3d.errors import InputError
from tests.zoo.compare import run
from tests.zoo.drive import Finished, run_all
from tests.zoo.entry import FEATURES, Entry
from tests.zoo.outcome import FAULTS, Outcome, Result, failure, worst
from tests.zoo.report import report


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, label):
        return F.cross_entropy(self.head(torch.tanh(self.first(x))), label)


class Branch(Net):
    def forward(self, x, label):
        kept = x[x > 0]  # its size depends on the data
        return super().forward(x, label) + kept.mean()


class Exit(Net):
    def __init__(self):
        super().__init__()
        os._exit(3)


class Hang(Net):
    def __init__(self):
        super().__init__()
        time.sleep(100)


class Ill(Net):
    def forward(self, x, label):
        return super().forward(x, label) + self.nowhere


def outcome_of(build, *, timeout_s=60.0, **facts) -> Outcome:
    entry = Entry(name=build.__name__, family="", build=build, inputs=FEATURES, **facts)
    (finished,) = run_all([entry], jobs=1, timeout_s=timeout_s)
    assert finished.entry is entry
    return finished.outcome


def test_right():
    assert outcome_of(Net) == Outcome(Result.RIGHT)


def test_refused():
    outcome = outcome_of(Branch)
    assert outcome.result in (Result.REFUSED, Result.UNCLEAR)
    assert "test_zoo.py, line" in outcome.reason


def test_what_must_be_refused_is_not_right():
    entry = Entry(name="Net", family="", build=Net, inputs=FEATURES, only_refused="for this test")
    right, refused = Outcome(Result.RIGHT), Outcome(Result.REFUSED, "a reason")
    assert worst([right, right], entry).result is Result.WRONG
    assert worst([refused], entry) == refused


def test_the_worst_plan_decides():
    entry = Entry(name="Net", family="", build=Net, inputs=FEATURES)
    wrong = Outcome(Result.WRONG, "pp 2: a loss")
    assert worst([Outcome(Result.RIGHT), wrong], entry) == wrong
    assert worst([wrong, Outcome(Result.WRONG, "dp 2 · pp 2: a loss")], entry) == Outcome(Result.WRONG, "a loss")


def test_wrong_where_the_reference_has_other_weights():
    def spoil(module):
        with torch.no_grad():
            module.first.weight[0, 0] += 1e-3

    entry = Entry(name="Net", family="", build=Net, inputs=FEATURES)
    (finished,) = run_all([entry], jobs=1, task=partial(run, timeout_s=60.0, spoil=spoil))
    assert finished.outcome.result is Result.WRONG
    assert "first: " in finished.outcome.reason


def test_wrong_where_only_one_gradient_differs():
    def spoil(module):
        module.head.bias.register_hook(lambda gradient: gradient * 1.001)

    entry = Entry(name="Net", family="", build=Net, inputs=FEATURES)
    (finished,) = run_all([entry], jobs=1, task=partial(run, timeout_s=60.0, spoil=spoil))
    assert finished.outcome.result is Result.WRONG
    assert "gradient of head.bias" in finished.outcome.reason


def test_crashed():
    outcome = outcome_of(Exit)
    assert outcome.result is Result.CRASHED
    assert "exit code 3" in outcome.reason


def test_hung():
    start = time.monotonic()
    assert outcome_of(Hang, timeout_s=3.0).result is Result.HUNG
    assert time.monotonic() - start < 20


def test_broken_where_plain_pytorch_fails_too():
    assert outcome_of(Ill).result is Result.BROKEN


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("model: it branches on its data at net.py, line 3; use torch.where there", Result.REFUSED),
        ("Could not guard on data-dependent expression Eq(u0, 1) at net.py, line 3", Result.UNCLEAR),
        ("it fails. Please file an issue", Result.UNCLEAR),
        ("one line\nand another", Result.UNCLEAR),
        ("aten::histogram has no meta kernel", Result.UNCLEAR),
        ("at /usr/lib/python3/site-packages/torch/nn/functional.py, line 3", Result.UNCLEAR),
    ],
)
def test_a_refusal_in_the_words_of_torch_is_unclear(text, result):
    assert failure(InputError(text)).result is result


def test_report_counts_and_lists_all():
    entry = Entry(name="Net", family="nets", build=Net, inputs=FEATURES)
    text = report([Finished(entry, Outcome(result, "a | b"), 1.0) for result in (Result.RIGHT, *FAULTS)])
    assert "| nets " in text
    assert text.count("| Net ") == 1 + len(FAULTS)
    assert "a \\| b" in text
