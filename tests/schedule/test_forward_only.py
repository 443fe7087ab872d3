"""The forwards of every schedule run alone, and the checker refuses what is not exactly that."""

from dataclasses import replace

import pytest

from auto3d.schedule.check import ScheduleError, check
from auto3d.schedule.forward_only import forward_only
from auto3d.schedule.operation import Kind, Operation
from tests.schedule.samples import BY_RULE, least_micro_batches, schedules, sizes


@pytest.mark.parametrize("name", BY_RULE)
def test_the_forwards_of_every_schedule_run_alone(name):
    for devices in (1, 2, 4):
        numbers = [number for number in sizes(devices) if number >= least_micro_batches(name, devices)]
        for schedule in schedules(name, devices, numbers, syncs=("lazy",)):
            if schedule.iterations == 1:
                check(forward_only(schedule))


def test_other_lists_are_refused():
    schedule = forward_only(next(schedules("1f1b", 2, [4], syncs=("lazy",))))
    first, last = schedule.operations
    wrong = {
        "is missing": (first[:-1], last),
        "follows F": ((*first, first[0]), last),
        "is no forward": (first, (*last, Operation(Kind.UPDATE, 1))),
        "deadlock": (tuple(reversed(first)), last),
    }
    for message, operations in wrong.items():
        with pytest.raises(ScheduleError, match=message):
            check(replace(schedule, operations=operations))
    with pytest.raises(ScheduleError):
        check(replace(schedule, forward_only=False))
