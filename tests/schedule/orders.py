"""Random explicit orders that the checker accepts: what no rule makes, but a search may."""

import random
from dataclasses import replace

from auto3d.schedule import build_schedule
from auto3d.schedule.check import ScheduleError, check
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.sync import place_syncs

PLACEMENTS = {"straight": "1f1b", "interleaved": "interleaved-1f1b", "v": "zb-v", "two pipes": "chimera"}
"""Name -> a schedule with this placement of stages."""


def random_order(
    chance: random.Random,
    placement: str,
    *,
    devices: int,
    micro_batches: int,
    split: bool = True,
    recompute: bool = True,
    sync: str = "lazy",
    swaps: int = 60,
) -> Schedule:
    """A schedule by rule with neighbours of a device exchanged ``swaps`` times wherever the order remains possible.

    If ``split``, some backwards have two halves; if ``recompute``, some stages recompute, some of them early.
    """
    base = build_schedule(PLACEMENTS[placement], devices=devices, micro_batches=micro_batches)
    again = frozenset(stage for stage in range(base.stages) if recompute and chance.random() < 0.5)
    early = {stage for stage in again if chance.random() < 0.5}
    rows = []
    for row in base.operations:
        rows.append([])
        for operation in row:
            stage, rest = operation.stage, (operation.stage, operation.micro_batches, operation.pipe)
            if operation.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                halved = split and (operation.kind is Kind.BACKWARD_INPUT or chance.random() < 0.5)
                kinds = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if halved else (Kind.BACKWARD,)
                rows[-1] += [Operation(kind, *rest) for kind in ((Kind.RECOMPUTE,) * (stage in early) + kinds)]
            elif operation.kind is Kind.FORWARD:
                rows[-1].append(operation)
    schedule = replace(base, name="random", operations=tuple(map(tuple, rows)), recompute=again)
    placed = place_syncs(schedule, sync)
    check(placed)
    for _ in range(swaps):
        row = chance.choice(rows)
        index = chance.randrange(len(row) - 1)
        row[index], row[index + 1] = row[index + 1], row[index]
        changed = place_syncs(replace(schedule, operations=tuple(map(tuple, rows))), sync)
        try:
            check(changed)
        except ScheduleError:
            row[index], row[index + 1] = row[index + 1], row[index]
        else:
            placed = changed
    return placed


def named(schedule: Schedule) -> Schedule:
    """``schedule`` under the name that it has in a Plan, with as many messages ahead as an explicit order may hold."""
    return replace(schedule, name="synthesized", held_ahead=schedule.micro_batches)
