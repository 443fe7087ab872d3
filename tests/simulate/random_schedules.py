"""Random correct schedules and random costs.

They have unequal stages and devices, several pipes and stages per device, doubled forwards, recomputation, split
backwards, slices of equal and unequal times, and several iterations.
"""

import random

from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.simulate.costs import Costs, MessageCost


def random_schedule(chance: random.Random, *, slices: int = 1) -> Schedule:
    """A schedule made by running operations that are ready in random order; with ``slices`` if that is above 1."""
    devices, pipes = chance.randint(1, 4), chance.randint(1, 2)
    stages, micro_batches = devices * chance.randint(1, 2), chance.randint(1, 5)
    iterations, parts = chance.choice([(1, 1), (1, 2), (2, 1)])
    if slices > 1:
        parts = slices
    recompute = frozenset(stage for stage in range(stages) if chance.random() < 0.3)
    device_of = {(stage, pipe): chance.randrange(devices) for stage in range(stages) for pipe in range(pipes)}

    waiting: list[tuple[Operation, set[Operation]]] = []  # operations, each with those that must run before it
    rounds = []  # per iteration: (stage, pipe) -> operations that must run before its S
    for iteration in range(iterations):
        before_sync: dict[tuple[int, int], set[Operation]] = {pipe_stage: set() for pipe_stage in device_of}
        first = iteration * micro_batches * parts
        numbers = range(first, first + micro_batches * parts)
        groups = _groups(chance, numbers) if slices == 1 else [(number,) for number in numbers]
        pipe = 0
        before_backward: dict[int, set[Operation]] = {}  # stage -> what runs before its newest backward
        for group in groups:
            of_slice = group[0] % slices
            if of_slice == 0:
                pipe = chance.randrange(pipes)
            forwards, gradients = set(), set()
            for stage in range(stages):
                forward = Operation(Kind.FORWARD, stage, group, pipe)
                earlier = {Operation(Kind.FORWARD, stage, (group[0] - 1,), pipe)} if of_slice else set()
                waiting.append((forward, forwards | earlier))
                forwards = {forward}
            for stage in reversed(range(stages)):
                forwards = {Operation(Kind.FORWARD, stage, group, pipe)}
                made = set()
                for m in group:
                    before = set(gradients | forwards)
                    if stage in recompute and chance.random() < 0.5:
                        recomputation = Operation(Kind.RECOMPUTE, stage, (m,), pipe)
                        waiting.append((recomputation, forwards))
                        before = before | {recomputation}
                    halves = chance.random() < 0.3
                    backward = Operation(Kind.BACKWARD_INPUT if halves else Kind.BACKWARD, stage, (m,), pipe)
                    waiting.append((backward, before))
                    if of_slice:  # the previous backward is that of the slice before, and comes after this one
                        before_backward[stage].add(backward)
                    before_backward[stage] = before
                    made.add(backward)
                    last = backward
                    if halves:
                        last = Operation(Kind.BACKWARD_WEIGHT, stage, (m,), pipe)
                        waiting.append((last, {backward}))
                    before_sync[stage, pipe].add(last)
                gradients = made
        rounds.append(before_sync)

    order: list[list[Operation]] = [[] for _ in range(devices)]
    done: set[Operation] = set()

    def run(operation: Operation) -> None:
        done.add(operation)
        order[device_of[operation.stage, operation.pipe]].append(operation)

    def run_some(*, until: set[Operation]) -> None:
        """Run random operations, also forwards of the next iteration, until those of ``until`` have run."""
        while not until <= done:
            ready = [index for index, (_, before) in enumerate(waiting) if before <= done]
            run(waiting.pop(chance.choice(ready))[0])

    for before_sync in rounds:
        for pipe_stage in chance.sample(list(before_sync), len(before_sync)):
            run_some(until=before_sync[pipe_stage])
            run(Operation(Kind.SYNC, pipe_stage[0], (), pipe_stage[1]))
        for stage, pipe in chance.sample(list(before_sync), len(before_sync)):
            run(Operation(Kind.UPDATE, stage, (), pipe))
            if waiting and chance.random() < 0.3:
                run_some(until={next(operation for operation, before in waiting if before <= done)})
    return Schedule(
        name="random",
        stages=stages,
        micro_batches=micro_batches,
        device_of=device_of,
        operations=tuple(map(tuple, order)),
        recompute=recompute,
        parts=parts,
        slices=slices,
        iterations=iterations,
    )


def random_costs(chance: random.Random, schedule: Schedule, *, sums_cost: bool = False) -> Costs:
    """Random costs; with ``sums_cost`` those of all-reduces beside compute, too."""

    def times(count: int, scale: float = 1.0) -> tuple[float, ...]:
        return tuple(scale * chance.choice([0.0, 1.0, chance.random()]) for _ in range(count))

    def of_slice(whole: tuple[float, ...]) -> tuple[tuple[float, ...], ...]:
        if schedule.slices == 1 or chance.random() < 0.3:
            return ()
        rows = []
        for time in whole:
            parts = [chance.random() for _ in range(schedule.slices)]
            rows.append(tuple(time * part / sum(parts) for part in parts))
        return tuple(rows)

    communication = chance.choice([0.0, 1.0])
    forward, backward = times(schedule.stages), times(schedule.stages, 2)
    return Costs(
        forward=forward,
        backward=backward,
        forward_of_slice=of_slice(forward),
        backward_of_slice=of_slice(backward),
        backward_input=times(schedule.stages),
        backward_weight=times(schedule.stages),
        recompute=times(schedule.stages),
        sync=times(schedule.stages, 3 * communication),
        update=times(schedule.stages, 0.1),
        messages=tuple(
            MessageCost(latency=latency, forward=forward, backward=backward)
            for latency, forward, backward in zip(
                *(times(schedule.stages - 1, communication) for _ in range(3)), strict=True
            )
        ),
        speed=tuple(chance.choice([1.0, 0.5 + chance.random()]) for _ in range(schedule.devices)),
        overlap=chance.random() < 0.7,
        sync_start=times(schedule.devices, 0.3) if sums_cost else (),
        sync_slowdown=times(schedule.devices, 2) if sums_cost else (),
    )


def _groups(chance: random.Random, micro_batches: range) -> list[tuple[int, ...]]:
    """Groups of one or two consecutive micro-batches."""
    groups, remaining = [], list(micro_batches)
    while remaining:
        size = chance.randint(1, 2)
        groups.append(tuple(remaining[:size]))
        remaining = remaining[size:]
    return groups
