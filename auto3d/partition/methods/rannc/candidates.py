"""Candidate stages: the runs of blocks that algorithm 1 profiles (line 17), and their names in a profile."""

from collections.abc import Iterator, Sequence
from hashlib import sha256

from auto3d.capture.graph import Graph
from auto3d.partition.methods.rannc.atomic import Subcomponent, stage_of_operations
from auto3d.partition.methods.rannc.operation_profile import OperationProfiles
from auto3d.partition.methods.rannc.runs import Runs
from auto3d.partition.stage import Stage, cut, same_stages
from auto3d.plan import stages_of_operations

_MODULUS = 2**64


def candidate_names(graph: Graph, blocks: Sequence[Sequence[Subcomponent]]) -> dict[tuple[int, int], str]:
    """(first block, last block) -> name of this run of blocks as a stage.

    Runs of the same operations have the same name, whatever their blocks, and also at other micro-batch sizes.
    """
    sums = [0]
    for block in blocks:
        digests = (sha256(graph.nodes[sub.operation].name.encode()).digest()[:8] for sub in block)
        sums.append((sums[-1] + sum(int.from_bytes(digest) for digest in digests)) % _MODULUS)
    return {
        (first, last): f"{(sums[last + 1] - sums[first]) % _MODULUS:016x}"
        for first in range(len(blocks))
        for last in range(first, len(blocks))
    }


def candidate_stages(
    profiles: OperationProfiles, blocks: Sequence[Sequence[Subcomponent]], other: Graph
) -> Iterator[tuple[str, Stage]]:
    """The name of each run of ``blocks`` that fits a device, and its stage in ``other``, the model at some size.

    Raises PartitionError where ``other`` has other operations than the Graph of ``profiles``.
    """
    graph = profiles.graph
    costs = Runs(graph, blocks, profiles.costs).at(profiles.at(other.micro_batch_size))
    fits = costs.state_bytes + costs.saved_bytes + costs.received_bytes <= profiles.costs.memory_bytes
    for (first, last), name in candidate_names(graph, blocks).items():
        if not fits[first, last]:
            continue
        groups = [blocks[:first], blocks[first : last + 1], blocks[last + 1 :]]
        parts = [[sub for block in group for sub in block] for group in groups if group]
        stages = stages_of_operations(stage_of_operations(graph, parts))
        yield name, cut(other, same_stages(stages, graph, other))[1 if first else 0]
