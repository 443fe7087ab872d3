"""The real Exchange, Executor and GradientSync on simulated devices: all programs end, with the right numbers."""

import pytest

from auto3d.schedule import build_schedule
from tests.streams.machine import DeadlockError
from tests.streams.simulation import Case, simulate


def test_many_queues_and_no_synchronisation():
    simulate(Case(schedule=build_schedule("1f1b", devices=2, micro_batches=4), queues=32))


@pytest.mark.parametrize("circumstance", [{"queues": 1}, {"queues": 32, "synchronise": "steps"}], ids=str)
def test_the_simulator_finds_receives_that_are_posted_too_early(circumstance):
    case = Case(schedule=build_schedule("1f1b", devices=2, micro_batches=4), **circumstance)
    with pytest.raises(DeadlockError, match=r"gradients for B0@0 from stage 1 \(rank 1\) .*spins"):
        simulate(case)
