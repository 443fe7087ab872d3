"""Placements of a plan's ranks on the cluster: Megatron-LM's order, whole pipelines first, and AMP's tilings."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

from auto3d.cluster import Cluster, place_ranks
from auto3d.plan import PlanError

Placement = tuple[tuple[int, ...], ...]
MEGATRON = "megatron"


def place(name: str, cluster: Cluster, *, dp: int, tp: int, pp: int) -> Placement:
    """The ``Plan.placement`` called ``name``; raises PlanError if it is not possible on the cluster."""
    if name == MEGATRON:
        return place_ranks(dp=dp, pp=pp, tp=tp)
    return _PLACEMENTS[name](_mesh(cluster), dp, tp, pp)


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


def _mesh(cluster: Cluster) -> tuple[int, int]:
    """(number of nodes, devices of each); 0 devices if nodes differ in them."""
    sizes = {node.devices for node in cluster.nodes}
    return len(cluster.nodes), sizes.pop() if len(sizes) == 1 else 0


@lru_cache(4096)
def _pipelines_first(mesh: tuple[int, int], dp: int, tp: int, pp: int) -> Placement:
    """One pipeline after the other, each with its stages next to each other.

    This is the transpose of Megatron-LM's order, in which the copies of one stage are next to each other.
    """
    return place_replicas([1] * pp, dp=dp, tp=tp)


def _tiling(*, horizontal: bool, by_columns: bool) -> Callable[[tuple[int, int], int, int, int], Placement]:
    """AMP's tilings (section 4.4): the mesh has a row for each node, and each stage gets a domino of tp × dp devices.

    A horizontal domino has its tensor-parallel groups in rows, inside nodes; a vertical one in columns, across nodes.
    The paper does not say which domino belongs to which stage. Here they follow each other along rows, or
    ``by_columns``.
    """

    @lru_cache(4096)
    def tiling(mesh: tuple[int, int], dp: int, tp: int, pp: int) -> Placement:
        rows, columns = mesh
        height, width = (dp, tp) if horizontal else (tp, dp)
        if not columns or dp * tp * pp != rows * columns or rows % height or columns % width:
            across = f"{rows} × {columns} devices" if columns else "nodes of different sizes"
            raise PlanError(f"placement: dominoes of {height} × {width} devices do not tile {across}")
        corners = [(row, column) for row in range(0, rows, height) for column in range(0, columns, width)]
        if by_columns:
            corners.sort(key=lambda corner: corner[::-1])

        def rank(corner: tuple[int, int], pipeline: int, shard: int) -> int:
            row, column = (pipeline, shard) if horizontal else (shard, pipeline)
            return (corner[0] + row) * columns + corner[1] + column

        return tuple(
            tuple(rank(corner, pipeline, shard) for pipeline in range(dp) for shard in range(tp)) for corner in corners
        )

    return tiling


_PLACEMENTS: dict[str, Callable[[tuple[int, int], int, int, int], Placement]] = {
    "pipelines-first": _pipelines_first,
    "horizontal": _tiling(horizontal=True, by_columns=False),
    "horizontal-columns": _tiling(horizontal=True, by_columns=True),
    "vertical": _tiling(horizontal=False, by_columns=False),
    "vertical-columns": _tiling(horizontal=False, by_columns=True),
}
PLACEMENTS = (MEGATRON, *_PLACEMENTS)
