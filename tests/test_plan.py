"""A Plan is complete, consistent, and survives its JSON form."""

import json

import pytest

from auto3d.cluster import place_ranks
from auto3d.plan import Plan, PlanError, StagePlan

PLAN = Plan(
    graph="0123456789abcdef",
    dp=2,
    tp=1,
    pp=2,
    global_batch=16,
    micro_batch_size=2,
    schedule="1f1b",
    stages=(StagePlan(first=0, last=7), StagePlan(first=7, last=20)),
    placement=place_ranks(dp=2, pp=2),
    seed=3,
)


def test_json_gives_the_same_plan_back():
    assert Plan.from_json(PLAN.to_json()) == PLAN
    assert PLAN.micro_batches == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp": 3}, ["global_batch: 16", "3 × 2 = 6"]),
        ({"dp": 0}, ["dp: 0", "1 or more"]),
        ({"dp": "two"}, ["dp", "integer", "'two'"]),
        ({"dp": "2"}, ["dp", "integer", "'2'"]),
        ({"seed": -1}, ["seed: -1", "0 or more"]),
        ({"tp": 2}, ["tp: 2", "must be 1"]),
        ({"pp": 3}, ["2 stages for pp = 3"]),
        ({"colour": 1}, ["colour: unknown", "dp, tp, pp"]),
        ({"schema": 99}, ["schema: 99", "reads 1"]),
        ({"stages": [{"first": 0, "last": 7}, {"first": 8, "last": 20}]}, ["begins at operation 8", "ends at 7"]),
        ({"stages": [{"first": 0, "last": 7}, {"first": 7, "last": 7}]}, ["stage 1 is empty"]),
        ({"stages": [{"first": 1, "last": 7}, {"first": 7, "last": 9}]}, ["must begin at 0"]),
        ({"placement": [[0, 1], [2, 2]]}, ["placement", "0 to 3 once"]),
        ({"placement": [[0], [1, 2, 3]]}, ["placement", "lists of dp = 2"]),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(changes, words):
    text = json.dumps({**json.loads(PLAN.to_json()), **changes})
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_missing_keys_and_broken_json_are_refused():
    content = json.loads(PLAN.to_json())
    del content["schedule"]
    with pytest.raises(PlanError, match="schedule: Field required"):
        Plan.from_json(json.dumps(content))
    with pytest.raises(PlanError, match="Invalid JSON"):
        Plan.from_json(PLAN.to_json()[:50])


def test_placement_keeps_replicas_of_a_stage_together():
    assert place_ranks(dp=3, pp=2) == ((0, 1, 2), (3, 4, 5))
