"""The check that a value which a model carries from one forward to the next is on one rank only."""

from collections.abc import Sequence

from auto3d.capture.graph import Graph
from auto3d.partition.stage import Stage
from auto3d.plan import Plan, PlanError
from auto3d.schedule.operation import Schedule


def check_carried_buffers(graph: Graph, plan: Plan, schedule: Schedule, stages: Sequence[Stage]) -> None:
    """Raise PlanError if several ranks hold a carried buffer: each would carry on a different value."""
    ranks: dict[str, set[int]] = {name: set() for name in graph.carried_buffers}
    for (stage, _), device in schedule.device_of.items():
        for name in ranks.keys() & set(stages[stage].state):
            ranks[name].update(plan.placement[device])
    for name, holders in sorted(ranks.items()):
        if len(holders) > 1:
            raise PlanError(
                f"dp: {name} is written in each forward and enters the loss, so the {len(holders)} ranks that hold it "
                "would train with different values; use dp 1, one replica of each stage and a schedule of one pipe"
            )
