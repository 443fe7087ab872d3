"""The forwards of a schedule alone, as an evaluation runs them."""

from dataclasses import replace

from auto3d.schedule.operation import Kind, Schedule


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of one iteration of ``schedule``, on the same devices, pipes and micro-batches, in the same order.

    They all use the newest weights, and what recomputes or keeps old weights in training does not do so here.
    """
    assert schedule.iterations == 1, "a flush comes before and after an evaluation"
    operations = tuple(
        tuple(operation for operation in operations if operation.kind is Kind.FORWARD)
        for operations in schedule.operations
    )
    return replace(schedule, operations=operations, recompute=frozenset(), weight_version={}, forward_only=True)
