"""The partition of Megatron-LM and DeepSpeed: equally many repeated blocks in each stage.

Everything before the first block belongs to the first stage, everything after the last block to the last stage.
"""

from auto3d.capture.graph import Graph
from auto3d.partition.outline import Outline, outline_of
from auto3d.partition.problem import StageProblem
from auto3d.partition.stage import PartitionError
from auto3d.plan import StagePlan, stages_between


def choose_stages(problem: StageProblem) -> tuple[StagePlan, ...]:
    """Stages of equally many blocks; where the blocks do not divide evenly, the last stages have one block fewer.

    Raises PartitionError where the model has fewer blocks than stages.
    """
    return _block_stages(problem.outline, problem.stages)


def blocks(graph: Graph, stages: int) -> tuple[StagePlan, ...]:
    """``graph`` in ``stages`` stages by this method."""
    return _block_stages(outline_of(graph), stages)


def _block_stages(outline: Outline, stages: int) -> tuple[StagePlan, ...]:
    starts = outline.block_starts
    count = max(0, len(starts) - 1)
    if stages > max(1, count):
        raise PartitionError(f"{stages} stages, but the model has {count} repeated blocks; each stage needs one")
    inner = (starts[-(-count * stage // stages)] for stage in range(1, stages))
    return stages_between([0, *inner, outline.positions[-1]])
