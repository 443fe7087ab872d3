"""The simulator, against a plain reference and against properties of every timeline."""

import itertools
import random
from dataclasses import replace

import pytest

from auto3d.errors import InputError
from auto3d.schedule import build_schedule
from auto3d.schedule.check import ScheduleError, _check_slices
from auto3d.schedule.operation import Schedule, parse
from auto3d.simulate.costs import Costs, MessageCost, SharedMachine, uniform
from auto3d.simulate.critical_path import count, critical_numbers, critical_path
from auto3d.simulate.idle import bubble_ratio, busy, idle, idle_within, steady_state
from auto3d.simulate.simulate import Timeline, simulate
from tests.each import for_each
from tests.schedule.samples import BY_RULE
from tests.simulate.random_schedules import random_costs, random_schedule
from tests.simulate.reference import reference_times

SEEDS = range(400)
SLICED = 200  # the first seed whose micro-batches have slices
SUMS_COST = 260  # the first seed whose all-reduces cost the compute beside them time


def random_case(seed: int) -> tuple[Schedule, Costs]:
    chance = random.Random(seed)
    sliced = seed in range(SLICED, SUMS_COST) or seed % 4 == 3
    schedule = random_schedule(chance, slices=2 + seed % 2 if sliced and seed >= SLICED else 1)
    return schedule, random_costs(chance, schedule, sums_cost=seed >= SUMS_COST)


def by_place(timeline: Timeline) -> dict[tuple[int, int], tuple[float, float]]:
    return {
        (device, index): (timeline.start[number], timeline.end[number])
        for device in range(timeline.schedule.devices)
        for index, number in enumerate(timeline.numbers(device))
    }


@for_each("seed", SEEDS)
def test_equal_to_the_reference(seed):
    schedule, costs = random_case(seed)
    found, wanted = by_place(simulate(schedule, costs)), reference_times(schedule, costs)
    assert found.keys() == wanted.keys()
    for place, times in wanted.items():
        assert found[place] == pytest.approx(times, abs=1e-9), schedule.operations[place[0]][place[1]]


def with_inputs(seed: int) -> tuple[Schedule, Costs]:
    """A random case in which stage 0 reads for others: of whole micro-batches, and for some of the later stages."""
    schedule, costs = random_case(seed)
    chance = random.Random(seed)
    times = (chance.choice((0.0, 0.5, 3.0)) if stage > 1 else 0.0 for stage in range(schedule.stages))
    return schedule, replace(costs, inputs=tuple(times))


WITH_INPUTS = [*range(SLICED), *range(SUMS_COST, 400)]


@for_each("seed", WITH_INPUTS)
def test_messages_of_inputs_are_those_of_the_reference(seed):
    """Also where a machine that slows nobody has the events of the slower way."""
    schedule, costs = with_inputs(seed)
    machines = (SharedMachine(slowdown=(1.0,) * 4, processes=(1,) * schedule.devices),)
    wanted = reference_times(schedule, costs)
    for each in (costs, replace(costs, shared_machines=machines)):
        timeline = simulate(schedule, each)
        for place, times in by_place(timeline).items():
            assert times == pytest.approx(wanted[place], abs=1e-9), schedule.operations[place[0]][place[1]]
        assert critical_numbers(timeline)


def test_messages_of_inputs_change_some_timelines():
    cases = [with_inputs(seed) for seed in WITH_INPUTS]
    later = [
        simulate(schedule, costs).makespan > simulate(schedule, replace(costs, inputs=())).makespan
        for schedule, costs in cases
        if any(costs.inputs)
    ]
    assert sum(later) > 20
    assert any(not costs.overlap and any(costs.inputs) for _, costs in cases)


def test_random_cases_have_what_the_simulator_knows():
    cases = [random_case(seed) for seed in SEEDS]
    unequal = [schedule for schedule, costs in cases if costs.forward_of_slice and costs.backward_of_slice]
    assert len(unequal) > 20
    for schedule in unequal:
        _check_slices(schedule)
    assert any(schedule.recompute and schedule.iterations > 1 for schedule in unequal)
    assert any(bool(costs.forward_of_slice) != bool(costs.backward_of_slice) for _, costs in cases)
    assert any(len(o.micro_batches) > 1 for schedule, _ in cases for row in schedule.operations for o in row)


