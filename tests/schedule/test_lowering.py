"""Lowered programs: every message is received once, in the order of its sender, and released in time."""

import pytest

from auto3d.capture.graph import Value
from auto3d.partition.stage import Transfer
from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.check import ScheduleError
from auto3d.schedule.common_order import check_progress
from auto3d.schedule.lowering import SENT_AT_MOST, lower
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.program import GradientSum, Message, Program, without
from tests.schedule.samples import BY_RULE, by_hand, schedules


def transfers(stages: int, *skips: tuple[int, int]) -> list[Transfer]:
    pairs = [(stage, stage + 1) for stage in range(stages - 1)] + list(skips)
    return [Transfer(value=Value(f"v{a}", (2,), "float32", 4, True), source=a, target=b) for a, b in pairs]


# Schedules with forwards and whole backwards on one pipe and one update at the end.
CASES = [
    (name, stages, skips)
    for name in ("gpipe", "1f1b", "interleaved-1f1b")
    for stages, skips in ((1, ()), (2, ()), (4, ()), (5, ((0, 4), (1, 3))), (6, ((0, 4), (1, 3))))
    if name != "interleaved-1f1b" or stages % 2 == 0
]


def built(name: str, stages: int, micro_batches: int) -> Schedule:
    chunks = 2 if name == "interleaved-1f1b" else 1
    return build_schedule(name, devices=stages // chunks, micro_batches=micro_batches)


@pytest.mark.parametrize(("name", "stages", "skips"), CASES)
def test_messages_match(name, stages, skips):
    for micro_batches in (1, 3, 8):
        schedule = built(name, stages, micro_batches)
        programs = lower(schedule, transfers(stages, *skips))
        sent = [message for program in programs for step in program.steps for message in step.sends]
        received = [message for program in programs for step in program.steps for message in step.receives]
        expected = 2 * micro_batches * (stages - 1 + len(skips))
        assert len(sent) == len(set(sent)) == expected
        assert sorted(map(str, received)) == sorted(map(str, sent))
        for device, program in enumerate(programs):
            assert [step.operation for step in program.steps] == list(schedule.operations[device])
            for peer in set(range(schedule.devices)) - {device}:
                order = [
                    m for step in programs[peer].steps for m in step.sends if schedule.device_of[m.target, 0] == device
                ]
                posted = [m for step in program.steps for m in step.posts if schedule.device_of[m.source, 0] == peer]
                assert posted == order


def happens_before(programs) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """By brute force, for each step (device, index): all steps that must have ended before it can begin."""
    sender = {m: (d, i) for d, p in enumerate(programs) for i, step in enumerate(p.steps) for m in step.sends}
    before: dict[tuple[int, int], set[tuple[int, int]]] = {}

    def of(device: int, index: int) -> set[tuple[int, int]]:
        if (device, index) not in before:
            direct = [(device, index - 1)] if index else []
            direct += [sender[message] for message in programs[device].steps[index].receives]
            before[device, index] = set(direct).union(*(of(*step) for step in direct)) if direct else set()
        return before[device, index]

    for device, program in enumerate(programs):
        for index in range(len(program.steps)):
            of(device, index)
    return before


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("skips", [(), ((0, 3),)])
def test_a_message_is_released_once_its_receive_is_surely_posted_or_too_many_are_kept(name, skips):
    schedule = build_schedule(name, devices=4, micro_batches=8)
    programs = lower(schedule, transfers(4, *skips))
    before = happens_before(programs)
    posted = {m: (d, i) for d, p in enumerate(programs) for i, step in enumerate(p.steps) for m in step.posts}
    proved = unproved = 0
    for device, program in enumerate(programs):
        held: dict[int, list[Message]] = {peer: [] for peer in range(4)}
        for index, step in enumerate(program.steps):
            expected = []
            for peer, messages in held.items():
                sends = [message for message in step.sends if schedule.device_of[message.target, 0] == peer]
                while messages:
                    is_proved = posted[messages[0]] in before[device, index]
                    if not is_proved and len(messages) + len(sends) <= SENT_AT_MOST:
                        break
                    expected.append(messages.pop(0))
                    proved, unproved = proved + is_proved, unproved + (not is_proved)
                assert not any(posted[message] in before[device, index] for message in messages)
                messages += sends
            assert sorted(map(str, step.releases)) == sorted(map(str, expected)), f"step {index} of device {device}"
    assert proved > 0
    assert (unproved > 0) == (name == "gpipe")


def test_only_differentiable_values_send_gradients_back():
    values = [Value("hidden", (2,), "float32", 4, True), Value("index", (2,), "int64", 8, False)]
    schedule = build_schedule("gpipe", devices=3, micro_batches=1)
    crossing = [
        Transfer(value=values[0], source=0, target=1),
        Transfer(value=values[1], source=0, target=2),
        Transfer(value=values[0], source=1, target=2),
    ]
    sent = {message for program in lower(schedule, crossing) for step in program.steps for message in step.sends}
    assert Message(Kind.FORWARD, 0, 2, 0) in sent
    assert Message(Kind.BACKWARD, 2, 0, 0) not in sent
    assert Message(Kind.BACKWARD, 2, 1, 0) in sent


def test_operations_that_cannot_all_run_are_refused():
    with pytest.raises(ScheduleError, match="deadlock: device 0 at B0@0"):
        lower(by_hand("F0@0 B0@0 F1@0 B1@0 S@0 U@0", "F0@1 F1@1 B0@1 B1@1 S@1 U@1"), transfers(2))


def whole_schedules() -> list[str]:
    """Synchronous schedules that run micro-batches whole."""
    return [name for name in BY_RULE if not SCHEDULES[name].asynchronous and name != "seq1f1b"]


@pytest.mark.parametrize("name", whole_schedules())
def test_a_program_without_its_last_micro_batches_ends_and_runs_all_others(name):
    for devices in (2, 4):
        for schedule in schedules(name, devices, [2 * devices, 2 * devices + 1]):
            if schedule.parts > 1:
                continue
            summed = [(stage,) for stage in range(schedule.stages)]
            programs = lower(schedule, transfers(schedule.stages), summed)
            for first in (0, 1, devices, schedule.micro_batches - 1):
                absent = range(first, schedule.micro_batches)
                rest = [without(program, absent) for program in programs]
                check_progress(rest, schedule.device_of)
                for device, program in enumerate(rest):
                    expected = [
                        operation._replace(micro_batches=tuple(m for m in operation.micro_batches if m < first))
                        for operation in schedule.operations[device]
                    ]
                    ran = [step.operation for step in program.steps]
                    assert ran == [one for one in expected if one.micro_batches or one.kind in (Kind.SYNC, Kind.UPDATE)]
                    for pipe_stage, versions in programs[device].versions.items():
                        assert program.versions[pipe_stage] == {m: versions[m] for m in versions if m < first}
                    sums = [one for each in (programs[device], program) for one in sums_of(each)]
                    assert sums[: len(sums) // 2] == sums[len(sums) // 2 :], "in the same order"


def sums_of(program: Program) -> list[GradientSum]:
    return [one for step in program.steps for one in step.begins if isinstance(one, GradientSum)]
