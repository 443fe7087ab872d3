"""Which plans run slices of the sequence, and what their ranks run."""

from dataclasses import replace

import pytest

from auto3d.errors import InputError
from auto3d.partition.stage import cut
from auto3d.plan import SUB_PIPELINED, PlanError, stages_between
from auto3d.runtime.layout import lay_out_plan, lay_out_rank
from auto3d.runtime.rank import check_plan
from auto3d.runtime.settings import TrainingSettings
from auto3d.schedule import samples_at_once, without_slices
from tests.distributed.parity import make_plan
from tests.models import captured

SETTINGS = TrainingSettings(iterations=1, device="cpu", threads_per_rank=1)


def sliced_plan(**changes):
    return make_plan("gpt2", dp=1, pp=2, schedule="seq1f1b", **{"options": {"slices": 4}} | changes)


def test_a_slice_runs_all_samples_of_a_micro_batch():
    plan = sliced_plan()
    assert samples_at_once(plan) == plan.micro_batch_size == 2
    layout = lay_out_rank(lay_out_plan(captured("gpt2", 2), plan, SETTINGS), 1)
    assert layout.micro_batches == 4 * plan.micro_batches
    (transfer,) = layout.stages[1, 0].received
    assert transfer.value.shape == (2, 8, 32)
    assert [len(stages) for stages in layout.stages_of_slices] == [2] * 4


def test_terms_of_the_loss_count_the_targets_of_a_slice():
    """Of 32 tokens each but the last has a target, in each of 2 samples."""
    whole, slice_ = (
        lay_out_plan(captured("gpt2", 2), plan, SETTINGS).terms.counted[0].places
        for plan in (make_plan("gpt2", dp=1, pp=2), sliced_plan())
    )
    assert (whole, slice_) == (2 * 31, 2 * 31 / 4)


def test_an_evaluation_runs_whole_sequences():
    plan = sliced_plan()
    assert without_slices(plan).schedule_options == {"slices": 1}
    assert without_slices(replace(plan, schedule_options={})).schedule_options == {"slices": 1}
    assert without_slices(make_plan("gpt2", dp=1, pp=2)) == make_plan("gpt2", dp=1, pp=2)


def test_slices_that_do_not_divide_the_sequence_are_refused():
    with pytest.raises(PlanError, match="schedule: slices: 5 does not divide a sequence of 32"):
        check_plan(captured("gpt2", 2), sliced_plan(options={"slices": 5}), SETTINGS)


def test_compiled_code_is_refused():
    with pytest.raises(InputError, match="compiled code and slices of the sequence do not go together"):
        check_plan(captured("gpt2", 2), sliced_plan(), replace(SETTINGS, compile=True))


def test_sequence_parallelism_and_halves_are_refused():
    for choices, words in (
        (
            {"sequence_parallel": True},
            "and sequence parallelism do not go together: .*, or sequence_parallel: false",
        ),
        (
            {"tensor_overlap": SUB_PIPELINED},
            "and sub-pipelining do not go together: .*, or tensor_overlap: none",
        ),
    ):
        with pytest.raises(PlanError, match=words):
            make_plan("gpt2", dp=1, tp=2, pp=2, schedule="seq1f1b", **choices)  # it derives the programs of the plan


def test_replicas_have_the_slices_of_their_samples():
    plan = sliced_plan(micro_batch_size=4)
    stages = tuple(replace(stage, replicas=2) for stage in plan.stages)
    twice = replace(plan, stages=stages, placement=((0, 1), (2, 3)))
    check_plan(captured("gpt2", 4), twice, SETTINGS)
    layouts = [lay_out_rank(lay_out_plan(captured("gpt2", 4), each, SETTINGS), 1) for each in (plan, twice)]
    shapes = [[one.received[0].value.shape for _, one in layout.stages_of_slices] for layout in layouts]
    assert shapes == [[(4, 8, 32)] * 4, [(2, 8, 32)] * 4]


def test_a_cut_between_a_mask_and_its_attention_is_no_cut():
    """What a slice takes of a mask, and of positions, each stage makes for itself: only hidden states cross."""
    graph = captured("llama", 2).graph
    attention = next(position for position, node in enumerate(graph.nodes) if "attention" in node.operator)
    stages = stages_between([0, attention, len(graph.nodes)])
    plan = make_plan("llama", dp=1, pp=2, schedule="seq1f1b", stages=stages)
    layout = lay_out_rank(lay_out_plan(captured("llama", 2), plan, SETTINGS), 1)
    crossing = {transfer.value.name for transfer in layout.stages[1, 0].received}
    assert crossing == {transfer.value.name for transfer in cut(graph, stages)[1].received}
