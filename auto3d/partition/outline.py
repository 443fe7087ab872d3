"""Where a model can be cut, and what each cut sends, whatever the devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from auto3d.capture.graph import Graph
from auto3d.partition.stage import crossing_bytes, possible_cuts


@dataclass(frozen=True, eq=False, kw_only=True)  # equal only to itself, so that it is a cheap key of a cache
class Outline:
    """The possible cuts of a model, in its order. All fields but ``block_starts`` have one entry for each cut."""

    positions: Sequence[int]  # a stage may begin here: 0 first, the end of the model last
    flops: Sequence[float]  # forward FLOPs of one micro-batch before the cut
    weight_flops: Sequence[float]  # the part of ``flops`` in products with weights
    sent: Sequence[float]  # bytes that the cut sends onward
    block_starts: Sequence[int]  # positions where the repeated blocks begin, then the end of the last; empty: no blocks


def outline_of(graph: Graph) -> Outline:
    """The Outline of a captured model."""
    positions = possible_cuts(graph)
    flops = [0, *accumulate(node.flops for node in graph.nodes)]  # before each operation
    of_weights = (node.flops if graph.trained & set(node.state) else 0 for node in graph.nodes)
    weight_flops = [0, *accumulate(of_weights)]
    crossing = crossing_bytes(graph)
    return Outline(
        positions=positions,
        flops=[flops[position] for position in positions],
        weight_flops=[weight_flops[position] for position in positions],
        sent=[crossing[position] for position in positions],
        block_starts=block_starts(graph),
    )


def block_starts(graph: Graph) -> list[int]:
    """The position of the first operation of each repeated block, then the position after the last block.

    Blocks are the members of the module list with the most members, such as ``transformer.h``; empty where the model
    has none.
    """
    members: dict[str, dict[str, int]] = {}
    last: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        if node.from_inputs:
            continue
        names = node.module.split(".")
        for depth, name in enumerate(names):
            if name.isdigit():
                path = ".".join(names[:depth])
                members.setdefault(path, {}).setdefault(name, position)
                last[path] = position
                break  # a list inside a block belongs to that block
    if not members:
        return []
    path = max(members, key=lambda path: len(members[path]))
    return [*members[path].values(), last[path] + 1]
