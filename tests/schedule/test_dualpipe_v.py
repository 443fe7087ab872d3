"""DualPipeV has the order of torch.distributed.pipelining."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from auto3d.schedule import build_schedule
from auto3d.schedule.operation import Kind


@pytest.mark.parametrize("devices", range(1, 9))
def test_the_order_is_that_of_torch(devices):
    for micro_batches in (2 * devices, 2 * devices + 1, 3 * devices, 5 * devices + 2):
        schedule = build_schedule("dualpipe-v", devices=devices, micro_batches=micro_batches)
        sizes = SimpleNamespace(pp_group_size=devices, _n_microbatches=micro_batches)
        for device, operations in enumerate(schedule.operations):
            actions = ScheduleDualPipeV._calculate_single_rank_operations(sizes, device)
            torchs = [str(one) for action in actions for one in action.sub_actions or (action,)]  # pairs are two
            ours = [
                f"{o.stage}{o.kind}{o.micro_batches[0]}" for o in operations if o.kind not in (Kind.SYNC, Kind.UPDATE)
            ]
            assert ours == torchs


@pytest.mark.parametrize("devices", [1, 2, 5])
def test_fewer_micro_batches_leave_out_the_surplus_ones(devices):
    whole = build_schedule("dualpipe-v", devices=devices, micro_batches=2 * devices)
    for micro_batches in range(1, 2 * devices):
        schedule = build_schedule("dualpipe-v", devices=devices, micro_batches=micro_batches)
        for operations, all_operations in zip(schedule.operations, whole.operations, strict=True):
            kept = [o for o in all_operations if not o.micro_batches or o.micro_batches[0] < micro_batches]
            assert list(operations) == kept
