"""A plan is refused if ranks of different samples hold a value that the model carries from one forward to the next."""

import pytest

from auto3d.partition.stage import cut
from auto3d.plan import Plan, PlanError
from auto3d.schedule import schedule_of
from auto3d.schedule.carried_buffers import check_carried_buffers
from tests.distributed.parity import make_plan
from tests.models import captured


def checked(model: str, plan: Plan) -> None:
    graph = captured(model, 2).graph
    check_carried_buffers(graph, plan, schedule_of(plan), cut(graph, plan.stages))


def test_moving_averages_are_carried_and_batch_statistics_are_not():
    assert captured("averaging", 2).graph.carried_buffers == {"average"}
    residual = captured("residual", 2).graph
    assert residual.written_buffers
    assert not residual.carried_buffers


@pytest.mark.parametrize("wanted", [{"dp": 2, "pp": 1}, {"dp": 2, "pp": 2}, {"dp": 1, "pp": 2, "schedule": "chimera"}])
def test_several_holders_are_refused(wanted):
    checked("residual", make_plan("residual", **wanted))
    with pytest.raises(PlanError, match="average is written in each forward and enters the loss, so the 2 ranks"):
        checked("averaging", make_plan("averaging", **wanted))


def test_one_holder_is_not():
    checked("averaging", make_plan("averaging", dp=1, pp=2))


def test_one_tensor_parallel_group_is_not():
    checked("averaging", make_plan("averaging", dp=1, tp=2, pp=2))
    with pytest.raises(PlanError, match="so the 4 ranks that hold it"):
        checked("averaging", make_plan("averaging", dp=2, tp=2, pp=1))
