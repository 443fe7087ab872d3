"""The shape of a schedule agrees with the list of its operations."""

import pytest

from auto3d.errors import InputError
from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.in_flight import holdings, in_flight
from auto3d.schedule.operation import Kind
from auto3d.schedule.shape import shape

OPTIONS = {"interleaved-1f1b": {"chunks": 3}, "chimera": {"scale": "doubling", "pipes": 2}}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6])
def test_a_shape_is_that_of_the_schedule(name, devices):
    for options in ({}, OPTIONS.get(name, {})):
        for micro_batches in range(1, 9 * devices + 2):
            sizes = {"devices": devices, "micro_batches": micro_batches}
            try:
                listed = build_schedule(name, **sizes, **options)
            except InputError:
                continue
            predicted = shape(name, **sizes, options=options)
            assert predicted.in_flight == tuple(in_flight(listed))
            assert predicted.holdings == holdings(listed)
            for field in ("stages", "devices", "micro_batches", "device_of", "recompute", "parts"):
                assert getattr(predicted, field) == getattr(listed, field), field
            kinds = {operation.kind for operations in listed.operations for operation in operations}
            assert predicted.splits_backward == (Kind.BACKWARD_WEIGHT in kinds)
            assert predicted.schedule() == listed