@for_each("seed", range(SUMS_COST))
def test_times_of_single_operations_replace_those_of_stages(seed):
    schedule, costs = random_case(seed)
    wanted = simulate(schedule, costs)
    times = tuple((seconds, after) for seconds, after, *_ in wanted.work.steps)
    found = simulate(schedule, replace(uniform(schedule), overlap=costs.overlap, by_operation=times))
    assert (found.start, found.end, found.arrival) == (wanted.start, wanted.end, wanted.arrival)
    assert found.syncs == wanted.syncs


@for_each("seed", SEEDS)
def test_what_holds_of_any_timeline(seed):
    schedule, costs = random_case(seed)
    timeline = simulate(schedule, costs)
    for device, work in enumerate(busy(timeline)):
        numbers = timeline.numbers(device)
        for one, next_one in itertools.pairwise(numbers):
            assert timeline.start[next_one] >= timeline.end[one]
        assert timeline.makespan >= work - 1e-9
    assert min(idle(timeline)) >= -1e-9
    assert all(within <= whole + 1e-9 for within, whole in zip(idle_within(timeline), idle(timeline), strict=True))
    assert -1e-9 <= bubble_ratio(timeline) <= 1
    assert timeline.makespan == max([*timeline.end, *(sync.end for sync in timeline.syncs)])


@for_each("seed", SEEDS)
def test_the_critical_path_has_no_slack(seed):
    """On the path from 0 to the makespan, each operation starts when the previous one, or its message, has ended."""
    schedule, costs = random_case(seed)
    timeline = simulate(schedule, costs)
    path = critical_numbers(timeline)
    if timeline.makespan == 0:
        return
    receive = timeline.work.receive or [0.0] * len(timeline.start)
    assert timeline.start[path[0]] == pytest.approx(receive[path[0]])
    queued = bool(costs.overlap) and any(link.latency or link.forward or link.backward for link in costs.messages)
    for one, next_one in itertools.pairwise(path):
        gap = timeline.start[next_one] - receive[next_one] - timeline.end[one]
        if gap > 1e-9:
            _, after, link, _ = timeline.work.steps[one]
            assert after > 0
            assert gap <= after + 1e-9 or link < 0 or queued
    _, after, *_ = timeline.work.steps[path[-1]]
    assert timeline.end[path[-1]] + after >= timeline.makespan - 1e-9


def test_a_message_waits_only_for_earlier_ones_of_its_direction():
    schedule = by_hand("F0@0 F1@0 B0@0 B1@0", "F0@1 F1@1 B0@1 B1@1")
    costs = replaced(uniform(schedule, backward=1), messages=(MessageCost(latency=1, forward=2, backward=0.5),))
    timeline = simulate(schedule, costs)
    assert timeline.start == [0, 1, 10.5, 12, 4, 7, 8, 9]
    assert [timeline.arrival[n] for n in (0, 1, 6, 7)] == [4, 7, 10.5, 12]
    # The message of F1 leaves when that of F0 has arrived, so F0 is on the path. So is B0@1, for the message of B1@1.
    assert [str(o) for o in critical_path(timeline)] == ["F0@0", "F1@1", "B0@1", "B1@0"]


def test_an_all_reduce_that_ends_last_waits_for_the_one_before_it():
    one_device = by_hand("F0@0 F0@1 B0@1 S@1 B0@0 S@0", micro_batches=1)
    schedule = replace(one_device, device_of={(0, 0): 0, (1, 0): 0})
    costs = replaced(uniform(schedule), forward=(1, 1), backward=(2, 2), sync=(1, 9))
    timeline = simulate(schedule, costs)
    assert [(sync.begin, sync.end) for sync in timeline.syncs] == [(13, 14), (4, 13)]
    assert [str(o) for o in critical_path(timeline)] == ["F0@0", "F0@1", "B0@1", "S@1"]


