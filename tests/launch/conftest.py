"""Recipes to try commands on, and the command line run in this process, which saves the seconds of its imports."""

import signal
import sys

import pytest

from launch import main as command
from launch.slurm.executor import why_no_slurm

GPT2 = """
model:
  architecture: GPT2LMHeadModel
  config: {n_layer: 2, n_head: 2, n_embd: 32, n_positions: 32, vocab_size: 256, bos_token_id: 0, eos_token_id: 0}
data: {sequence_length: 32}
training: {global_batch: 8, iterations: 2, check_capture: false}
launch: {executor: local}
plan: {dp: 1, pp: 2, micro_batch_size: 2}
"""

OWN = """
model: {factory: 'mine:make'}
data: {source: synthetic, inputs: {x: {kind: normal, shape: [8]}, y: {kind: integers, high: 3}}}
training: {global_batch: 8, iterations: 2, check_capture: false}
search: {dp: [1], tp: [1], pp: [2], micro_batch_size: [2, 4], schedule: [1f1b], allow_idle_devices: true}
launch: {executor: local}
plan: {pp: 2, micro_batch_size: 4}
"""

MINE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(8, width), nn.Linear(width, 3)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.b(torch.relu(self.a(x))), y)

def make(width=16):
    print("a line of the user's own")
    return Net(width)
"""


def write_recipes(folder) -> None:
    (folder / "small.yaml").write_text(GPT2)
    (folder / "own.yaml").write_text(OWN)
    (folder / "mine.py").write_text(MINE)


@pytest.fixture
def own_modules(tmp_path):
    """Forgets what was imported from this test's folder: it is not another's, nor that of a fixture's."""
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path.parent)):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path, monkeypatch, own_modules):
    monkeypatch.chdir(tmp_path)
    write_recipes(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def one_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("same")


@pytest.fixture
def same_folder(one_folder, tmp_path, monkeypatch, own_modules):
    """As ``folder``, the same in each test: the cache knows a user's model by its folder, so it has its capture."""
    for left in one_folder.iterdir():  # by the test before
        left.rename(tmp_path / left.name)
    monkeypatch.chdir(one_folder)
    write_recipes(one_folder)
    return one_folder


@pytest.fixture
def no_slurm(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))  # a folder without sinfo
    why_no_slurm.cache_clear()
    yield
    why_no_slurm.cache_clear()


@pytest.fixture
def auto3d(monkeypatch, capsys, own_modules):
    """Runs a command here and gives what it printed: ``out`` and ``err``."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(sys, "path", sys.path.copy())

    def run(*arguments: str, code: int = 0):
        monkeypatch.setattr(sys, "argv", ["auto3d", *arguments])
        with pytest.raises(SystemExit) as caught:
            command.main()
        printed = capsys.readouterr()
        assert caught.value.code == code, f"{printed.out}\n{printed.err}"
        return printed

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
