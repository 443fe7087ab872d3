"""Merak's recursion by hand-worked numbers, and as it is printed; what of a stage is kept."""

import pytest

from auto3d.partition.merak import shard
from auto3d.partition.methods.uniform import uniform
from auto3d.partition.recompute import first_fractions, keep_last, kept_fractions, subgraph_starts
from auto3d.partition.segment import segments
from auto3d.partition.stage import cut
from auto3d.plan import StagePlan
from auto3d.schedule import build_schedule
from auto3d.schedule.in_flight import in_flight
from tests.models import MODELS, captured


@pytest.mark.parametrize(
    ("held", "first", "expected"),
    [
        ([4, 3, 2, 1], 0.25, [0.25, 0.375, 0.75, 1]),  # 1F1B: 3 × 1/4 = 2 × 3/8 = 1 × 3/4
        ([4, 3, 2, 1], 0.5, [0.5, 0.75, 1, 1]),
        ([4, 3, 3, 1], 0.2, [0.2, 0.3, 0.3, 1]),  # Merak's own schedule: the last but one holds three
        ([6, 6, 6], 0.3, [0.3, 0.3, 0.3]),  # GPipe
        ([2, 2, 2, 1], 0.4, [0.4, 0.4, 0.4, 1]),  # two micro-batches
        ([4, 3, 2, 1], 0, [0, 0, 0, 1]),
        ([1, 1], 0, [0, 1]),
        ([1], 0.5, [0.5]),
    ],
)
def test_the_recursion_by_hand(held, first, expected):
    assert kept_fractions(held, first) == pytest.approx(expected)


@pytest.mark.parametrize("depth", [3, 4, 5, 8])
@pytest.mark.parametrize("first", [0, 0.1, 0.35, 0.7, 1])
def test_the_recursion_as_printed_is_that_of_meraks_schedule(depth, first):
    schedule = build_schedule("shifted-critical-path", devices=depth, micro_batches=2 * depth)
    printed = {1: first, depth: 1.0}
    for stage in range(2, depth - 1):
        printed[stage] = min(1.0, (depth - 1) * first / (depth - stage))
    if depth > 2:
        printed[depth - 1] = printed[depth - 2]
    assert kept_fractions(in_flight(schedule), first) == pytest.approx([printed[s] for s in range(1, depth + 1)])


def test_first_shares_are_all_at_which_something_changes():
    held, subgraphs = [4, 3, 2, 1], [3, 5, 2, 4]
    found = first_fractions(held, subgraphs)
    assert found == sorted(found)

    def counts(first: float) -> list[int]:
        shares = kept_fractions(held, first)
        return [int(share * count + 1e-9) for share, count in zip(shares, subgraphs, strict=True)]

    distinct = {tuple(counts(step / 10_000)) for step in range(10_001)}
    assert {tuple(counts(first)) for first in found} == distinct
    assert len(found) == len(distinct)


@pytest.mark.parametrize("model", [model for model in MODELS if model != "gpt2-dropout"])
def test_what_is_kept_is_the_end_of_a_stage_in_whole_subgraphs(model):
    graph = captured(model, 2).graph
    bounds = shard(graph).bounds
    plans = uniform(graph, 2)
    for stage, plan in zip(cut(graph, plans), plans, strict=True):
        starts = subgraph_starts(graph, plan, bounds)
        own = [p for span in plan.operations for p in range(*span) if not graph.nodes[p].from_inputs]
        assert starts[0] == own[0]
        for count in range(len(starts) + 1):
            kept = keep_last(plan, starts, count / len(starts)).kept
            keeps = {position for span in kept for position in range(*span)}
            assert [p for p in own if p in keeps] == own[len(own) - len(keeps & set(own)) :]
            assert {p for p in own if p in starts} & keeps == set(starts[len(starts) - count :])
            found = segments(graph, stage, kept)
            assert [segment.kept for segment in found] == [False] * (count < len(starts)) + [True] * (count > 0)
            assert sorted(name for segment in found for name in segment.nodes) == sorted(stage.nodes)
    assert keep_last(StagePlan(operations=((0, 9),)), [0, 3, 6], 0.66).kept == ((6, 9),), "rounded down"
