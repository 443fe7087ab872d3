"""Where the ranks of a plan lie on the cluster: Megatron-LM's order, whole pipelines first, and AMP's tilings."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

from auto3d.cluster import Cluster, place_ranks
from auto3d.plan import PlanError

Placement = tuple[tuple[int, ...], ...]
MEGATRON = "megatron"


def place(name: str, cluster: Cluster, *, dp: int, tp: int, pp: int) -> Placement:
    """The Plan's ``placement`` of this name; raises PlanError where the cluster has none such."""
    if name == MEGATRON:
        return place_ranks(dp=dp, pp=pp, tp=tp)
    return _PLACEMENTS[name](_mesh(cluster), dp, tp, pp)


def place_replicas(replicas: Sequence[int], *, dp: int, tp: int = 1) -> Placement:
    """Of stages with so many replicas each: every pipeline has ranks in a row, so nodes of its own, as RaNNC means it
    (Tanaka et al. 2021, section III-C)."""
    first = list(accumulate(replicas, initial=0))  # place of each stage in a pipeline, and the places of one
    return tuple(
        tuple(
            (pipeline * first[-1] + first[stage] + part) * tp + shard
            for pipeline in range(dp)
            for part in range(count)
            for shard in range(tp)
        )
        for stage, count in enumerate(replicas)
    )


def _mesh(cluster: Cluster) -> tuple[int, int]:
    """Nodes, and devices of each; 0 where nodes have different numbers of them."""
    sizes = {node.devices for node in cluster.nodes}
    return len(cluster.nodes), sizes.pop() if len(sizes) == 1 else 0


@lru_cache(4096)
def _pipelines_first(mesh: tuple[int, int], dp: int, tp: int, pp: int) -> Placement:
    """The stages of a pipeline are neighbours, and replicas of the pipeline follow each other: the transpose of
    Megatron-LM's order, whose replicas of a stage are."""
    return place_replicas([1] * pp, dp=dp, tp=tp)


def _tiling(*, horizontal: bool, by_columns: bool) -> Callable[[tuple[int, int], int, int, int], Placement]:
    """AMP's tilings (section 4.4): the mesh has a row for each node, and each stage a domino of tp × dp devices.

    A horizontal domino has its tensor-parallel groups in rows, inside nodes; a vertical one in columns, across nodes.
    The paper leaves open which domino is which stage: they follow each other along the rows, or ``by_columns``.
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

        def rank(corner: tuple[int, int], replica: int, shard: int) -> int:
            row, column = (replica, shard) if horizontal else (shard, replica)
            return (corner[0] + row) * columns + corner[1] + column

        return tuple(
            tuple(rank(corner, replica, shard) for replica in range(dp) for shard in range(tp)) for corner in corners
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
