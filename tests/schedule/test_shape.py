"""The shape of a schedule agrees with the list of its operations."""

import numpy as np
import pytest

from auto3d.capture.graph import Value
from auto3d.errors import InputError
from auto3d.partition.stage import Transfer
from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.in_flight import in_flight
from auto3d.schedule.lowering import lower
from auto3d.schedule.moments import COLUMN, Counts, all_moments, highest_moments
from auto3d.schedule.operation import BACKWARDS, Kind, Schedule
from auto3d.schedule.shape import Shape, shape
from tests.schedule.samples import BY_RULE
from tests.soak import soak

OPTIONS = {
    "interleaved-1f1b": {"chunks": 3, "group": 5, "fewer": 1},
    "interleaved-zero-bubble": {"chunks": 3, "group": 3},
    "hanayo": {"waves": 2},
    "seq1f1b": {"slices": 5},
    "chimera": {"scale": "doubling", "pipes": 2},
}


def most(moments) -> list[list[int]]:
    """Per stage, the largest of each count but those of messages."""
    return np.array([one.counts for one in moments]).max(axis=0)[:, : COLUMN.posted].tolist()


def messages_are_held_as_lowering_holds_them(listed: Schedule) -> None:
    """Receives are posted at the same steps. A message is released at the same step or, rarely, later."""
    value = Value("", (), "float32", 4, True)
    transfers = [Transfer(value=value, source=n - 1, target=n) for n in range(1, listed.stages)]
    for device, (program, moments) in enumerate(zip(lower(listed, transfers), all_moments(listed), strict=True)):
        posted: set = set()
        sent: set = set()
        for step, moment in zip(program.steps, moments, strict=True):
            posted.update(step.posts)
            posted.difference_update(step.receives)
            sent.difference_update(step.releases)
            sums = Counts(*map(sum, zip(*moment.counts, strict=True)))
            assert sums.posted + sums.posted_gradients == len(posted), (device, str(step.operation))
            assert sums.sent + sums.sent_gradients >= len(sent), (device, str(step.operation))
            sent.update(m for m in step.sends if listed.device_of[m.target, m.pipe] != device)


def assert_shape(predicted: Shape, listed: Schedule) -> None:
    """``predicted`` is the shape of ``listed``, whose operations are counted one by one."""
    assert predicted.in_flight == tuple(in_flight(listed))
    peaks = [most(highest_moments(predicted, device)) for device in range(predicted.devices)]
    assert peaks == [most(moments) for moments in all_moments(listed)], listed.micro_batches
    for field in ("stages", "devices", "micro_batches", "device_of", "recompute", "parts", "slices", "sample_parts"):
        assert getattr(predicted, field) == getattr(listed, field), field
    halves = {o.stage for operations in listed.operations for o in operations if o.kind is Kind.BACKWARD_WEIGHT}
    assert predicted.split == halves
    passes = [
        [o.kind is Kind.FORWARD for o in each if o.kind is Kind.FORWARD or o.kind in BACKWARDS]
        for each in listed.operations
    ]
    assert predicted.alternates == any(each != sorted(each, reverse=True) for each in passes)
    assert predicted.schedule() == listed


@pytest.mark.parametrize("name", BY_RULE)
def test_the_option_to_recompute_changes_no_operation(name):
    """So what a device holds is counted once for both."""
    if "recompute" not in SCHEDULES[name].options:
        with pytest.raises(InputError, match="option 'recompute' is unknown"):
            shape(name, devices=4, micro_batches=8, options={"recompute": "full"})
        return
    for options in ({}, OPTIONS.get(name, {}), {"sync": "eager-opt"}):
        sizes = {"devices": 4, "micro_batches": 8}
        keeping, recomputing = (shape(name, **sizes, options=options | more) for more in ({}, {"recompute": "full"}))
        assert_shape(recomputing, build_schedule(name, **sizes, **options, recompute="full"))
        assert recomputing.schedule().operations == keeping.schedule().operations
        for device in range(4):
            pairs = zip(highest_moments(keeping, device), highest_moments(recomputing, device), strict=True)
            assert all(one is other for one, other in pairs)


@pytest.mark.parametrize("name", BY_RULE)
def test_messages_are_held_as_lowering_holds_them(name):
    for devices, micro_batches in ((2, 4), (4, 8)):
        messages_are_held_as_lowering_holds_them(build_schedule(name, devices=devices, micro_batches=micro_batches))


@pytest.mark.parametrize("name", BY_RULE)
@pytest.mark.parametrize(
    ("devices", "most"), [(1, 5), (2, 11), (4, 13), *soak((1, 10), (2, 19), (3, 28), (4, 37), (6, 55))]
)
def test_a_shape_is_that_of_the_schedule(name, devices, most):
    for options in ({}, OPTIONS.get(name, {}), {"sync": "eager-opt"}):
        for micro_batches in range(1, most + 1):
            sizes = {"devices": devices, "micro_batches": micro_batches}
            try:
                listed = build_schedule(name, **sizes, **options)
            except InputError:
                continue
            assert_shape(shape(name, **sizes, options=options), listed)
