"""As early as possible, by brute force: what a schedule takes, in exact fractions, with nothing of the simulator's."""

from fractions import Fraction

from auto3d.schedule.operation import Kind, Operation, Schedule


def spans(schedule: Schedule, **times: int | Fraction) -> list[list[tuple[Fraction, Fraction]]]:
    """Start and end of every operation; ``times`` are those of one device's whole share, for one micro-batch."""
    share = Fraction(schedule.devices, schedule.stages * schedule.parts)
    explicit = any(o.kind is Kind.RECOMPUTE for operations in schedule.operations for o in operations)
    ended: dict[tuple[Kind, int, int], Fraction] = {}  # (F, B or W, stage, micro-batch); I is B here

    def duration(operation: Operation) -> Fraction:
        if operation.kind in (Kind.SYNC, Kind.UPDATE):
            return Fraction(0)
        time = times[operation.kind.value]
        if operation.kind is Kind.BACKWARD and operation.stage in schedule.recompute and not explicit:
            time += times["R"]
        return time * share * len(operation.micro_batches)

    def inputs(operation: Operation) -> list[tuple[Kind, int, int]]:
        kind, stage, last = operation.kind, operation.stage, schedule.stages - 1
        found: list[tuple[Kind, int]] = []
        if kind is Kind.FORWARD and stage > 0:
            found = [(Kind.FORWARD, stage - 1)]
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            found = [(Kind.FORWARD, stage)] + [(Kind.BACKWARD, stage + 1)] * (stage < last)
        elif kind is Kind.RECOMPUTE:
            found = [(Kind.FORWARD, stage)]
        elif kind is Kind.BACKWARD_WEIGHT:
            found = [(Kind.BACKWARD, stage)]
        return [(kind, stage, m) for kind, stage in found for m in operation.micro_batches]

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
    """Per device, against the makespan."""
    found = spans(schedule, **times)
    total = max(done[-1][1] for done in found)
    return [total - sum((end - start for start, end in done), Fraction(0)) for done in found]


def idle_inside(schedule: Schedule, **times: int | Fraction) -> list[Fraction]:
    """Per device, from its first to its last operation."""
    found = spans(schedule, **times)
    return [done[-1][1] - done[0][0] - sum((end - start for start, end in done), Fraction(0)) for done in found]


def critical_path(schedule: Schedule, **times: int | Fraction) -> tuple[int, int]:
    """Forwards and backwards on a chain of operations without a wait, from the end back to the start."""
    found = [
        (start, end, device, operation)
        for device, done in enumerate(spans(schedule, **times))
        for (start, end), operation in zip(done, schedule.operations[device], strict=True)
        if end > start
    ]
    start, _, device, operation = max(found, key=lambda entry: entry[1])
    counts = {Kind.FORWARD: 0, Kind.BACKWARD: 0}
    while True:
        counts[operation.kind] += 1
        if start == 0:
            return counts[Kind.FORWARD], counts[Kind.BACKWARD]
        start, _, device, operation = next(
            entry
            for entry in found
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
