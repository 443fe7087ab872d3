"""The real Exchange, Executor and GradientSync on simulated devices: all programs end with the right numbers."""

from collections import defaultdict, deque
from dataclasses import replace
from functools import cache
from random import Random
from unittest.mock import patch

import pytest

from auto3d.runtime import run_ahead
from auto3d.runtime.messages.exchange import Exchange
from auto3d.runtime.messages.gradient_sync import GradientSync
from auto3d.runtime.run_ahead import RunAhead
from auto3d.schedule import build_schedule
from auto3d.schedule.check import ScheduleError
from auto3d.schedule.common_order import check_progress
from auto3d.schedule.lowering import lower
from auto3d.schedule.program import Message, Program
from tests.schedule.samples import BY_RULE
from tests.streams.grid import cases, skips
from tests.streams.machine import DeadlockError, RaceError
from tests.streams.simulation import Case, bytes_of_messages, simulate

SAMPLE = 3  # number of cases for each schedule


@cache
def whole() -> list[Case]:
    return list(cases(1))


def of(name: str) -> list[Case]:
    return [case for case in whole() if case.schedule.name == name]


def run_all(chosen: list[Case]) -> None:
    for case in chosen:
        try:
            simulate(case)
        except Exception as error:
            error.add_note(f"in the case {case}")
            raise


@pytest.mark.parametrize("name", BY_RULE)
def test_a_sample_ends_with_the_right_numbers(name):
    small = [case for case in of(name) if case.schedule.devices < 4 and sum(map(len, case.placement)) <= 6]
    run_all(Random(1).sample(small, SAMPLE))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BY_RULE)
def test_all_cases_end_with_the_right_numbers(name):
    run_all(of(name))


def two_posted_ahead(program: Program) -> Program:
    """Two receives from each peer are posted at the start, and another one whenever one is received."""
    waiting: dict[int, deque[Message]] = defaultdict(deque)
    for step in program.steps:
        for message in step.posts:
            waiting[message.source].append(message)
    begins = [[one for one in step.begins if not isinstance(one, Message)] for step in program.steps]
    begins[0] += [messages.popleft() for messages in waiting.values() for _ in range(min(2, len(messages)))]
    for number, step in enumerate(program.steps[:-1]):
        for message in step.receives:
            if waiting[message.source]:
                begins[number + 1].append(waiting[message.source].popleft())
    steps = [replace(step, begins=tuple(own)) for step, own in zip(program.steps, begins, strict=True)]
    return replace(program, steps=tuple(steps))


@pytest.mark.parametrize("circumstance", [{"queues": 1}, {"queues": 32, "synchronise": "steps"}], ids=str)
def test_receives_that_are_posted_two_ahead_block(circumstance):
    """This shows that the simulator can find the deadlocks that the tests above exclude."""
    case = Case(schedule=build_schedule("1f1b", devices=2, micro_batches=4), **circumstance)
    with pytest.raises(DeadlockError) as error:
        simulate(case, two_posted_ahead)
    first, second = str(error.value).splitlines()[1:]
    assert first.startswith("rank 0: the host is stuck in iteration 1 at")
    assert "gradients for B0@0 from stage 1 (rank 1) (rank 0 receives from rank 1) (spins until rank 1" in first
    assert second.startswith("rank 1: the host is stuck in iteration 1 at")
    assert " from stage 0 (rank 0) (rank 1 receives from rank 0) (spins until rank 0 " in second


def test_with_many_queues_and_no_synchronisation_they_do_not():
    simulate(Case(schedule=build_schedule("1f1b", devices=2, micro_batches=4), queues=32), two_posted_ahead)


def with_some_posted_earlier(programs: list[Program], draw: Random) -> list[Program]:
    """Programs of which some receives are posted one or two steps earlier, and in another order."""
    changed = []
    for program in programs:
        begins = [list(step.begins) for step in program.steps]
        for _ in range(draw.choice((1, 2, 8))):
            number = draw.randrange(1, len(begins))
            messages = [one for one in begins[number] if isinstance(one, Message)]
            if messages:
                moved = draw.choice(messages)
                begins[number].remove(moved)
                earlier = begins[max(0, number - draw.choice((1, 2)))]
                earlier.insert(draw.choice((0, len(earlier))), moved)
        steps = [replace(step, begins=tuple(own)) for step, own in zip(program.steps, begins, strict=True)]
        changed.append(replace(program, steps=tuple(steps)))
    return changed


def test_what_the_static_proof_accepts_ends_and_what_it_refuses_does_not():
    draw, verdicts = Random(1), []
    for seed in range(30):
        name = draw.choice(("gpipe", "1f1b", "zb-h1", "early-recompute", "zb-v"))
        schedule = build_schedule(name, devices=2, micro_batches=draw.choice((2, 4)))
        case = Case(schedule=schedule, skips=skips(schedule.stages) if draw.random() < 0.5 else (), seed=seed)
        programs = with_some_posted_earlier(lower(schedule, case.transfers(1)), draw)
        given = {stage_of(program): program for program in programs}
        try:
            check_progress(programs, schedule.device_of)
            verdicts.append(True)
        except ScheduleError:
            verdicts.append(False)
        for circumstance in ({"queues": 1}, {"queues": 32, "synchronise": "calls"}):
            try:
                simulate(replace(case, **circumstance), lambda program, given=given: given[stage_of(program)])
                ends = True
            except AssertionError:  # a deadlock or, if messages are swapped, wrong numbers
                ends = False
            assert ends == verdicts[-1], f"{case} {circumstance}"
    assert verdicts.count(True) > 5
    assert verdicts.count(False) > 5


def stage_of(program: Program) -> int:
    return program.steps[0].operation.stage


CHAIN = Case(schedule=build_schedule("1f1b", devices=2, micro_batches=4), dp=2)


def test_messages_that_nothing_waits_for_are_found():
    with patch.object(RunAhead, "wait", lambda *_: None), pytest.raises(RaceError, match="nothing orders the two"):
        simulate(CHAIN)


def test_sums_that_nothing_waits_for_are_found():
    with patch.object(GradientSync, "wait", lambda *_: None), pytest.raises(RaceError, match="gradient all-reduce"):
        simulate(CHAIN)


def test_sends_that_are_never_released_are_found():
    with (
        patch.object(Exchange, "release", lambda *_: None),
        patch.object(Exchange, "end", lambda *_: None),
        pytest.raises(AssertionError, match="more messages than its program says"),
    ):
        simulate(CHAIN)


def test_a_host_without_a_bound_is_found():
    with patch.object(run_ahead, "OPERATIONS_AHEAD", 100), pytest.raises(AssertionError, match="3 operations ahead"):
        simulate(CHAIN)


def test_the_bytes_of_messages_are_those_of_the_program():
    """Nor fewer, if each stage is the only one of its device."""
    case = Case(schedule=build_schedule("zb-h2", devices=3, micro_batches=4), queues=32)
    programs = lower(case.schedule, case.transfers(1))
    assert simulate(case) == [bytes_of_messages(program, case, device) for device, program in enumerate(programs)]
