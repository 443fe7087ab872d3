"""Every schedule is right at every size, and the checker finds what is wrong."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auto3d.errors import InputError
from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.check import ScheduleError, check
from auto3d.schedule.operation import Kind, Operation, Schedule, most_in_flight, parse


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", range(1, 9))
def test_right_at_every_size(name, stages):
    for micro_batches in range(1, 4 * stages + 1):
        check(build_schedule(name, devices=stages, micro_batches=micro_batches))


@given(stages=st.integers(1, 16), micro_batches=st.integers(1, 64))
def test_activations_in_flight(stages, micro_batches):
    """GPipe holds all micro-batches, 1F1B at most D - s of them on stage s (Chimera, table 2)."""
    assert most_in_flight(build_schedule("gpipe", devices=stages, micro_batches=micro_batches)) == micro_batches
    schedule = build_schedule("1f1b", devices=stages, micro_batches=micro_batches)
    for stage, operations in enumerate(schedule.operations):
        alone = replace(schedule, operations=(operations,))
        assert most_in_flight(alone) == min(micro_batches, stages - stage)


def test_order_of_one_forward_one_backward():
    first, second, third = build_schedule("1f1b", devices=3, micro_batches=4).operations
    assert " ".join(map(str, first)) == "F0@0 F1@0 F2@0 B0@0 F3@0 B1@0 B2@0 B3@0 S@0 U@0"
    assert " ".join(map(str, second)) == "F0@1 F1@1 B0@1 F2@1 B1@1 F3@1 B2@1 B3@1 S@1 U@1"
    assert " ".join(map(str, third)) == "F0@2 B0@2 F1@2 B1@2 F2@2 B2@2 F3@2 B3@2 S@2 U@2"


@given(
    kind=st.sampled_from([kind for kind in Kind if kind not in (Kind.SYNC, Kind.UPDATE)]),
    stage=st.integers(0, 99),
    micro_batches=st.lists(st.integers(0, 999), min_size=1, max_size=3).map(tuple),
    pipe=st.integers(0, 9),
)
def test_text_form_names_the_operation(kind, stage, micro_batches, pipe):
    operation = Operation(kind, stage, micro_batches, pipe)
    assert parse(str(operation)) == operation
    assert parse(str(Operation(Kind.SYNC, stage, (), pipe))) == Operation(Kind.SYNC, stage, (), pipe)


def test_text_forms_of_the_design():
    assert str(Operation(Kind.FORWARD, 1, (3,))) == "F3@1"
    assert str(Operation(Kind.FORWARD, 2, (0, 1), pipe=1)) == "F0+1@2:1"
    for wrong in ("F@1", "S3@1", "X3@1", "F3", "F3@1:", "F3+@1", ""):
        with pytest.raises(InputError):
            parse(wrong)


def by_hand(*lines: str, stages: int = 2, micro_batches: int = 2) -> Schedule:
    return Schedule(
        name="by hand",
        stages=stages,
        micro_batches=micro_batches,
        device_of={(stage, 0): stage for stage in range(stages)},
        operations=tuple(tuple(parse(word) for word in line.split()) for line in lines),
    )


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["F0@0 F1@0 B0@0 S@0 U@0", "F0@1 B0@1 F1@1 B1@1 S@1 U@1"], "B1@0 is done 0 times"),
        (["F0@0 F1@0 B0@0 B0@0 B1@0 S@0 U@0", "F0@1 B0@1 F1@1 B1@1 S@1 U@1"], "B0@0 is done 2 times"),
        (["F0@0 F1@0 F2@0 B0@0 B1@0 S@0 U@0", "F0@1 B0@1 F1@1 B1@1 S@1 U@1"], "F2@0 is outside"),
        (["F0@0 F1@0 B0@0 B1@0 S@0 U@0", "F0@1 B0@1 F1@1 B1@1 S@0 U@1"], "its stage lives on device 0"),
        (["F0@0 F1@0 B0@0 S@0 B1@0 U@0", "F0@1 B0@1 F1@1 B1@1 S@1 U@1"], "it must end with its one S"),
        (["F0@0 F1@0 B0@0 B1@0 U@0", "F0@1 B0@1 F1@1 B1@1 S@1 U@1"], "it must end with its one S"),
        (["F0@0 B0@0 F1@0 B1@0 S@0 U@0", "F0@1 F1@1 B0@1 B1@1 S@1 U@1"], "deadlock: device 0 before B0@0"),
        (["F1@0 F0@0 B0@0 B1@0 S@0 U@0", "F0@1 B0@1 F1@1 B1@1 S@1 U@1"], "its send to F1@1 is not met"),
        (["F0@0 F1@0 B0@0 B1@0 S@0 U@0", "B0@1 F0@1 F1@1 B1@1 S@1 U@1"], "deadlock"),
        (["F0@0 F1@0 I0@0 B1@0 S@0 U@0", "F0@1 B0@1 F1@1 B1@1 S@1 U@1"], "kind I is not supported"),
    ],
)
def test_the_checker_names_what_is_wrong(lines, words):
    with pytest.raises(ScheduleError) as caught:
        check(by_hand(*lines))
    assert words in str(caught.value)


def test_the_checker_accepts_what_is_right():
    check(by_hand("F0@0 F1@0 B0@0 B1@0 S@0 U@0", "F0@1 B0@1 F1@1 B1@1 S@1 U@1"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_lost_doubled_or_moved_backward_is_found(name):
    """Mutations of right schedules, at random: the checker lets none of them pass."""
    chance = random.Random(0)
    for _ in range(200):
        stages, micro_batches = chance.randint(2, 5), chance.randint(2, 8)
        schedule = build_schedule(name, devices=stages, micro_batches=micro_batches)
        device = chance.randrange(stages)
        operations = list(schedule.operations[device])
        index = chance.randrange(2 * micro_batches)
        mutation = chance.choice(["lose", "double", "early"])
        if mutation == "lose":
            del operations[index]
        elif mutation == "double":
            operations.insert(index, operations[index])
        else:  # a backward before its own forward
            backward = next(o for o in operations if o.kind is Kind.BACKWARD)
            operations.remove(backward)
            operations.insert(operations.index(Operation(Kind.FORWARD, device, backward.micro_batches)), backward)
        changed = (*schedule.operations[:device], tuple(operations), *schedule.operations[device + 1 :])
        with pytest.raises(ScheduleError):
            check(replace(schedule, operations=changed))


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "words"),
    [
        ("gpip", 2, 2, "did you mean gpipe"),
        ("1f1b", 0, 2, "0 devices"),
        ("1f1b", 2, 0, "0 micro-batches"),
    ],
)
def test_impossible_schedules_are_refused(name, stages, micro_batches, words):
    with pytest.raises(InputError, match=words):
        build_schedule(name, devices=stages, micro_batches=micro_batches)