@pytest.mark.parametrize(("message", "begin"), [(2.0, 6.0 + 2.0), (5.0, 3.0 + 2 * 5.0)])
def test_an_operation_on_several_micro_batches_sends_each_once_it_is_done(message, begin):
    """Each forward takes 3. The first message leaves halfway through F0+1, and the second follows it."""
    schedule = by_hand("F0+1@0 B0@0 B1@0", "F0+1@1 B0@1 B1@1")
    costs = replaced(uniform(schedule, forward=3, backward=1), messages=(MessageCost(forward=message),))
    assert simulate(schedule, costs).start[3] == begin


def test_messages_without_overlap_occupy_both_ends():
    schedule = by_hand("F0@0 F1@0 B0@0 B1@0", "F0@1 B0@1 F1@1 B1@1")
    costs = replaced(uniform(schedule, backward=1, overlap=False), messages=(MessageCost(latency=1),))
    timeline = simulate(schedule, costs)
    # F0 0-1, sent 1-2; F1 2-3, sent 3-4 | F0 received 1-2, 2-3, B0 3-4, sent 4-5, F1 received 5-6, 6-7, B1 7-8
    assert timeline.start == [0, 2, 5, 9, 2, 3, 6, 7]


def test_an_all_reduce_overlaps_compute_once_all_pipes_have_started_it():
    schedule = by_hand("F0@0 B0@0 S@0 F1@0:1 B1@0:1 S@0:1 U@0 U@0:1", stages=1, pipes=2)
    timeline = simulate(schedule, replaced(uniform(schedule), sync=(5.0,)))
    (sync,) = timeline.syncs
    assert (sync.begin, sync.end, timeline.makespan) == (6, 11, 11)


def test_the_all_reduces_of_a_device_take_turns():
    schedule = by_hand("F0@0 F0@1 B0@1 S@1 B0@0 S@0 U@0 U@1", micro_batches=1)
    schedule = replace(schedule, device_of={(0, 0): 0, (1, 0): 0})
    timeline = simulate(schedule, replaced(uniform(schedule), sync=(3.0, 4.0)))
    first, second = timeline.syncs
    assert (second.begin, second.end) == (2, 6)
    assert (first.started, first.begin, first.end) == ({0: 3}, 6, 9)
    assert timeline.makespan == 9


def test_recomputation_is_inside_the_backward_if_there_is_no_r_before():
    schedule = by_hand("F0@0 F1@0 R1@0 B1@0 B0@0", stages=1, recompute=frozenset({0}))
    timeline = simulate(schedule, uniform(schedule, recompute=1.5))
    assert timeline.end == [1, 2, 3.5, 5.5, 9]


def test_parts_and_speeds():
    schedule = by_hand("F0+1@0 B0@0 B1@0", stages=1, micro_batches=1, parts=2)
    assert simulate(schedule, uniform(schedule)).end == [1, 2, 3]
    assert simulate(schedule, replaced(uniform(schedule), speed=(2.0,))).end == [0.5, 1, 1.5]


def test_slices_have_times_of_their_own():
    schedule = by_hand("F0@0 F1@0 B1@0 B0@0", "F0@1 F1@1 B1@1 B0@1", micro_batches=1, parts=2, slices=2)
    times = {"forward_of_slice": ((0.25, 0.75), (0.5, 0.5)), "backward_of_slice": ((0.5, 1.5), (0.25, 1.75))}
    costs = replaced(uniform(schedule), **times, messages=(MessageCost(forward=1.0, backward=2.0),))
    timeline = simulate(schedule, costs)
    # F0 arrives at 0.25 + 0.5, F1 behind it at 1.5; B1 leaves at 3.75, B0 at 4
    assert timeline.start[4:] == [0.75, 1.5, 2, 3.75]
    assert timeline.start[:4] == [0, 0.25, 4.75, 6.25]
    assert timeline.makespan == 6.75
    fast = simulate(schedule, replaced(costs, speed=(2.0, 1.0)))
    assert fast.end[:2] == [0.125, 0.5]


def test_halves_and_recomputations_of_slices_are_equal_parts():
    schedule = by_hand(
        "F0@0 F1@0 R1@0 I1@0 B0@0 W1@0", stages=1, micro_batches=1, parts=2, slices=2, recompute=frozenset({0})
    )
    costs = replaced(
        uniform(schedule, recompute=0.5, backward_input=1.5, backward_weight=0.5),
        forward_of_slice=((0.25, 0.75),),
        backward_of_slice=((0.5, 1.5),),
    )
    assert simulate(schedule, costs).end == [0.25, 1, 1.25, 2, 2.75, 3]


