"""An explicit order of operations as text: ``F0@0 F1@0 B0@0 B1@0 | F0@1 B0@1 F1@1 B1@1`` for two devices.

The text has the computations alone; the option ``sync`` places S and U among them. Stages that recompute are written
``0+2``, or as ``none`` or ``full``.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from auto3d.errors import InputError
from auto3d.schedule.check import check
from auto3d.schedule.operation import Kind, Operation, Schedule, parse
from auto3d.schedule.options import RECOMPUTE, SYNC
from auto3d.schedule.sync import place_syncs

NAME = "synthesized"
ORDER = "order"  # the option that holds the text
DEVICES = " | "  # separator of devices


def read_order(order: str, *, devices: int, micro_batches: int, recompute: str, sync: str) -> Schedule:
    """The schedule with these operations, proved by ``auto3d.schedule.check``.

    Stages, pipes and their devices follow from the operations. Raises InputError if the order is incomplete or
    contradicts itself, or is for other numbers of devices or micro-batches.
    """
    rows = [row.split() for row in order.split(DEVICES.strip())]
    if len(rows) != devices:
        raise InputError(f"schedule {NAME}: the order is for {len(rows)} devices; here there are {devices}")
    read: dict[str, Operation] = {}
    for text in {text for row in rows for text in row}:
        try:
            read[text] = parse(text)
        except InputError as error:
            raise InputError(f"schedule {NAME}: order: {error}") from None
        if not read[text].micro_batches:
            raise InputError(f"schedule {NAME}: order: {text}: leave out S and U; the option sync places them")
    numbers = {number for operation in read.values() for number in operation.micro_batches}
    if numbers and numbers != set(range(micro_batches)):
        most = max(numbers) + 1
        raise InputError(
            f"schedule {NAME}: the order is for {most} micro-batches; here there are {micro_batches}"
            if most != micro_batches
            else f"schedule {NAME}: order: micro-batch {min(set(range(most)) - numbers)} is missing"
        )
    homes: dict[tuple[int, int], int] = {}
    for device, row in enumerate(rows):
        if not row:
            raise InputError(f"schedule {NAME}: order: device {device} has no operations")
        for text in row:
            homes.setdefault((read[text].stage, read[text].pipe), device)
    stages = 1 + max(stage for stage, _ in homes)
    schedule = Schedule(
        name=NAME,
        stages=stages,
        micro_batches=micro_batches,
        device_of=dict(sorted(homes.items(), key=lambda entry: (entry[0][1], entry[0][0]))),
        operations=tuple(tuple(read[text] for text in row) for row in rows),
        recompute=_recomputing(recompute, stages),
        held_ahead=micro_batches,
    )
    placed = place_syncs(schedule, sync)
    try:
        check(placed)
    except InputError as error:
        raise InputError(f"schedule {NAME}: order: {error}") from None
    return placed


def order_options(schedule: Schedule) -> dict[str, int | str]:
    """The options with which ``synthesized`` has exactly the operations of ``schedule``.

    Raises InputError if it cannot: iterations overlap, micro-batches are run in parts, a pipe has no micro-batches, or
    S and U are elsewhere than an option ``sync`` places them.
    """
    if schedule.weight_version or schedule.iterations > 1:
        raise InputError(f"schedule {schedule.name}: its iterations overlap; an order is one iteration")
    if schedule.parts > 1:
        raise InputError(f"schedule {schedule.name}: it runs micro-batches in parts; an order runs whole ones")
    order, recompute = write_order(schedule), write_recompute(schedule.recompute, schedule.stages)
    sizes = {"devices": schedule.devices, "micro_batches": schedule.micro_batches}
    wanted = replace(schedule, name=NAME, held_ahead=schedule.micro_batches)
    for sync in SYNC:
        if read_order(order, **sizes, recompute=recompute, sync=sync) == wanted:
            chosen = {"recompute": (recompute, RECOMPUTE[0]), "sync": (sync, SYNC[0])}
            options: dict[str, int | str] = {ORDER: order}
            return options | {name: value for name, (value, default) in chosen.items() if value != default}
    raise InputError(
        f"schedule {schedule.name}: an order cannot hold it: a pipe has no micro-batches, or its syncs and updates are "
        f"elsewhere than {', '.join(SYNC)} place them"
    )


def write_order(schedule: Schedule) -> str:
    """The text of the operations of ``schedule``, without S and U."""
    rows = ([str(o) for o in row if o.kind not in (Kind.SYNC, Kind.UPDATE)] for row in schedule.operations)
    return DEVICES.join(" ".join(row) for row in rows)


def write_recompute(recompute: Collection[int], stages: int) -> str:
    """``recompute``, stages out of ``stages``, as text."""
    if len(recompute) in (0, stages):
        return RECOMPUTE[bool(recompute)]
    return "+".join(map(str, sorted(recompute)))


def without_order(options: Mapping[str, int | str]) -> dict[str, int | str]:
    """``options`` of a schedule as people read them: without the text of an order."""
    return {option: value for option, value in options.items() if option != ORDER}


def _recomputing(recompute: str, stages: int) -> frozenset[int]:
    if recompute in RECOMPUTE:
        return frozenset(range(stages)) if recompute == RECOMPUTE[1] else frozenset()
    numbers = recompute.split("+")
    if not all(number.isdecimal() and int(number) < stages for number in numbers) or len(set(numbers)) < len(numbers):
        raise InputError(
            f"schedule {NAME}: recompute is {recompute!r}; it must be {', '.join(RECOMPUTE)} or stages from 0 to "
            f"{stages - 1}, as in 0+2"
        )
    return frozenset(map(int, numbers))
