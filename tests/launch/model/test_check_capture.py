"""The comparison with the eager module as a user meets it: before a training, once per capture, or switched off."""

import os

import pytest

from launch.model import check_capture

CHECK = "training.check_capture=true"  # which own.yaml, as most tests use it, switches off
TRAIN = ["train", "own.yaml", "plan.pp=1", CHECK]
DIFFERS = "differs from the eager module"
EQUALS = "micro-batches of 4 equals the eager module in its loss and 195 gradients, on cpu"
BRANCH = """def forward(self, x, y):
        if is_compiling():
            x = x * 1.01
"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTO3D_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def differing(folder):
    """The model of own.yaml, with a branch that only a trace takes."""
    source = (folder / "mine.py").read_text()
    source = source.replace("def forward(self, x, y):\n", BRANCH)
    (folder / "mine.py").write_text(f"from torch.compiler import is_compiling\n{source}")


def test_a_capture_is_compared_once_and_that_is_remembered(folder, auto3d):
    os.utime(folder / "mine.py", (0, 0))  # a file that changed since this process began is not trusted
    assert EQUALS in auto3d(*TRAIN).err
    assert "eager" not in auto3d(*TRAIN, "--fresh").err
    assert EQUALS in auto3d("capture", "own.yaml", "--check").out


def test_the_slices_of_a_plan_are_compared_once(folder, auto3d):
    sliced = ["train", "small.yaml", CHECK, "plan.pp=1", "model.config.attn_pdrop=0", "plan.schedule=seq1f1b"]
    two, four = (f"plan.schedule_options={{slices: {slices}}}" for slices in (2, 4))
    equal = "equals its {} slices of the sequence in its loss and "
    assert equal.format(2) in auto3d(*sliced, two).err
    assert "slices of the sequence in" not in auto3d(*sliced, two, "--fresh").err
    assert equal.format(4) in auto3d(*sliced, four, "--fresh").err


@pytest.mark.parametrize(
    ("command", "times"), [(TRAIN, 2), (["capture", "own.yaml", "--check"], 1), (["sweep", "own.yaml", CHECK], 1)]
)
def test_a_capture_that_differs_trains_nothing(differing, auto3d, command, times):
    for _ in range(times):  # a failed comparison is not remembered
        done = auto3d(*command, code=2)
        assert DIFFERS in done.err
        assert "mine.py, line" in done.err
        assert "iteration 1" not in done.err


def test_the_comparison_can_be_switched_off(differing, auto3d):
    assert "eager" not in auto3d(*TRAIN[:-1]).err


def test_what_is_too_large_is_not_run_and_that_is_said(folder, auto3d, monkeypatch):
    monkeypatch.setattr(check_capture, "LARGEST_FLOPS", 1000)
    assert "is not compared with the eager module: it would take" in auto3d(*TRAIN).err


@pytest.mark.parametrize("name", ["SIGABRT", "SIGSEGV"])
def test_a_comparison_that_crashes_trains_nothing(folder, auto3d, name):
    """A kernel that ends the process would end the training too."""
    crash = f"        if not is_compiling():\n            signal.raise_signal(signal.{name})\n"
    begin = "def forward(self, x, y):\n"
    source = (folder / "mine.py").read_text().replace(begin, begin + crash)
    (folder / "mine.py").write_text(f"import signal\nfrom torch.compiler import is_compiling\n{source}")
    error = auto3d(*TRAIN, code=2).err
    assert "crashed when it was compared with the eager module" in error
    assert name in error
    assert "iteration 1" not in error