def test_a_deadlock_names_the_operations():
    schedule = by_hand("F0@0 B0@0 F1@0 B1@0", "F0@1 F1@1 B0@1 B1@1")
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, uniform(schedule))
    assert str(caught.value) == "deadlock: device 0 before B0@0 waits for B0@1; device 1 before F1@1 waits for F1@0"


@pytest.mark.parametrize(("depth", "pipes"), [(2, 2), (4, 2), (6, 2), (8, 2), (8, 4), (16, 8)])
def test_the_critical_path_of_chimera(depth, pipes):
    """C_f = D and C_b = 2D - 2, as in the paper's figure 6: 6 and 10; with more pipes there are other paths."""
    schedule = build_schedule("chimera", devices=depth, micro_batches=depth, pipes=pipes)
    path = critical_path(simulate(schedule, uniform(schedule)))
    forwards, backwards = count(path)
    if pipes == 2:
        assert (forwards, backwards) == (depth, 2 * depth - 2)
    assert forwards + 2 * backwards == simulate(schedule, uniform(schedule)).makespan


@pytest.mark.parametrize(("name", "recompute"), [("1f1b", {"recompute": "full"}), ("early-recompute", {})])
def test_the_critical_path_of_1f1b_is_pinned_on_the_last_stage(name, recompute):
    """As Merak's figure 4 draws it."""
    schedule = build_schedule(name, devices=4, micro_batches=5, **recompute)
    timeline = simulate(schedule, uniform(schedule))
    path = [timeline.device_of(operation) for operation in critical_path(timeline) if operation.micro_batches]
    assert path == [0, 1, 2, *[3] * (len(path) - 6), 2, 1, 0]


def test_idle_in_two_ways():
    """Devices of ZB-H1 idle less between their first and last operation than until the makespan."""
    schedule = build_schedule("zb-h1", devices=4, micro_batches=8)
    timeline = simulate(schedule, uniform(schedule, backward=2))
    assert idle(timeline) == [3, 3, 3, 3]
    assert idle_within(timeline) == [3, 2, 1, 0]


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_steady_state_has_no_bubbles(name, depth):
    schedule = build_schedule(name, devices=depth, micro_batches=depth, iterations=8)
    steady = steady_state(simulate(schedule, uniform(schedule)))
    assert steady.iteration_time == pytest.approx(3 * depth)
    assert steady.bubble_ratio == pytest.approx(0)


def test_the_steady_state_goes_at_the_pace_of_the_slowest_device():
    schedule = build_schedule("pipedream-2bw", devices=4, micro_batches=6, iterations=8)
    for slow in range(4):
        speed = tuple(0.5 if device == slow else 1.0 for device in range(4))
        steady = steady_state(simulate(schedule, replaced(uniform(schedule), speed=speed)))
        assert steady.iteration_time == pytest.approx(6 * 6)
        assert steady.bubble_ratio == pytest.approx(1 - (3 + 6) * 6 / (4 * 36) - 3 * 6 * 2 / (4 * 36))
        short = build_schedule(
            "pipedream", devices=4, micro_batches=1, iterations=2
        )  # all micro-batches are in flight at once
        steady = steady_state(simulate(short, replaced(uniform(short), speed=speed)))
        assert steady.iteration_time == pytest.approx(6)
    synchronous = build_schedule("1f1b", devices=4, micro_batches=6)
    assert steady_state(simulate(synchronous, uniform(synchronous))) is None


@pytest.mark.parametrize("name", BY_RULE)
def test_no_time_at_all(name):
    schedule = build_schedule(name, devices=4, micro_batches=4)
    timeline = simulate(schedule, uniform(schedule, forward=0))
    assert (timeline.makespan, bubble_ratio(timeline)) == (0, 0)
    assert len(critical_path(timeline)) > 0


