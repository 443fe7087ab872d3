"""The partition of Megatron-LM and DeepSpeed: equally many repeated blocks for each stage.

What precedes the first block belongs to the first stage, and what follows the last block to the last stage.
"""

from auto3d.capture.graph import Graph
from auto3d.partition.stage import PartitionError
from auto3d.plan import StagePlan, stages_between


def block_starts(graph: Graph) -> list[int]:
    """The position of the first operation of each repeated block, and of the first one after the last block.

    Blocks are the members of the module list with the most members, such as ``transformer.h``; empty where the model
    has none.
    """
    members: dict[str, dict[str, int]] = {}
    last: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        if node.from_inputs:
            continue
        parts = node.module.split(".")
        for depth, part in enumerate(parts):
            if part.isdigit():
                path = ".".join(parts[:depth])
                members.setdefault(path, {}).setdefault(part, position)
                last[path] = position
                break  # lists inside a block are part of it
    if not members:
        return []
    path = max(members, key=lambda path: len(members[path]))
    return [*members[path].values(), last[path] + 1]


def blocks(graph: Graph, stages: int) -> tuple[StagePlan, ...]:
    """``stages`` stages with equally many blocks or, where they do not divide, the last ones with one fewer.

    Raises PartitionError where there are fewer blocks than stages.
    """
    starts = block_starts(graph)
    return stages_between(even_bounds(starts, stages, len(graph.nodes)))


def even_bounds(starts: list[int], stages: int, end: int) -> list[int]:
    """Bounds of stages that begin at some of ``starts``, the last of which is the end of the last block."""
    count = len(starts) - 1
    if stages > max(1, count):
        raise PartitionError(
            f"{stages} stages, but the model has {max(0, count)} repeated blocks; each stage needs one"
        )
    return [0, *(starts[-(-count * stage // stages)] for stage in range(1, stages)), end]
