"""The checker accepts every schedule at every size and finds every kind of mistake."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auto3d.schedule import build_schedule
from auto3d.schedule.check import ScheduleError, check
from auto3d.schedule.operation import BACKWARDS, Kind, Operation, Schedule
from tests.each import for_each
from tests.schedule.samples import BY_RULE, SYNC, by_hand, least_micro_batches, options_of, schedules, sizes
from tests.soak import soak


@pytest.mark.parametrize("name", BY_RULE)
@pytest.mark.parametrize("devices", [5, 8, *soak(6, 7, *range(9, 17))])
def test_right_at_many_sizes(name, devices):
    for index, micro_batches in enumerate(sizes(devices)):
        for schedule in schedules(name, devices, [micro_batches], syncs=(SYNC[index % 3],)):
            check(schedule)


@pytest.mark.parametrize("name", BY_RULE)
@for_each("devices", range(1, 5))
def test_right_at_every_small_size(name, devices):
    for schedule in schedules(name, devices, list(range(1, 4 * devices + 1))):
        check(schedule)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BY_RULE)
@pytest.mark.parametrize("devices", range(2, 17))
def test_right_on_the_whole_grid(name, devices):
    for schedule in schedules(name, devices, list(range(1, 4 * devices + 1))):
        check(schedule)


@given(data=st.data())
def test_right_at_any_size(data):
    name = data.draw(st.sampled_from(BY_RULE))
    devices = data.draw(st.integers(2, 20).filter(lambda d: options_of(name, d)))
    micro_batches = data.draw(st.integers(least_micro_batches(name, devices), 50))
    options = data.draw(st.sampled_from(options_of(name, devices)))
    sync = data.draw(st.sampled_from(SYNC))
    check(build_schedule(name, devices=devices, micro_batches=micro_batches, sync=sync, **options))


RIGHT = ["F0@0 F1@0 B0@0 B1@0 S@0 U@0", "F0@1 B0@1 F1@1 B1@1 S@1 U@1"]
FIRST, SECOND = RIGHT
TWO_PIPES = {(0, 0): 0, (1, 0): 1, (0, 1): 1, (1, 1): 0}  # two pipes, in opposite directions


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["F0@0 F1@0 B0@0 S@0 U@0", SECOND], "B1@0 is missing"),
        (["F0@0 F1@0 B0@0 I1@0 S@0 U@0", SECOND], "W1@0 is missing"),
        (["F0@0 F1@0 B0@0 W1@0 I1@0 S@0 U@0", SECOND], "W1@0 follows F"),
        (["F0@0 F1@0 B0@0 B0@0 B1@0 S@0 U@0", SECOND], "B0@0 follows B"),
        (["F0@0 F1@0 B0@0 I0@0 B1@0 S@0 U@0", SECOND], "I0@0 follows B"),
        (["F0@0 F1@0 F2@0 B0@0 B1@0 S@0 U@0", SECOND], "F2@0 is outside"),
        (["F0@0 F1@0 R0@0 B0@0 B1@0 S@0 U@0", SECOND], "stage 0 does not recompute"),
        ([FIRST, "B0@1 F0@1 F1@1 B1@1 S@1 U@1"], "B0@1 comes first"),
        (["F0@0 F1@0 B0@0 B1@0 S@0 U@0", "F0@1 B0@1 F1@1 B1@1 S@0 U@1"], "its stage is on device 0"),
        ([FIRST, "F0@1:1 B0@1 F1@1 B1@1 S@1 U@1"], "its stage is on no device"),
        ([FIRST + " S0@0".replace("S0", "S"), SECOND], "S@0 follows an update"),
        (["F0@0 F1@0 B0@0 S@0 B1@0 U@0", SECOND], "B1@0 follows the S of its stage"),
        (["F0@0 F1@0 B0@0 B1@0 U@0", SECOND], "U@0 comes before S@0"),
        (["F0@0 F1@0 B0@0 B1@0 S@0", SECOND], "U@0 is missing"),
        (["F0@0 F1@0 B0@0 B1@0 S@0 S@0 U@0", SECOND], "S@0 comes twice"),
        (["F0@0 F1@0 B0@0 B1@0 S@0 U@0 U@0", SECOND], "U@0 comes twice"),
        (["F0@0 B0@0 F1@0 B1@0 S@0 U@0", "F0@1 F1@1 B0@1 B1@1 S@1 U@1"], "deadlock: device 0 before B0@0"),
        (["F1@0 F0@0 B0@0 B1@0 S@0 U@0", SECOND], "F1@1 uses the message of F1@0, and an operation before it"),
    ],
)
def test_what_is_wrong_is_named(lines, words):
    with pytest.raises(ScheduleError) as caught:
        check(by_hand(*lines))
    assert words in str(caught.value)


def test_what_is_right_passes():
    check(by_hand(*RIGHT))
    check(by_hand("F0@0 F1@0 I0@0 B1@0 W0@0 S@0 U@0", SECOND))
    check(by_hand("F0@0 F1@0 R0@0 B0@0 B1@0 S@0 U@0", SECOND, recompute=frozenset({0})))
    check(by_hand("F0+1@0 B0@0 B1@0 S@0 U@0", "F0+1@1 B0@1 B1@1 S@1 U@1"))


IN_SLICES = ["F0@0 F1@0 F2@0 B1@0 F3@0 B0@0 B3@0 B2@0 S@0 U@0", "F0@1 F1@1 B1@1 F2@1 B0@1 F3@1 B3@1 B2@1 S@1 U@1"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("F0@{s} F1@{s}", "F1@{s} F0@{s}"), "F1@0 is slice 1 of micro-batch 0, before 0; forwards run from the first"),
        (("B1@{s} F{n}@{s} B0@{s}", "B0@{s} F{n}@{s} B1@{s}"), "B0@0 is slice 0 of micro-batch 0, before 1; backwards"),
        (("B3@{s} B2@{s}", "B2@{s} B3@{s}"), "B2@0 is slice 0 of micro-batch 1, before 1; backwards run from the last"),
        (("B3@{s} B2@{s}", "I2@{s} I3@{s} W2@{s} W3@{s}"), "I2@0 is slice 0 of micro-batch 1, before 1; backwards run"),
        (("F0@{s} F1@{s}", "F0+1@{s}"), "F0+1@0 runs 2 slices; it must run 1"),
    ],
)
def test_the_order_of_slices(change, words):
    """The same mistake on all devices, so that only the order of slices is wrong: parts in samples may run that way."""
    wrong = []
    for stage, line in enumerate(IN_SLICES):
        before, after = (text.format(s=stage, n=3 - stage) for text in change)
        assert before in line
        wrong.append(line.replace(before, after))
    check(by_hand(*IN_SLICES, parts=2, slices=2))
    check(by_hand(*wrong, parts=2))
    with pytest.raises(ScheduleError) as caught:
        check(by_hand(*wrong, parts=2, slices=2))
    assert words in str(caught.value)


def test_halves_of_slices():
    """The input halves run from the last slice to the first; the weight halves may follow in any order."""
    halved = [line.replace(f"B3@{s} B2@{s}", f"I3@{s} I2@{s} W2@{s} W3@{s}") for s, line in enumerate(IN_SLICES)]
    check(by_hand(*halved, parts=2, slices=2))


def test_slices_are_the_only_parts():
    with pytest.raises(ScheduleError, match="its micro-batches have 2 slices and 4 parts"):
        check(by_hand(*IN_SLICES, micro_batches=1, parts=4, slices=2))


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("slices", [2, 3, 6])
def test_any_two_slices_in_the_wrong_order_are_found(devices, slices):
    """Two slices of a micro-batch, exchanged on every device in their forwards or in their backwards."""
    right = build_schedule("seq1f1b", devices=devices, micro_batches=3, slices=slices)
    chance = random.Random(devices)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for _ in range(10):
            micro_batch = chance.randrange(3)
            one, other = (slices * micro_batch + number for number in chance.sample(range(slices), 2))
            exchanged = {one: other, other: one}
            wrong = replace(
                right,
                operations=tuple(
                    tuple(
                        o._replace(micro_batches=tuple(exchanged.get(m, m) for m in o.micro_batches))
                        if o.kind is kind
                        else o
                        for o in row
                    )
                    for row in right.operations
                ),
            )
            with pytest.raises(ScheduleError) as caught:
                check(wrong)
            assert any(f"{kind}{number}@" in str(caught.value) for number in (one, other))


def test_pipes():
    """Two pipes with one micro-batch each are right; a micro-batch that changes pipes or a missing stage is not."""
    lines = ["F0@0 F1@1:1 B1@1:1 B0@0 S@0 S@1:1 U@0 U@1:1", "F1@0:1 F0@1 B0@1 B1@0:1 S@1 S@0:1 U@1 U@0:1"]
    check(by_hand(*lines, device_of=TWO_PIPES))
    with pytest.raises(ScheduleError, match="micro-batch 1 is on pipe 1 elsewhere"):
        check(by_hand(lines[0], lines[1].replace("F1@0:1", "F1@1"), device_of=TWO_PIPES))
    with pytest.raises(ScheduleError, match="S@0:1 on device 1"):
        check(by_hand(lines[0], lines[1].replace(" S@0:1", ""), device_of=TWO_PIPES))
    with pytest.raises(ScheduleError, match="stage 1 of pipe 1 is on no device"):
        check(by_hand(*lines, device_of={key: home for key, home in TWO_PIPES.items() if key != (1, 1)}))


ASYNCHRONOUS = ["F0@0 F1@0 B0@0 S@0 U@0 B1@0 S@0 U@0", "F0@1 B0@1 S@1 U@1 F1@1 B1@1 S@1 U@1"]
VERSIONS = {(0, 0): 0, (0, 1): 0, (1, 0): 0, (1, 1): 1}


@pytest.mark.parametrize(
    ("change", "versions", "words"),
    [
        (("", ""), {(0, 1): 1}, "F1@0 uses weight version 1 after only 0 updates"),
        (("", ""), {(0, 0): 1}, "F0@0 uses weight version 1 after only 0 updates"),
        (("B0@1 S@1 U@1", "B0@1 U@1"), {}, "U@1, number 1, comes without an S before it"),
        (("B0@1 S@1 U@1", "B0@1 S@1"), {}, "B1@1 adds to gradients that are being synced"),
        (("B0@1 S@1 U@1", "B0@1"), {(1, 1): 0}, "sums other micro-batches"),
        (("B1@1 S@1 U@1", "B1@1"), {}, "U@1 is missing at the end"),
        (("B1@1 S@1 U@1", "B1@1 S@1 U@1 S@1 U@1"), {}, "S@1 before update 3 has no new gradients"),
    ],
)
def test_updates_and_versions(change, versions, words):
    check(by_hand(*ASYNCHRONOUS, weight_version=VERSIONS))
    with pytest.raises(ScheduleError) as caught:
        check(by_hand(ASYNCHRONOUS[0], ASYNCHRONOUS[1].replace(*change), weight_version=VERSIONS | versions))
    assert words in str(caught.value)


def test_a_version_never_goes_back():
    line = "F0@0 B0@0 S@0 U@0 F1@0 B1@0 S@0 U@0 F2@0 B2@0 S@0 U@0"
    for last, right in ((2, True), (1, True), (0, False)):
        schedule = by_hand(line, stages=1, micro_batches=3, weight_version={(0, 0): 0, (0, 1): 1, (0, 2): last})
        if right:
            check(schedule)
        else:
            with pytest.raises(ScheduleError, match="F2@0 uses weight version 0 after version 1"):
                check(schedule)


def mutations(schedule: Schedule, chance: random.Random) -> tuple[str, Schedule]:
    """The name of a mistake that no schedule may have, and ``schedule`` with that mistake."""
    device = chance.randrange(schedule.devices)
    operations = list(schedule.operations[device])
    mistake = chance.choice(["lose", "double", "elsewhere", "early backward", "early sync", "late sync", "version"])
    index = chance.choice([i for i, o in enumerate(operations) if o.kind is not Kind.RECOMPUTE])
    changed = list(schedule.operations)
    if mistake == "lose":
        del operations[index]
    elif mistake == "double":
        operations.insert(chance.randint(0, len(operations)), operations[index])
    elif mistake == "elsewhere":
        other = (device + 1) % schedule.devices
        changed[other] = (*changed[other], operations.pop(index))
    elif mistake == "early backward":
        index = chance.choice([i for i, o in enumerate(operations) if o.kind in BACKWARDS])
        wrong = operations.pop(index)
        earlier = (Kind.BACKWARD_INPUT,) if wrong.kind is Kind.BACKWARD_WEIGHT else (Kind.FORWARD,)
        needed = next(
            i
            for i, o in enumerate(operations)
            if o.kind in earlier and o.stage == wrong.stage and set(wrong.micro_batches) <= set(o.micro_batches)
        )
        operations.insert(needed, wrong)
    elif mistake == "early sync":
        index = chance.choice([i for i, o in enumerate(operations) if o.kind is Kind.SYNC])
        sync = operations.pop(index)
        before = [
            i
            for i, o in enumerate(operations[:index])
            if o.kind in BACKWARDS and (o.stage, o.pipe) == (sync.stage, sync.pipe)
        ]
        operations.insert(before[-1] if before else 0, sync)
        if not before:  # the pipe has no micro-batches, so its sync may come anywhere: lose it instead
            operations.remove(sync)
    elif mistake == "late sync":
        index = chance.choice([i for i, o in enumerate(operations) if o.kind is Kind.SYNC])
        operations.append(operations.pop(index))
    elif schedule.weight_version:
        key = chance.choice(list(schedule.weight_version))
        schedule = replace(schedule, weight_version=schedule.weight_version | {key: 10**6})
    else:  # give weight versions to a schedule with one update
        schedule = replace(schedule, weight_version={(0, 0): 1})
    changed[device] = tuple(operations)
    return mistake, replace(schedule, operations=tuple(changed))


@pytest.mark.parametrize("name", BY_RULE)
def test_any_mistake_is_found(name):
    chance = random.Random(0)
    for _ in range(400):
        devices = chance.choice([d for d in range(2, 7) if options_of(name, d)])
        micro_batches = chance.randint(max(2, least_micro_batches(name, devices)), 9)
        options = chance.choice(options_of(name, devices))
        sync = chance.choice(SYNC)
        schedule = build_schedule(name, devices=devices, micro_batches=micro_batches, sync=sync, **options)
        mistake, wrong = mutations(schedule, chance)
        try:
            check(wrong)
        except ScheduleError:
            continue
        raise AssertionError(f"the checker does not find the mistake {mistake!r}: {wrong}")


@pytest.mark.parametrize("name", BY_RULE)
def test_messages_out_of_order_are_found(name):
    """Two exchanged forwards of the last stage give a send that is never received or a backward that is too early."""
    for devices in (2, 4, 6):
        micro_batches = 3 * devices
        schedule = build_schedule(name, devices=devices, micro_batches=micro_batches)
        operations = list(schedule.operations[schedule.device_of[schedule.stages - 1, 0]])
        first, second = [
            i for i, o in enumerate(operations) if o.kind is Kind.FORWARD and o.stage == schedule.stages - 1
        ][:2]
        operations[first], operations[second] = operations[second], operations[first]
        changed = list(schedule.operations)
        changed[schedule.device_of[schedule.stages - 1, 0]] = tuple(operations)
        with pytest.raises(ScheduleError):
            check(replace(schedule, operations=tuple(changed)))


def test_an_operation_names_its_micro_batch():
    """The message about a doubled forward names the micro-batch that is wrong."""
    with pytest.raises(ScheduleError, match="F1@0 follows F"):
        check(by_hand("F1@0 F0+1@0 B0@0 B1@0 S@0 U@0", SECOND))
    assert str(Operation(Kind.FORWARD, 0, (0, 1))) == "F0+1@0"
