"""Placements of a plan's ranks on the cluster: Megatron-LM's order, whole pipelines first, and AMP's tilings."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from auto3d.cluster import Cluster, place_ranks
from auto3d.plan import PlanError

Placement = tuple[tuple[int, ...], ...]
MEGATRON = "megatron"


class Degrees(NamedTuple):
    """The degrees of a Plan, or of a candidate, that decide its ranks."""

    dp: int
    tp: int
    pp: int

    @classmethod
    def of(cls, candidate: Any) -> "Degrees":
        return cls(*[getattr(candidate, name) for name in cls._fields])


def place(name: str, cluster: Cluster, degrees: Degrees) -> Placement:
    """The ``Plan.placement`` called ``name``; raises PlanError if it is not possible on the cluster."""
    if name == MEGATRON:
        return _place_ranks(**degrees._asdict())
    return _PLACEMENTS[name](cluster.amp_mesh or mesh(tuple(node.devices for node in cluster.nodes)), *degrees)


_place_ranks = lru_cache(4096)(place_ranks)  # the plans of a search share their placements


def place_replicas(replicas: Sequence[int], *, dp: int, tp: int = 1) -> Placement:
    """The placement of stages with ``replicas[stage]`` replicas: each pipeline has consecutive ranks.

    So each pipeline has nodes of its own, as in RaNNC (Tanaka et al. 2021, section III-C).
    """
    first = list(accumulate(replicas, initial=0))  # per stage, the ranks of a pipeline before it; last, their total
    return tuple(
        tuple(
            (pipeline * first[-1] + first[stage] + replica) * tp + shard
            for pipeline in range(dp)
            for replica in range(count)
            for shard in range(tp)
        )
        for stage, count in enumerate(replicas)
    )


def nodes_of(placement: Placement, cluster: Cluster) -> tuple[int, ...]:
    """The kinds of the nodes that ``placement`` uses, and the number of the node of each rank, in its order.

    Nodes have numbers in the order in which they appear. Costs depend on a placement only through this: where it is the
    same for two placements of equal degrees, all groups of ranks have equal devices on equal links.
    """
    numbers: dict[int, int] = {}
    nodes = [numbers.setdefault(cluster.node_of[rank], len(numbers)) for ranks in placement for rank in ranks]
    kinds = [cluster.nodes.index(cluster.nodes[node]) for node in numbers]
    return *kinds, *nodes


@lru_cache(64)
def mesh(sizes: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of AMP's device mesh (section 4.1) of nodes with ``sizes`` devices, in the order of ranks.

    Each row is a node, a part of one node, or several whole nodes: three nodes of four devices and four nodes of one
    are a mesh of 4 × 4. Columns are as many as the largest node has devices, or fewer where a row would otherwise join
    a part of one node with another node.
    """
    devices = sum(sizes)
    ends = {0, *accumulate(sizes)}  # devices at which a node begins or ends

    def whole(first: int, last: int) -> bool:
        return {first, last} <= ends or not any(first < end < last for end in ends)

    for columns in range(max(sizes), 1, -1):
        firsts = range(0, devices, columns)
        if devices % columns == 0 and all(whole(first, first + columns) for first in firsts):
            return devices // columns, columns
    return devices, 1


@lru_cache(4096)
def _pipelines_first(mesh: tuple[int, int], dp: int, tp: int, pp: int) -> Placement:
    """One pipeline after the other, each with its stages next to each other.

    This is the transpose of Megatron-LM's order, in which the copies of one stage are next to each other.
    """
    return place_replicas([1] * pp, dp=dp, tp=tp)


def _tiling(*, horizontal: bool, by_columns: bool) -> Callable[[tuple[int, int], int, int, int], Placement]:
    """AMP's tilings (section 4.4): each stage gets a domino of tp × dp devices of the mesh.

    A horizontal domino has its tensor-parallel groups in rows of the mesh, a vertical domino in columns, across nodes.
    The paper does not say which domino belongs to which stage: here they follow each other along rows, or
    ``by_columns``. Nor does it say how a domino lies that is longer than the mesh: here it is folded.
    """

    @lru_cache(4096)
    def tiling(mesh: tuple[int, int], dp: int, tp: int, pp: int) -> Placement:
        rows, columns = mesh
        height, width = (dp, tp) if horizontal else (tp, dp)
        cells = _domino(height, width, mesh)
        tall, wide = (1 + max(cell[axis] for cell in cells.values()) for axis in (0, 1))
        if dp * tp * pp != rows * columns or tall * wide != dp * tp or rows % tall or columns % wide:
            raise PlanError(f"placement: dominoes of {height} × {width} devices do not tile {rows} × {columns} devices")
        corners = [(row, column) for row in range(0, rows, tall) for column in range(0, columns, wide)]
        if by_columns:
            corners.sort(key=lambda corner: corner[::-1])

        def rank(corner: tuple[int, int], pipeline: int, shard: int) -> int:
            row, column = cells[(pipeline, shard) if horizontal else (shard, pipeline)]
            return (corner[0] + row) * columns + corner[1] + column

        return tuple(
            tuple(rank(corner, pipeline, shard) for pipeline in range(dp) for shard in range(tp)) for corner in corners
        )

    return tiling


def _domino(height: int, width: int, mesh: tuple[int, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """(row, column) in a domino -> (row, column) on the mesh, from the domino's corner.

    A row that is longer than the mesh goes on in the next rows of the mesh, a column in the next columns.
    """
    rows, columns = mesh
    cells = {}
    for row in range(height):
        for column in range(width):
            if width > columns:
                cells[row, column] = divmod(row * width + column, columns)
            elif height > rows:
                cells[row, column] = divmod(column * height + row, rows)[::-1]
            else:
                cells[row, column] = row, column
    return cells


_PLACEMENTS: dict[str, Callable[[tuple[int, int], int, int, int], Placement]] = {
    "pipelines-first": _pipelines_first,
    "horizontal": _tiling(horizontal=True, by_columns=False),
    "horizontal-columns": _tiling(horizontal=True, by_columns=True),
    "vertical": _tiling(horizontal=False, by_columns=False),
    "vertical-columns": _tiling(horizontal=False, by_columns=True),
}
PLACEMENTS = (MEGATRON, *_PLACEMENTS)
AMP_PLACEMENTS = PLACEMENTS[2:]  # layouts that tile AMP's device mesh