def test_costs_that_cannot_be():
    schedule = build_schedule("1f1b", devices=2, micro_batches=2)
    for wrong, words in [
        ({"forward": -1}, "forward of stage 0 is -1"),
        ({"p2p": float("nan")}, "messages forward of stage 0 is nan"),
        ({"sync": float("inf")}, "sync of stage 0 is inf"),
        ({"backward": 2, "backward_weight": 3}, "one half of the backward is longer"),
    ]:
        with pytest.raises(InputError, match=words):
            uniform(schedule, **wrong)
    with pytest.raises(InputError, match="speed of device 1 is 0"):
        replaced(uniform(schedule), speed=(1.0, 0.0))
    with pytest.raises(InputError, match="messages has 0 values; schedule 1f1b needs 1"):
        simulate(schedule, replaced(uniform(schedule), messages=()))


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"forward_of_slice": ((0.5, 0.5),)}, "forward_of_slice has 2 slices; .* for each of 2 stages"),
        ({"backward_of_slice": ((1, 1), (2,))}, "backward_of_slice has 2, 1 slices; .* equally many"),
        ({"forward_of_slice": ((0.5, 0.5), (1.5, -0.5))}, "forward of slice 1 of stage 1 is -0.5"),
        ({"forward_of_slice": ((0.5, 0.5), (0.5, 0.4))}, "slices of stage 1 add up to 0.9; forward of stage 1 is 1"),
        ({"backward_of_slice": ((0.5, 0.5), (1, 1))}, "slices of stage 0 add up to 1; backward of stage 0 is 2"),
        ({"recompute_of_slice": ((0.5, 0.4), (0.5, 0.5))}, "stage 0 add up to 0.9; recompute of stage 0 is 1"),
        ({"backward_of_slice": ((0.5, 0.5, 1),) * 2}, "backward_of_slice has 3 slices; schedule seq1f1b runs 2 slices"),
    ],
)
def test_times_of_slices_that_cannot_be(times, words):
    schedule = build_schedule("seq1f1b", devices=2, micro_batches=2)
    with pytest.raises(InputError, match=words):
        simulate(schedule, replaced(uniform(schedule), **times))
    whole = build_schedule("1f1b", devices=2, micro_batches=2)
    with pytest.raises(InputError, match="forward_of_slice has 2 slices; schedule 1f1b runs 1 slice per micro-batch"):
        simulate(whole, replaced(uniform(whole), forward_of_slice=((0.5, 0.5),) * 2))


def test_a_slice_is_recomputed_in_its_own_time():
    schedule = build_schedule("seq1f1b", devices=1, micro_batches=1, recompute="full")
    timeline = simulate(schedule, replaced(uniform(schedule), recompute_of_slice=((0.25, 0.75),)))
    lengths = [end - start for start, end in zip(timeline.start, timeline.end, strict=True)]
    assert dict(zip(map(str, timeline.operations), lengths, strict=True)) == {
        "F0@0": 0.5, "F1@0": 0.5, "B1@0": 1 + 0.75, "B0@0": 1 + 0.25, "S@0": 0, "U@0": 0,
    }  # fmt: skip


def test_halves_of_the_backward():
    schedule = build_schedule("1f1b", devices=2, micro_batches=2)

    def halves(**times: float) -> tuple[float, float, float]:
        costs = uniform(schedule, **times)
        return costs.backward[0], costs.backward_input[0], costs.backward_weight[0]

    assert halves() == (2, 1, 1)
    assert halves(backward=3) == (3, 1.5, 1.5)
    assert halves(backward=3, backward_input=1) == (3, 1, 2)
    assert halves(backward_weight=0.5) == (2, 1.5, 0.5)
    assert halves(backward_input=2, backward_weight=2) == (4, 2, 2)


def by_hand(
    *lines: str,
    stages: int = 2,
    micro_batches: int = 2,
    pipes: int = 1,
    parts: int = 1,
    slices: int = 1,
    recompute=frozenset(),
) -> Schedule:
    return Schedule(
        name="by hand",
        stages=stages,
        micro_batches=micro_batches,
        device_of={(stage, pipe): stage for stage in range(stages) for pipe in range(pipes)},
        operations=tuple(tuple(parse(word) for word in line.split()) for line in lines),
        parts=parts,
        slices=slices,
        recompute=recompute,
    )


def replaced(costs: Costs, **changes) -> Costs:
    return replace(costs, **changes)
