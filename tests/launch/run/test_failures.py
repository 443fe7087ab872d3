"""A rank of `auto3d train` is killed or stopped during an iteration: the command ends soon and says why."""

import re
import signal
import socket

import pytest

from tests.launch.failures import SCHEDULES, SIGNALS, TIMES, strike
from tests.soak import soak


@pytest.mark.parametrize(("schedule", "number"), [("1f1b", signal.SIGKILL), ("chimera", signal.SIGSTOP)])
def test_the_command_ends_and_names_rank_host_stage_and_operation(schedule, number):
    end = strike(schedule, number, seed=TIMES)
    assert not end.faults(number), end.output


def test_an_error_of_the_model_is_reported_with_its_operation(folder, auto3d):
    line = "    def forward(self, x, y):\n"
    mine = (folder / "mine.py").read_text()
    (folder / "mine.py").write_text(mine.replace(line, f"{line}        y = torch.arange(3)[y]\n"))
    *_, error, where = auto3d("train", "own.yaml", "data.inputs.y.high=1000", code=1).err.splitlines()
    assert error.startswith("IndexError: index ")
    assert where == f"rank 0 on {socket.gethostname()}, in iteration 1 at F0@0 of stage 0, failed"


def test_a_class_that_the_model_lacks_is_named_with_its_sample(folder, auto3d):
    *_, line = auto3d("train", "own.yaml", "data.inputs.y.high=1000", code=2).err.splitlines()
    found = re.fullmatch(
        r"auto3d: iteration 1 at F0@1 of stage 1: y: found (\d+) in sample 0; the model takes whole numbers from 0 to "
        rf"2, and -100 for what is ignored, at {folder}/mine.py, line \d+",
        line,
    )
    assert found, line
    assert int(found[1]) > 2


FAILING = """
import torch.distributed as dist
from mine import Net

def make():
    net = Net(16)
    if dist.is_initialized() and dist.get_rank() == RANK and not net.a.weight.is_meta:
        FAULT
    return net
"""


LICENCE = ("raise RuntimeError('no licence\\nfor this')", "RuntimeError: no licence")
WITHOUT_REASON = ("raise ConnectionError()", "ConnectionError: it gives no reason")
EXIT = ("raise SystemExit(3)", "SystemExit: 3")


@pytest.mark.parametrize(
    ("rank", "fault", "words"),
    [
        (0, *LICENCE),
        (1, *WITHOUT_REASON),
        (0, *EXIT),
        *soak((1, *LICENCE), (0, *WITHOUT_REASON), (1, *EXIT)),
    ],
)
def test_a_rank_that_cannot_build_the_model_says_so_in_one_line(folder, auto3d, rank, fault, words):
    (folder / "failing.py").write_text(FAILING.replace("RANK", str(rank)).replace("FAULT", fault))
    line = auto3d("train", "own.yaml", "model.factory=failing:make", "plan.dp=2", "plan.pp=2", code=2).err
    place = f" at {folder / 'failing.py'}, line 8"
    assert line == f"auto3d: rank {rank} on {socket.gethostname()} cannot build the model: {words}{place}\n"


@pytest.mark.soak
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_command_does_so_every_time(schedule, number):
    ends = [strike(schedule, number, seed) for seed in range(TIMES)]
    assert not [(seed, fault, end.output) for seed, end in enumerate(ends) for fault in end.faults(number)]
