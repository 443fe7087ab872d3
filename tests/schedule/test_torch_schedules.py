"""Each schedule of torch.distributed.pipelining is one of ours: the same order, or another one that takes no longer."""

from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.operation import Kind, Operation, Schedule, parse
from auto3d.schedule.sync import place_syncs
from tests.schedule.reference import makespan

TORCH = "torch.distributed.pipelining"
FAMILIES = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleInterleavedZeroBubble": "interleaved-zero-bubble",
    "ScheduleZBVZeroBubble": "zb-v",
    "ScheduleDualPipeV": "dualpipe-v",
}
ELSEWHERE = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}  # compared below, and in test_dualpipe_v.py
BASES = {"PipelineScheduleSingle", "PipelineScheduleMulti"}  # classes without an order of their own
SIZES = [(d, n) for d in (1, 2, 3, 4, 8) for n in sorted({1, 2, d, d + 1, 2 * d, 2 * d + 2, 3 * d + 1, 4 * d})]


def torch_order(name: str, like: Schedule) -> list[list[Operation]] | None:
    """Per rank, the order that torch computes for the sizes of ``like``; None if torch refuses these sizes."""
    own = sorted(stage for (stage, _), device in like.device_of.items() if device == 0)
    stages = [
        SimpleNamespace(
            num_stages=like.stages,
            group_size=like.devices,
            group_rank=0,
            stage_index=stage,
            has_backward=True,
            submod=torch.nn.Identity(),
        )
        for stage in own
    ]
    single = issubclass(getattr(torch_schedules, name), torch_schedules.PipelineScheduleSingle)
    try:
        runtime = getattr(torch_schedules, name)(stages[0] if single else stages, like.micro_batches)
    except ValueError:
        return None
    actions = [[action for action in runtime.pipeline_order[rank] if action] for rank in range(like.devices)]
    kinds = {str(kind) for kind in Kind}
    return [
        [
            parse(f"{kind}{a.microbatch_index}@{a.stage_index}")
            for a in own
            if (kind := a.computation_type.value) in kinds
        ]
        for own in actions
    ]


def order(schedule: Schedule) -> list[list[Operation]]:
    return [[o for o in own if o.kind not in (Kind.SYNC, Kind.UPDATE)] for own in schedule.operations]


def with_order(schedule: Schedule, operations: list[list[Operation]]) -> Schedule:
    """``schedule`` with another order."""
    fields = {name: getattr(schedule, name) for name in ("name", "stages", "micro_batches", "device_of")}
    return place_syncs(Schedule(operations=tuple(map(tuple, operations)), **fields), "lazy")


def group_of(devices: int, micro_batches: int) -> int:
    """torch's size of a round of its interleaved schedules."""
    return micro_batches // max(1, micro_batches // devices)


def test_every_class_of_torch_is_one_of_ours():
    classes = {name for name in torch_schedules.__all__ if name.startswith(("Schedule", "PipelineSchedule"))}
    assert classes - BASES == FAMILIES.keys()
    assert set(FAMILIES.values()) <= {name for name, family in SCHEDULES.items() if TORCH in family.ships_in}
    for name in FAMILIES:
        assert torch_schedules.get_schedule_class(name.removeprefix("Schedule")) is getattr(torch_schedules, name)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ELSEWHERE])
def test_the_order_is_that_of_torch(name):
    compared = 0
    for devices, micro_batches in SIZES:
        for options in _options(FAMILIES[name], devices, micro_batches):
            ours = build_schedule(FAMILIES[name], devices=devices, micro_batches=micro_batches, **options)
            theirs = torch_order(name, ours)
            if theirs is None:  # torch: 1F1B with N < D, rounds of unequal size
                continue
            compared += 1
            if name == "Schedule1F1B":  # its table (not what it runs) counts the last rank's forwards from 1
                theirs[-1] = [_one_less(o) if o.kind is Kind.FORWARD else o for o in theirs[-1]]
            assert order(ours) == theirs, (devices, micro_batches, options)
    assert compared >= len(SIZES) * 2 // 3


def test_zb_v_takes_no_longer_than_that_of_torch():
    """The same F and I; torch runs each W right after its I until the drain, ours fills waits with them.

    Ours places W for operations that all take equally long: a W of 3 F can cost more than it fills.
    """
    for devices, micro_batches in SIZES:
        ours = build_schedule("zb-v", devices=devices, micro_batches=micro_batches)
        theirs = torch_order("ScheduleZBVZeroBubble", ours)
        assert theirs is not None
        for mine, other in zip(order(ours), theirs, strict=True):
            assert [o for o in mine if o.kind is not Kind.BACKWARD_WEIGHT] == [
                o for o in other if o.kind is not Kind.BACKWARD_WEIGHT
            ]
        slower = with_order(ours, theirs)
        for times in ({"F": 1, "I": 1, "W": 1}, {"F": 2, "I": 3, "W": 1}):
            assert makespan(ours, **times) <= makespan(slower, **times), (devices, micro_batches, times)


def _one_less(operation: Operation) -> Operation:
    (micro_batch,) = operation.micro_batches
    return operation._replace(micro_batches=(micro_batch - 1,))


def _options(family: str, devices: int, micro_batches: int) -> list[Mapping[str, int]]:
    if family == "looped-bfs":
        return [{"chunks": chunks} for chunks in (2, 3)]
    if family.startswith("interleaved"):
        return [{"chunks": chunks, "group": group_of(devices, micro_batches)} for chunks in (2, 3)]
    return [{}]
