"""What communicates at a time where a Plan is placed on a cluster, and which kinds of devices play its stages."""

from collections.abc import Sequence
from itertools import pairwise

from auto3d.cluster import Accelerator, Cluster
from auto3d.cost.collectives import Traffic

TOTALS_BYTES = 16  # loss and gradient norm, of all ranks


class PlacedTraffic:
    """Tensor-parallel groups, messages and gradient syncs under a placement.

    ``different`` are replicas of the pipeline, one of each kind; ``homes`` are the pipeline devices of each stage.
    """

    def __init__(
        self,
        cluster: Cluster,
        placement: tuple[tuple[int, ...], ...],
        tp: int,
        dp: int,
        homes: tuple[tuple[int, ...], ...],
    ) -> None:
        self._placement, self._tp, self._homes = placement, tp, homes
        self._tied: dict[tuple[int, ...], tuple[Traffic, tuple[int, ...]]] = {}
        self._ranks = {}
        for device, ranks in enumerate(placement):
            each = len(ranks) // dp
            for replica in range(dp):
                self._ranks[device, replica] = ranks[replica * each : (replica + 1) * each]
        self._slowest = {key: cluster.slowest(ranks) for key, ranks in self._ranks.items()}
        self._cluster = cluster
        self.different = self._different(dp, len(placement))
        # Beside its operations, each iteration takes what the slowest host does, and an all-reduce of loss and norm.
        self.iteration_s = max(kind.iteration_s for kind in dict.fromkeys(self._slowest.values()))
        ranks = [rank for ranks in placement for rank in ranks]
        nodes = {cluster.node_of[rank] for rank in ranks}
        measured = cluster.nodes[min(nodes)].all_reduce
        if measured is not None and len(nodes) == 1 < len(ranks):
            self.iteration_s += measured.interpolate(len(ranks), TOTALS_BYTES)
        every = [ranks[first : first + tp] for ranks in placement for first in range(0, len(ranks), tp)]
        inside = Traffic(cluster, every)
        self.tensor = {key: inside.link(ranks[:tp]) for key, ranks in self._ranks.items()} if tp > 1 else {}
        pairs = [
            (source, target) for here, there in pairwise(placement) for source, target in zip(here, there, strict=False)
        ]
        # An upward message and a downward one are on their way at a time, in opposite directions.
        self.messages = Traffic(cluster, pairs)
        self.replicas = [tuple(rank for home in stage_homes for rank in placement[home][::tp]) for stage_homes in homes]
        shards = [
            tuple(rank for home in stage_homes for rank in placement[home][shard::tp])
            for stage_homes in dict.fromkeys(homes)
            for shard in range(tp)
        ]
        self.sync = Traffic(cluster, shards)

    def ranks(self, device: int, replica: int) -> tuple[int, ...]:
        """That play a pipeline device in one replica of the pipeline."""
        return self._ranks[device, replica]

    def tied_s(self, stages: tuple[int, ...], size: float) -> float:
        """Of an all-reduce among the first replicas of ``stages``, on each shard at a time."""
        if stages not in self._tied:
            heads = [self._placement[self._homes[stage][0]] for stage in stages]
            groups = [tuple(ranks[shard] for ranks in heads) for shard in range(self._tp)]
            self._tied[stages] = Traffic(self._cluster, groups), groups[0]
        traffic, group = self._tied[stages]
        return traffic.all_reduce_s(group, size)

    def accelerator(self, devices: Sequence[int], replica: int) -> Accelerator:
        """The slowest kind among those that play pipeline devices ``devices``."""
        kinds = dict.fromkeys(self._slowest[device, replica] for device in devices)
        return (
            next(iter(kinds))
            if len(kinds) == 1
            else self._cluster.slowest(rank for device in devices for rank in self._ranks[device, replica])
        )

    def _different(self, dp: int, pp: int) -> list[int]:
        """One replica of the pipeline of each kind: on what devices it is, and which of its messages leave a node."""
        cluster, found = self._cluster, {}
        for replica in range(dp):
            own = [self._ranks[device, replica] for device in range(pp)]
            nodes = [cluster.node_of[ranks[0]] for ranks in own]
            kinds = tuple(id(self._slowest[device, replica]) for device in range(pp))
            stays = tuple(here == there for here, there in pairwise(nodes))
            inside = tuple(cluster.node_of[ranks[0]] == cluster.node_of[ranks[-1]] for ranks in own)
            outside = tuple(cluster.nodes[node].outside for node in nodes)
            found.setdefault((kinds, stays, inside, outside), replica)
        return list(found.values())
