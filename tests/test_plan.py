"""A Plan is complete and consistent, and its JSON form gives the same Plan back."""

import json
from dataclasses import replace
from math import prod
from random import Random

import numpy as np
import pytest

from auto3d.cluster import place_ranks
from auto3d.mesh import Mesh
from auto3d.plan import Plan, PlanError, StagePlan, stages_between, stages_of_operations

PLAN = Plan(
    graph="0123456789abcdef",
    dp=2,
    tp=1,
    pp=2,
    global_batch=16,
    micro_batch_size=2,
    schedule="1f1b",
    stages=stages_between([0, 7, 20]),
    placement=place_ranks(dp=2, pp=2),
    seed=3,
)


def keeping(*kept: list[int]) -> list[dict]:
    return [{"operations": [[0, 7]]}, {"operations": [[7, 20]], "kept": kept}]


def stages_with(*replicas) -> list[dict]:
    return [{"operations": [span], "replicas": r} for span, r in zip([[0, 7], [7, 20]], replicas, strict=True)]


def test_json_gives_the_same_plan_back():
    assert Plan.from_json(PLAN.to_json()) == PLAN
    kept = replace(PLAN, stages=(StagePlan(operations=((0, 7),)), StagePlan(operations=((7, 20),), kept=((9, 20),))))
    assert Plan.from_json(kept.to_json()) == kept
    assert PLAN.micro_batches == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp": 3}, ["global_batch: 16", "3 × 2 = 6"]),
        ({"dp": 0}, ["dp: 0", "1 or more"]),
        ({"dp": "two"}, ["dp", "integer", "'two'"]),
        ({"dp": "2"}, ["dp", "integer", "'2'"]),
        ({"seed": -1}, ["seed: -1", "0 or more"]),
        ({"tp": 2}, ["placement", "tp = 2"]),
        ({"pp": 3}, ["2 stages for pp = 3"]),
        ({"colour": 1}, ["colour: unknown", "dp, tp, pp"]),
        ({"schema": 99}, ["schema: 99", "reads 5"]),
        ({"stages": [{"operations": [[0, 7]]}, {"operations": [[8, 20]]}]}, ["8 to 20 follows operation 7"]),
        ({"stages": [{"operations": [[0, 7]]}, {"operations": [[6, 20]]}]}, ["6 to 20 follows operation 7"]),
        ({"stages": [{"operations": [[0, 7]]}, {"operations": [[7, 7]]}]}, ["7 to 7 follows"]),
        ({"stages": [{"operations": [[1, 7]]}, {"operations": [[7, 9]]}]}, ["1 to 7 follows operation 0"]),
        ({"stages": [{"operations": [[0, 7]]}, {"operations": []}]}, ["has no operations"]),
        ({"stages": [{"operations": [[0, 7, 9]]}, {"operations": [[7, 9]]}]}, ["stages.0.operations"]),
        ({"stages": keeping([9, 9])}, ["stage 1 keeps 9 to 9"]),
        ({"stages": keeping([7, 9], [8, 12])}, ["stage 1 keeps 8 to 12", "follow"]),
        ({"stages": keeping([6, 20])}, ["stage 1 keeps 6 to 20", "lie in"]),
        ({"stages": keeping([7])}, ["stages.1.kept"]),
        ({"placement": [[0, 1], [2, 2]]}, ["placement", "0 to 3 once"]),
        ({"placement": [[0], [1, 2, 3]]}, ["placement", "lists of dp = 2 ranks", "0 to 3 once"]),
        ({"stages": stages_with(0, 1)}, ["stages: replicas: 0", "1 or more"]),
        ({"stages": stages_with(1, 3)}, ["micro_batch_size: 2", "3 replicas", "multiple of 3"]),
        ({"stages": stages_with(2, 2)}, ["dp = 2 × 2 replicas", "0 to 7 once"]),
        ({"stages": stages_with("two", 1)}, ["stages.0.replicas", "integer", "'two'"]),
        ({"placement": [[0, 1, 2], [3, 4]], "stages": stages_with(2, 1)}, ["dp = 2 × 1 or 2 replicas", "0 to 4 once"]),
        (
            {"placement": [[0, 1, 2, 3], [4, 4]], "stages": stages_with(2, 1)},
            ["dp = 2 × 1 or 2 replicas", "0 to 5 once"],
        ),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(changes, words):
    text = json.dumps({**json.loads(PLAN.to_json()), **changes})
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_stages_from_the_stage_of_each_operation():
    assert stages_of_operations([0, 0, 1, 0, 1, 2]) == (
        StagePlan(operations=((0, 2), (3, 4))),
        StagePlan(operations=((2, 3), (4, 5))),
        StagePlan(operations=((5, 6),)),
    )
    assert stages_of_operations([0, 0, 1]) == stages_between([0, 2, 3])


def test_missing_keys_and_broken_json_are_refused():
    content = json.loads(PLAN.to_json())
    del content["schedule"]
    with pytest.raises(PlanError, match="schedule: Field required"):
        Plan.from_json(json.dumps(content))
    with pytest.raises(PlanError, match="Invalid JSON"):
        Plan.from_json(PLAN.to_json()[:50])


def test_placement_keeps_replicas_of_a_stage_together():
    assert place_ranks(dp=3, pp=2) == ((0, 1, 2), (3, 4, 5))
    assert place_ranks(dp=2, pp=2, replicas=[2, 1]) == ((0, 1, 2, 3), (4, 5))


def test_a_stage_may_have_replicas_of_its_own():
    uneven = replace(
        PLAN,
        stages=tuple(replace(stage, replicas=r) for stage, r in zip(PLAN.stages, (2, 1), strict=True)),
        placement=place_ranks(dp=2, pp=2, replicas=[2, 1]),
    )
    assert Plan.from_json(uneven.to_json()) == uneven
    assert (uneven.ranks, uneven.micro_batches) == (6, 4)
    positions = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 1, 0)]
    found = [uneven.position(rank) for rank in range(6)]
    assert found == [(d, {"pipeline": p, "replica": r, "tensor": 0}) for d, p, r in positions]
    split = replace(uneven, tp=2, placement=place_ranks(dp=2, pp=2, tp=2, replicas=[2, 1]))
    by_shard = [(d, {"pipeline": p, "replica": r, "tensor": shard}) for d, p, r in positions for shard in (0, 1)]
    assert [split.position(rank) for rank in range(12)] == by_shard


def test_a_mesh_names_what_numpy_finds_by_position():
    """Against an array of the same ranks, for axes of any sizes."""
    random = Random(0)
    for _ in range(100):
        axes = tuple((name, random.randint(1, 4)) for name in "abc")
        shape = [size for _, size in axes]
        ranks = np.array(random.sample(range(100), prod(shape))).reshape(shape)
        mesh = Mesh(axes, tuple(ranks.ravel().tolist()))
        place = [random.randrange(size) for size in shape]
        assert mesh.coordinate(ranks[tuple(place)]) == dict(zip("abc", place, strict=True))
        assert mesh.at(b=place[1]) == tuple(ranks[:, place[1]].ravel())
        assert mesh.at(a=place[0], c=place[2]) == tuple(ranks[place[0], :, place[2]])
        for number, name in enumerate("abc"):
            rows = np.moveaxis(ranks, number, -1).reshape(-1, shape[number])
            assert mesh.groups(name) == [tuple(row) for row in rows.tolist()]
