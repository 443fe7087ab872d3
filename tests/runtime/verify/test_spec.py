"""Programs of plans keep the table of what may stand where, and a fault of each kind breaks its rule."""

from dataclasses import replace

import pytest
import torch

from auto3d.conversions import CONVERSIONS, conversion_of
from auto3d.plan import SUB_PIPELINED
from auto3d.runtime.layout import PlanLayout, lay_out_plan
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.verify import spec
from auto3d.runtime.verify.spec import SPEC
from auto3d.schedule import samples_at_once
from auto3d.tensor_placement import COPIED, PARTIAL, WHOLE
from tests.distributed.parity import make_plan
from tests.distributed.test_uneven import make_plan as make_uneven_plan
from tests.models import captured
from tests.soak import soak

OPERATOR, CONVERSION, SHAPE, PARTIAL_LEAVES, SUM, ORDER = SPEC


def laid_out(model: str, **options) -> PlanLayout:
    plan = make_plan(model, **options)
    return lay_out_plan(captured(model, samples_at_once(plan)), plan, TrainingSettings(iterations=1))


def breaks(common: PlanLayout) -> dict[str, list[str]]:
    return {says: found for says, broken in SPEC.items() if (found := list(broken(common)))}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt2", {"dp": 2, "pp": 2, "tp": 2, "sequence_parallel": True}),
        ("gpt2", {"dp": 2, "pp": 2, "schedule": "chimera", "shard_optimizer": True}),
        ("llama", {"dp": 1, "pp": 2, "tp": 2, "schedule": "seq1f1b", "options": {"slices": 2, "recompute": "full"}}),
        *soak(
            ("t5", {"dp": 2, "pp": 3, "tp": 2}),
            ("vit", {"dp": 1, "pp": 1, "tp": 2}),
            ("swin", {"dp": 1, "pp": 1, "tp": 2, "sequence_parallel": True}),
            ("gpt2", {"dp": 1, "pp": 2, "tp": 2, "tensor_overlap": SUB_PIPELINED}),
            ("gpt2", {"dp": 2, "pp": 2, "schedule": "zb-h1"}),
        ),
    ],
)
def test_plans_keep_the_spec(model, options):
    assert breaks(laid_out(model, **options)) == {}


def test_halves_on_stages_of_different_replicas_keep_the_spec():
    plan = make_uneven_plan("gpt2", [1, 2], micro_batch_size=4, tp=2, tensor_overlap=SUB_PIPELINED)
    common = lay_out_plan(captured("gpt2", 4), plan, TrainingSettings(iterations=1))
    assert breaks(common) == {}


@pytest.fixture(scope="module")
def plan() -> PlanLayout:
    return laid_out("gpt2", dp=1, pp=2, tp=2)


def reduced(common: PlanLayout) -> tuple[str, str]:
    """A value that is made partial, and the conversion that makes it whole."""
    nodes = spec.rank_program(common.captured, common.plan, 1).captured.exported.program.nodes
    found = (node for node in nodes if (one := conversion_of(node.target)) and one.source is PARTIAL.kind)
    node = next(found)
    return node.args[0].name, node.name


def broken_by(monkeypatch, common: PlanLayout, change) -> set[str]:
    """The rules that the program of a rank breaks after ``change`` of it."""
    made = spec.derived
    monkeypatch.setattr(spec, "derived", lambda *arguments, **options: change(made(*arguments, **options)))
    return breaks(common).keys()


def test_an_operator_that_does_not_give_what_it_is_said_to_give_is_found(plan, monkeypatch):
    name, _ = reduced(plan)
    wrong = broken_by(monkeypatch, plan, lambda m: replace(m, placements={**m.placements, name: WHOLE}))
    assert wrong == {OPERATOR, CONVERSION}


def test_a_conversion_to_another_placement_is_found(plan, monkeypatch):
    _, name = reduced(plan)
    found = broken_by(monkeypatch, plan, lambda m: replace(m, placements={**m.placements, name: PARTIAL}))
    assert CONVERSION in found
    assert SHAPE not in found


def test_a_value_of_another_size_is_found(plan, monkeypatch):
    name, _ = reduced(plan)

    def smaller(model):
        node = next(node for node in model.program.exported.program.nodes if node.name == name)
        node.meta["val"] = torch.empty(1, device="meta")
        return model

    assert broken_by(monkeypatch, plan, smaller) == {SHAPE}


def test_a_partial_value_between_stages_is_found(plan, monkeypatch):
    program = spec.rank_program(plan.captured, plan.plan, 1)
    (transfer, *_) = spec.cut(program.captured.graph, program.plan.stages)[1].received
    for placed, expected in ((PARTIAL, {PARTIAL_LEAVES}), (COPIED, set())):
        model = replace(program.derived, placements={**program.derived.placements, transfer.value.name: placed})
        monkeypatch.setattr(spec, "rank_program", lambda *_, model=model: replace(program, derived=model))
        assert breaks(plan).keys() == expected


@pytest.mark.parametrize(("lacks", "converts"), [(True, "reduce"), (False, "reduce_scatter")])
def test_a_gradient_that_is_not_summed_as_it_is_partial_is_found(monkeypatch, lacks, converts):
    common = laid_out("gpt2", dp=1, pp=1, tp=2, sequence_parallel=True)
    real = spec.lay_out_rank
    layout = real(common, 0)
    copied = {name for name in layout.holders if layout.placement_of(name) == COPIED}
    assert copied

    def wrong(common, rank):
        layout, found = real(common, rank), dict(real(common, rank).holders)
        for name in copied:
            ranks = (rank,) if lacks else found[name].ranks
            found[name] = replace(found[name], ranks=ranks, conversion=CONVERSIONS[converts])
        vars(layout)["holders"] = found
        return layout

    assert breaks(common) == {}
    monkeypatch.setattr(spec, "lay_out_rank", wrong)
    assert breaks(common).keys() == {SUM}
    assert len(breaks(common)[SUM]) == 2 * len(copied)


def test_a_rank_with_another_order_is_found(plan, monkeypatch):
    programs_of = spec.programs_of

    def turned(layout):
        programs = programs_of(layout)
        if layout.shard == 0:
            return programs
        return tuple(replace(program, steps=program.steps[::-1]) for program in programs)

    monkeypatch.setattr(spec, "programs_of", turned)
    assert breaks(plan).keys() == {ORDER}
