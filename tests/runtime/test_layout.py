"""The layout of a rank, derived without processes: positions, slices of samples, peers, holders, and refusals."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from auto3d.capture import model as capture_module
from auto3d.capture.model import CapturedModel, capture
from auto3d.plan import Plan, PlanError
from auto3d.runtime.emulated.settings import Emulation
from auto3d.runtime.layout import RankLayout, lay_out_plan, lay_out_rank
from auto3d.runtime.rank import check_plan
from auto3d.runtime.replicas import capture_slices
from auto3d.runtime.settings import TrainingSettings
from auto3d.schedule import samples_at_once
from tests.distributed.parity import SGD
from tests.distributed.test_uneven import make_plan
from tests.models import MODELS, captured

SETTINGS = TrainingSettings(iterations=2, optimizer=SGD, device="cpu", threads_per_rank=1, timeout_s=60)


def layouts(plan: Plan, settings: TrainingSettings = SETTINGS) -> list[RankLayout]:
    """The layout of every rank of a plan for GPT-2."""
    common = lay_out_plan(captured("gpt2", samples_at_once(plan)), plan, settings)
    return [lay_out_rank(common, rank) for rank in range(plan.ranks)]


def test_each_rank_has_its_stages_its_slice_and_its_peers():
    """Two pipelines of two devices; the first device's stage has two replicas."""
    plan = make_plan("gpt2", [2, 1], dp=2)
    assert plan.placement == ((0, 1, 2, 3), (4, 5))
    built = layouts(plan)
    assert [(each.device, each.pipeline, each.replica, each.replicas) for each in built] == [
        (0, 0, 0, 2), (0, 0, 1, 2), (0, 1, 0, 2), (0, 1, 1, 2), (1, 0, 0, 1), (1, 1, 0, 1),
    ]  # fmt: skip
    assert [sorted(each.stages) for each in built] == [[(0, 0)]] * 4 + [[(1, 0)]] * 2
    assert [each.captured.graph.micro_batch_size for each in built] == [3] * 4 + [6] * 2
    assert {each.samples for each in built} == {6}
    assert [each.peers for each in built] == [((0, 1), (4,))] * 2 + [((2, 3), (5,))] * 2 + [
        ((0, 1), (4,)),
        ((2, 3), (5,)),
    ]
    assert [each.first_micro_batch for each in built] == [0, 0, 2, 2, 0, 2]
    assert sum(each.loss_weight * each.micro_batches for each in built if each.device == 0) == pytest.approx(1.0)
    assert sum(each.loss_weight * each.micro_batches for each in built if each.device == 1) == pytest.approx(1.0)


def test_holders_are_in_one_order_on_all_ranks_and_know_which_are_summed():
    one, *others = layouts(make_plan("gpt2", [2, 1]))
    assert all(list(one.holders.items()) == list(each.holders.items()) for each in others)
    tied = one.holders["transformer.wte.weight"]
    assert (tied.ranks, tied.stages) == ((0, 1, 2), (0, 1))
    assert (0, 1) in one.summed_stages
    assert not one.private_parameters, "each parameter of this rank has two replicas"
    last = others[-1]
    assert last.private_parameters == {
        name for name in last.stages[1, 0].state if name in last.holders and name != "transformer.wte.weight"
    }


def test_emulated_devices_hold_no_state_and_load_no_inputs():
    settings = replace(SETTINGS, emulation=Emulation(forward_s=0.001, backward_s=0.002, send_bytes=100))
    for each in layouts(make_plan("gpt2", [1, 1]), settings):
        assert each.state_names == ()
        assert not any(stage.inputs for stage in each.stages.values())
        assert [transfer.value.bytes for transfer in each.transfers] == [100]
    uneven = [
        [transfer.value.bytes for transfer in each.transfers] for each in layouts(make_plan("gpt2", [3, 2]), settings)
    ]
    assert uneven == [[34]] * 3 + [[51]] * 2, "100 bytes are rounded up to 6 equal pieces"


def test_a_plan_for_another_model_is_refused():
    with pytest.raises(PlanError, match="graph: the plan was made for model none"):
        lay_out_plan(captured("gpt2", 6), replace(make_plan("gpt2", [1, 1]), graph="none"), SETTINGS)


@pytest.mark.parametrize("ask", [lambda *it: check_plan(*it, SETTINGS), capture_slices], ids=["check", "capture"])
def test_ranks_forked_after_a_check_capture_nothing(ask):
    """Each size is captured once."""
    build, data = MODELS["residual"]
    plan = make_plan("residual", [2, 2])
    fresh: CapturedModel = capture(build, data.input_specs(), 6)
    assert fresh.at(6) is fresh
    ask(fresh, plan)
    with patch.object(capture_module, "export", side_effect=AssertionError("captured again")):
        assert fresh.at(3) is fresh.at(3)
        for rank in range(plan.ranks):
            lay_out_rank(lay_out_plan(fresh, plan, SETTINGS), rank)
