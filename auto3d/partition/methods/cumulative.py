"""The partition of nanotron: a stage ends with the first block at which the FLOPs so far reach the stage's share.

Source: ``build_model`` of src/nanotron/models/base.py, which counts the products of each block and of the head.
Everything before the first block belongs to the first stage, everything after the last block to the last stage.
"""

from bisect import bisect_left

from auto3d.partition.outline import Outline
from auto3d.partition.problem import StageProblem
from auto3d.partition.stage import PartitionError
from auto3d.plan import StagePlan, stages_between


def choose_stages(problem: StageProblem) -> tuple[StagePlan, ...]:
    """Stages whose ends follow the cumulative FLOPs of the blocks and of the head.

    Raises PartitionError where the model has too few blocks to end every stage.
    """
    return _cumulative_stages(problem.outline, problem.stages)


def _cumulative_stages(outline: Outline, stages: int) -> tuple[StagePlan, ...]:
    positions, ends = outline.positions, outline.block_starts[1:]
    flops = [outline.flops[bisect_left(positions, end)] for end in ends]  # before the end of each block
    bounds = [0]
    for end, before in zip(ends, flops, strict=True):
        if len(bounds) < stages and before >= outline.flops[-1] * len(bounds) / stages:
            bounds.append(end)
    if len(bounds) < stages:
        raise PartitionError(f"{stages} stages, but the model's {len(ends)} blocks end only {len(bounds)}")
    return stages_between([*bounds, positions[-1]])
