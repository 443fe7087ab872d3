"""A brute-force simulation in exact fractions, each operation as early as possible, without code of the simulator."""

from fractions import Fraction

from auto3d.schedule.operation import Kind, Operation, Schedule


def spans(schedule: Schedule, **times: int | Fraction) -> list[list[tuple[Fraction, Fraction]]]:
    """Per device, the start and the end of every operation.

    ``times`` has one time per kind (F, R, B, I, W): that of one micro-batch on all stages of one device.
    """
    unit = Fraction(schedule.devices, schedule.stages * schedule.parts)
    explicit = any(o.kind is Kind.RECOMPUTE for operations in schedule.operations for o in operations)
    ended: dict[tuple[Kind, int, int], Fraction] = {}  # (F, B or W, stage, micro-batch) -> end; an I counts as B

    def duration(operation: Operation) -> Fraction:
        if operation.kind in (Kind.SYNC, Kind.UPDATE):
            return Fraction(0)
        time = times[operation.kind.value]
        if operation.kind is Kind.BACKWARD and operation.stage in schedule.recompute and not explicit:
            time += times["R"]
        return time * unit * len(operation.micro_batches)

    def inputs(operation: Operation) -> list[tuple[Kind, int, int]]:
        kind, stage, last = operation.kind, operation.stage, schedule.stages - 1
        sources: list[tuple[Kind, int]] = []
        if kind is Kind.FORWARD and stage > 0:
            sources = [(Kind.FORWARD, stage - 1)]
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            sources = [(Kind.FORWARD, stage)] + [(Kind.BACKWARD, stage + 1)] * (stage < last)
        elif kind is Kind.RECOMPUTE:
            sources = [(Kind.FORWARD, stage)]
        elif kind is Kind.BACKWARD_WEIGHT:
            sources = [(Kind.BACKWARD, stage)]
        return [(kind, stage, m) for kind, stage in sources for m in operation.micro_batches]

    result: list[list[tuple[Fraction, Fraction]]] = [[] for _ in schedule.operations]
    moved = True
    while moved:
        moved = False
        for operations, done in zip(schedule.operations, result, strict=True):
            while len(done) < len(operations):
                operation = operations[len(done)]
                needed = inputs(operation)
                if any(key not in ended for key in needed):
                    break
                start = max([ended[key] for key in needed] + [done[-1][1] if done else Fraction(0)])
                end = start + duration(operation)
                done.append((start, end))
                kind = Kind.BACKWARD if operation.kind is Kind.BACKWARD_INPUT else operation.kind
                ended.update({(kind, operation.stage, m): end for m in operation.micro_batches})
                moved = True
    assert [len(done) for done in result] == [len(operations) for operations in schedule.operations], "deadlock"
    return result


def makespan(schedule: Schedule, **times: int | Fraction) -> Fraction:
    return max(done[-1][1] for done in spans(schedule, **times))


def idle(schedule: Schedule, **times: int | Fraction) -> list[Fraction]:
    """Per device, the idle time up to the makespan."""
    devices = spans(schedule, **times)
    total = max(done[-1][1] for done in devices)
    return [total - sum((end - start for start, end in done), Fraction(0)) for done in devices]


def idle_inside(schedule: Schedule, **times: int | Fraction) -> list[Fraction]:
    """Per device, the idle time between its first and its last operation."""
    devices = spans(schedule, **times)
    return [done[-1][1] - done[0][0] - sum((end - start for start, end in done), Fraction(0)) for done in devices]


def critical_path(schedule: Schedule, **times: int | Fraction) -> tuple[int, int]:
    """The numbers of forwards and backwards on a chain of operations without a wait, followed from the end."""
    entries = [
        (start, end, device, operation)
        for device, done in enumerate(spans(schedule, **times))
        for (start, end), operation in zip(done, schedule.operations[device], strict=True)
        if end > start
    ]
    start, _, device, operation = max(entries, key=lambda entry: entry[1])
    counts = {Kind.FORWARD: 0, Kind.BACKWARD: 0}
    while True:
        counts[operation.kind] += 1
        if start == 0:
            return counts[Kind.FORWARD], counts[Kind.BACKWARD]
        start, _, device, operation = next(
            entry
            for entry in entries
            if entry[1] == start
            and (
                entry[2] == device
                or (
                    entry[3].kind is operation.kind
                    and set(entry[3].micro_batches) & set(operation.micro_batches)
                    and abs(entry[3].stage - operation.stage) == 1
                )
            )
        )
