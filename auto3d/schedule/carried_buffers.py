"""The check that a value which a model carries from one forward to the next sees every micro-batch."""

from collections.abc import Sequence

from auto3d.capture.graph import Graph
from auto3d.mesh import TENSOR
from auto3d.partition.stage import Stage
from auto3d.plan import Plan, PlanError
from auto3d.schedule.operation import Schedule


def check_carried_buffers(graph: Graph, plan: Plan, schedule: Schedule, stages: Sequence[Stage]) -> None:
    """Raise PlanError if several tensor-parallel groups hold a carried buffer: each would carry on a different value.

    The ranks of one group run the same micro-batches, so they carry on the same value, or shards of it.
    """
    groups: dict[str, set[tuple[int, int]]] = {name: set() for name in graph.carried_buffers}
    for (stage, _), device in schedule.device_of.items():
        for name in groups.keys() & set(stages[stage].state):
            groups[name].update((device, number) for number in range(len(plan.meshes[device].groups(TENSOR))))
    for name, holders in sorted(groups.items()):
        if len(holders) > 1:
            raise PlanError(
                f"dp: {name} is written in each forward and enters the loss, so the {len(holders) * plan.tp} ranks "
                "that hold it would train with different values; use dp 1, one replica of each stage and a schedule of "
                "one pipe"
            )
