"""Explicit orders: their text is exact, what contradicts it is refused, and they are counted whole."""

import random
from functools import partial
from itertools import product

import pytest

from auto3d.cluster import place_ranks
from auto3d.errors import InputError
from auto3d.plan import Plan, stages_between
from auto3d.schedule import build_schedule, parse_schedule, schedule_of, write_schedule
from auto3d.schedule.moments import all_moments, highest_moments
from auto3d.schedule.order_text import order_options
from auto3d.schedule.shape import shape
from tests.schedule.orders import PLACEMENTS, named, random_order
from tests.schedule.samples import BY_RULE, SYNC, schedules
from tests.schedule.test_shape import assert_shape, messages_are_held_as_lowering_holds_them

RIGHT = "F0@0 F1@0 B0@0 B1@0 | F0@1 B0@1 F1@1 B1@1"


def drawn(count: int):
    chance = random.Random(22)
    for placement, _ in product(PLACEMENTS, range(count)):
        devices, sync = chance.choice([2, 4]), chance.choice(SYNC)
        yield random_order(chance, placement, devices=devices, micro_batches=chance.randint(2, 18), sync=sync)


def test_any_order_is_its_text():
    for schedule in drawn(8):
        sizes = {"devices": schedule.devices, "micro_batches": schedule.micro_batches}
        options = order_options(schedule)
        assert build_schedule("synthesized", **sizes, **options) == named(schedule)
        plan = Plan(
            graph="", dp=1, tp=1, pp=schedule.devices, global_batch=schedule.micro_batches, micro_batch_size=1,
            schedule="synthesized", schedule_options=options, stages=stages_between(range(schedule.stages + 1)),
            placement=place_ranks(dp=1, pp=schedule.devices), seed=0,
        )  # fmt: skip
        assert schedule_of(Plan.from_json(plan.to_json())) == named(schedule)
        assert "F0" not in write_schedule(plan.schedule, options)


def test_any_order_is_counted_whole():
    for schedule in drawn(6):
        sizes = {"devices": schedule.devices, "micro_batches": schedule.micro_batches}
        found = shape("synthesized", **sizes, options=order_options(schedule))
        assert_shape(found, named(schedule))
        held = [{one.counts for one in moments} for moments in all_moments(named(schedule))]
        assert all(
            {one.counts for one in high} <= each
            for high, each in zip(map(partial(highest_moments, found), range(found.devices)), held, strict=True)
        )
        messages_are_held_as_lowering_holds_them(schedule)


def test_the_schedules_by_rule_have_texts():
    written = 0
    for name in BY_RULE:
        for schedule in schedules(name, 4, [4, 9]):
            sizes = {"devices": schedule.devices, "micro_batches": schedule.micro_batches}
            if schedule.weight_version or schedule.parts > 1:
                with pytest.raises(InputError, match=r"an order is one iteration|an order runs whole ones"):
                    order_options(schedule)
                continue
            assert build_schedule("synthesized", **sizes, **order_options(schedule)) == named(schedule)
            written += 1
    assert written > 40


def test_large_orders_load():
    schedule = build_schedule("zb-v", devices=16, micro_batches=128)
    loaded = build_schedule("synthesized", devices=16, micro_batches=128, **order_options(schedule))
    assert loaded.operations == schedule.operations


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "it has no order; "),
        ({"order": RIGHT + " | F0@2"}, "the order is for 3 devices; here there are 2"),
        ({"order": "F0@0 B0@0 | F0@1 B0@1"}, "the order is for 1 micro-batches; here there are 2"),
        ({"order": RIGHT.replace("1@", "2@")}, "the order is for 3 micro-batches; here there are 2"),
        ({"order": "F1@0 B1@0 | F1@1 B1@1"}, "order: micro-batch 0 is missing"),
        ({"order": RIGHT.replace(" B1@1", "")}, "order: B1@1 is missing; it must run once"),
        ({"order": RIGHT.replace("B1@1", "X1@1")}, "'X1@1' is not an operation"),
        ({"order": RIGHT + " S@1 U@1"}, "leave out S and U; the option sync places them"),
        ({"order": "F0@0 F1@0 B0@0 B1@0 F0@1 B0@1 F1@1 B1@1 | "}, "device 1 has no operations"),
        ({"order": RIGHT.replace("B0@0", "R0@0 B0@0")}, "R0@0: stage 0 does not recompute"),
        ({"order": RIGHT.replace("F1@0", "F1@1", 1)}, "F0@1 is on device 1; its stage is on device 0"),
        ({"order": "F0@0 B0@0 F1@0 B1@0 | F0@1 F1@1 B0@1 B1@1"}, "order: deadlock: device 0 before B0@0"),
        ({"order": RIGHT, "recompute": "2"}, "recompute is '2'; it must be none, full or stages from 0 to 1"),
        ({"order": RIGHT, "recompute": "1+1"}, "recompute is '1+1'"),
        ({"order": RIGHT, "sync": "soon"}, "sync is 'soon'"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(options, words):
    with pytest.raises(InputError) as refusal:
        build_schedule("synthesized", devices=2, micro_batches=2, **options)
    message = str(refusal.value)
    assert message.startswith("schedule synthesized: ")
    assert words in message
    assert "\n" not in message


def test_its_name_in_tables_is_short():
    options = order_options(build_schedule("chimera", devices=4, micro_batches=8, sync="eager"))
    assert parse_schedule(write_schedule("synthesized", options)) == ("synthesized", {"sync": "eager"})
