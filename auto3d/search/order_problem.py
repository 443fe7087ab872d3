"""Plan -> Problem: what an order of operations on the stages of a Plan is sought for."""

from dataclasses import replace
from math import inf

from auto3d.cost.memory.device import in_gib
from auto3d.cost.model import CostModel
from auto3d.plan import Plan, PlanError
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.options import SYNC
from auto3d.schedule.order_text import NAME, order_options
from auto3d.schedule.shape import shape_of
from auto3d.synthesis.problem import Problem


def with_order(plan: Plan, schedule: Schedule, *, sync: str = SYNC[0]) -> Plan:
    """``plan`` with the order of ``schedule`` as its own, and gradient syncs where ``sync`` places them."""
    options = order_options(schedule) | {"sync": sync}
    return replace(
        plan,
        schedule=NAME,
        schedule_options={name: value for name, value in options.items() if (name, value) != ("sync", SYNC[0])},
    )


def problem_of(plan: Plan, model: CostModel, *, may_recompute: frozenset[int] | None = None) -> Problem:
    """The problem of the stages of ``plan`` on their devices, in seconds and bytes.

    The pipeline that takes longest gives the costs. ``free`` is what a device has beside what ``plan`` needs for
    anything but activations; the order that ``plan`` has decides that, so an order that fits ``free`` may still not fit
    by ``model.memory``. Any stage may split its backward; the stages of ``may_recompute`` (default: the stages that
    ``plan`` recomputes) may recompute all but what they keep by ``plan``. Raises PlanError if a device lacks memory for
    anything but activations.
    """
    shape = shape_of(plan)
    stages = range(shape.stages)
    again = shape.recompute if may_recompute is None else may_recompute
    timed = plan if again == shape.recompute else with_order(plan, _recomputing(shape.schedule(), again))
    activation, kept, deferred = [], [], []
    for stage in stages:
        whole = [model.memory.stage_if(plan, stage, recompute=False, split=split) for split in (False, True)]
        held = [memory.in_flight for memory in whole] + [whole[1].deferred]
        least = max(held)
        if stage in again:
            halves = [model.memory.stage_if(plan, stage, recompute=True, split=split) for split in (False, True)]
            held += [memory.in_flight + memory.recomputed for memory in halves]
            least = max(memory.in_flight for memory in halves)
        activation.append(max(held))
        kept.append(least)
        deferred.append(whole[1].deferred)
    free = []
    for device, beside in enumerate(model.memory.beside_activations(plan)):
        has = model.cluster.memory_of(plan.meshes[device].ranks)
        if has is not None and beside > has:
            raise PlanError(
                f"pipeline device {device} needs {in_gib(beside)} GiB beside activations; it has {in_gib(has)}",
                kind="memory",
            )
        free.append(inf if has is None else has - beside)
    return Problem(
        micro_batches=shape.micro_batches,
        costs=model.timeline(timed).costs,
        device_of=shape.device_of,
        activation=tuple(activation),
        kept=tuple(kept),
        deferred=tuple(deferred),
        free=tuple(free),
        may_split=frozenset(stages),
        may_recompute=again,
    )


def _recomputing(schedule: Schedule, stages: frozenset[int]) -> Schedule:
    """``schedule`` where exactly ``stages`` recompute: those that did not, inside their backwards."""
    operations = (
        tuple(operation for operation in row if operation.kind is not Kind.RECOMPUTE or operation.stage in stages)
        for row in schedule.operations
    )
    return replace(schedule, operations=tuple(operations), recompute=stages)
