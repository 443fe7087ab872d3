"""One rank of `auto3d train` is killed or stopped in the middle of an iteration: the command ends soon and says why."""

import signal

import pytest

from tests.launch.failures import SCHEDULES, SIGNALS, TIMES, strike


@pytest.mark.parametrize(("schedule", "number"), [("1f1b", signal.SIGKILL), ("chimera", signal.SIGSTOP)])
def test_the_command_ends_and_names_rank_host_stage_and_operation(schedule, number):
    end = strike(schedule, number, seed=TIMES)
    assert not end.faults(number), end.output


@pytest.mark.soak
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_does_so_every_time(schedule, number):
    ends = [strike(schedule, number, seed) for seed in range(TIMES)]
    assert not [(seed, fault, end.output) for seed, end in enumerate(ends) for fault in end.faults(number)]
