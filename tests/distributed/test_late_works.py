"""Training is right even if waiting for a message returns at once, as with NCCL: nothing relies on such a wait."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from auto3d.runtime.process.world import World, join, leave
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.waiting import WaitTimeoutError, wait, waiting_up_to
from tests.distributed.grid import plan_of, sample, schedule_of
from tests.distributed.late_works import LateWork, late_works
from tests.distributed.parity import SGD, assert_parity, run_rank
from tests.distributed.test_grid import reference

SAMPLE = sample()[::24]


def run_late(world: World, *arguments: Any) -> dict:
    with late_works():
        return run_rank(world, *arguments)


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_parity_where_messages_and_sums_come_late(processes, cell):
    plan = plan_of(cell)
    ranks = processes.run(plan.ranks, run_late, cell.model, plan, SGD)
    assert_parity(ranks, reference(cell.model, plan.global_batch))


def test_the_sample_has_many_families():
    assert len({schedule_of(cell).name for cell in SAMPLE}) >= 6


def read_without_waiting(world: World) -> tuple[float, float]:
    """What the receiver has right after ``wait`` of the work, and after the runtime's own wait."""
    join(world, device=torch.device("cpu"), timeout_s=30)
    try:
        with late_works():
            tensor = torch.full((4,), 7.0 if world.rank == 0 else 0.0)
            work = dist.isend(tensor, 1) if world.rank == 0 else dist.irecv(tensor, 0)
            work.wait()
            at_once = tensor[0].item()
            RunAhead(torch.device("cpu")).wait(work, "a number")
            return at_once, tensor[0].item()
    finally:
        leave()


def test_a_message_is_not_there_when_its_work_was_waited_for(processes):
    _, (at_once, waited) = processes.run(2, read_without_waiting)
    assert (at_once, waited) == (0.0, 7.0), "the works are late, and the runtime's own wait is not misled"


def test_a_work_that_never_ends_is_told_after_the_timeout():
    with pytest.raises(WaitTimeoutError, match=r"waited 0\.2 s for a message of nobody"), waiting_up_to(0.2):
        wait(LateWork(), what="a message of nobody")
