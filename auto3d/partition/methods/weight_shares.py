"""The partition of nanotron: a stage ends with the block that completes its share of the products with weights.

Blocks are added up in order, and a stage ends where their FLOPs reach its share of all FLOPs of products with weights,
the head's included (build_model in nanotron's src/nanotron/models/base.py). What follows the blocks is on the last
stage. Memory and times of its published runs show that a block ends a stage also where it reaches the share exactly,
and that the head and the loss are never apart.
"""

from auto3d.partition.outline import Outline
from auto3d.partition.problem import StageProblem
from auto3d.partition.stage import PartitionError
from auto3d.plan import StagePlan, stages_between


def choose_stages(problem: StageProblem) -> tuple[StagePlan, ...]:
    """Stages by nanotron's rule. If the blocks fill two stages too few, what lies between blocks and head is a stage.

    Raises PartitionError where the blocks fill fewer stages than that.
    """
    outline, stages = problem.outline, problem.stages
    starts, total = list(outline.block_starts), outline.weight_flops[-1]
    bounds = [0]
    for end in starts[1:]:
        reached = _before(outline, end)
        if len(bounds) < stages and reached * stages >= total * len(bounds):
            bounds.append(end)
    if len(bounds) == stages - 1 and starts:
        head = max(at for at in outline.positions if _before(outline, at) < total)
        bounds += [head] if head > bounds[-1] else []
    if len(bounds) < stages:
        count = max(0, len(starts) - 1)
        raise PartitionError(
            f"{stages} stages, but {count} repeated blocks and the head fill {len(bounds)} of them; use fewer stages, "
            "or another partition"
        )
    return stages_between([*bounds, outline.positions[-1]])


def _before(outline: Outline, position: int) -> float:
    """FLOPs of products with weights before ``position``, which is a possible cut."""
    return outline.weight_flops[list(outline.positions).index(position)]
