"""The labels and colours of the cells in drawings."""

from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.simulate.simulate import Timeline

TINTS = [  # light for forwards, medium for weight halves, dark for backwards; reused in turn if there are more pipes
    ("#cfe2f7", "#8fb8e8", "#4f87c9"),
    ("#fbe0bd", "#f0bb78", "#d98a2b"),
    ("#d5ecd0", "#9dd093", "#57a14a"),
    ("#e6d6f0", "#c3a3d9", "#9365b5"),
]
SHADE = {
    Kind.FORWARD: 0,
    Kind.RECOMPUTE: 0,
    Kind.BACKWARD_WEIGHT: 1,
    Kind.BACKWARD: 2,
    Kind.BACKWARD_INPUT: 2,
    Kind.SYNC: 1,
    Kind.UPDATE: 2,
}
WORDS = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input half",
    Kind.BACKWARD_WEIGHT: "backward, weight half",
    Kind.SYNC: "start of a gradient sync",
    Kind.UPDATE: "update",
}


def micro_batch_label(schedule: Schedule, operation: Operation) -> str:
    """``3`` for a micro-batch, ``2+3`` for two; ``3a`` and ``3b`` for the parts of micro-batch 3, ``3`` for both.

    Part 26 is ``3aa``.
    """
    parts = schedule.parts
    if parts == 1:
        return "+".join(map(str, operation.micro_batches))
    whole = sorted({number // parts for number in operation.micro_batches})
    if len(operation.micro_batches) == parts * len(whole):
        return "+".join(map(str, whole))
    return "+".join(f"{number // parts}{_letters(number % parts)}" for number in operation.micro_batches)


def _letters(number: int) -> str:
    """``a`` for 0, ``z`` for 25, then ``aa``, ``ab`` and so on, as spreadsheets name their columns."""
    rest, last = divmod(number, 26)
    return (_letters(rest - 1) if rest else "") + chr(ord("a") + last)


def tints(schedule: Schedule) -> tuple[str, dict[tuple[int, int], int]]:
    """The meaning of the colours, and (stage, pipe) -> number of the colour.

    Colours distinguish pipes (``pipe``) or, if there is only one, the stages of a device, in order (``chunk``).
    """
    if any(pipe for _, pipe in schedule.device_of):
        return "pipe", {(stage, pipe): pipe for stage, pipe in schedule.device_of}
    chunks: dict[int, int] = {}
    chunk_of = {}
    for (stage, pipe), device in sorted(schedule.device_of.items()):
        chunk_of[stage, pipe] = chunks.get(device, 0)
        chunks[device] = chunk_of[stage, pipe] + 1
    return "chunk", chunk_of


def exposed_collectives(timeline: Timeline, number: int, *, recomputes: bool) -> float:
    """Time in which operation ``number`` does nothing but tensor-parallel collectives; drawings put it at its end.

    ``recomputes`` says that the operation also recomputes. The collectives of that part are not among them.
    """
    operation = timeline.operations[number]
    stage, costs = operation.stage, timeline.costs
    exposed = costs.exposed_of(operation.kind)[stage]
    if not exposed:
        return 0.0
    total = costs.times_of(operation.kind)[stage] + (costs.recompute[stage] if recomputes else 0.0)
    return (timeline.end[number] - timeline.start[number]) * exposed / total


def has_exposed_collectives(timeline: Timeline) -> bool:
    return any(any(timeline.costs.exposed_of(operation.kind)) for operation in timeline.operations)
