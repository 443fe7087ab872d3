"""The groups that communicate at the same time under a placement on a cluster, and the kinds of devices of each."""

from collections.abc import Sequence
from itertools import pairwise

from auto3d.cluster import Accelerator, Cluster
from auto3d.cost.collectives import Traffic

TOTALS_BYTES = 16  # the loss and the gradient norm, which all ranks reduce once per iteration


class PlacedTraffic:
    """Tensor-parallel groups, messages and gradient syncs under a placement.

    ``homes`` lists the pipeline devices of each stage. ``tensor`` has, for each pipeline device in each pipeline, the
    link of its first tensor-parallel group. ``distinct_pipelines`` has one pipeline of each kind: pipelines of one kind
    take equally long. ``holders`` lists, for each stage, the ranks that hold a copy of the first tensor-parallel shard
    of its weights. ``crosses`` says whether messages between pipeline devices cross nodes. ``traffic`` is the kind of
    Traffic: how links are shared, and what collectives take on them.
    """

    def __init__(
        self,
        cluster: Cluster,
        placement: tuple[tuple[int, ...], ...],
        tp: int,
        dp: int,
        homes: tuple[tuple[int, ...], ...],
        traffic: type[Traffic] = Traffic,
    ) -> None:
        self._traffic = traffic
        self._placement, self._tp, self.homes = placement, tp, homes
        self._tied: dict[tuple[int, ...], tuple[Traffic, tuple[int, ...]]] = {}
        self._ranks: dict[tuple[int, int], tuple[int, ...]] = {}
        for device, ranks in enumerate(placement):
            each = len(ranks) // dp
            for pipeline in range(dp):
                self._ranks[device, pipeline] = ranks[pipeline * each : (pipeline + 1) * each]
        self._slowest = {key: cluster.slowest(ranks) for key, ranks in self._ranks.items()}
        self._cluster = cluster
        self.distinct_pipelines = self._find_distinct(dp, len(placement))
        # Besides its operations, an iteration takes the time of the slowest host and an all-reduce of loss and norm.
        self.iteration_s = max(kind.iteration_s for kind in dict.fromkeys(self._slowest.values()))
        self.crosses = any(
            cluster.node_of[source] != cluster.node_of[target]
            for here, there in pairwise(placement)
            for source, target in zip(here, there, strict=False)
        )
        every_rank = [rank for ranks in placement for rank in ranks]
        nodes = {cluster.node_of[rank] for rank in every_rank}
        measured = cluster.nodes[min(nodes)].collectives
        if measured is not None and len(nodes) == 1 < len(every_rank):
            self.iteration_s += measured.all_reduce.interpolate(len(every_rank), TOTALS_BYTES)
        tensor_groups = [ranks[first : first + tp] for ranks in placement for first in range(0, len(ranks), tp)]
        inside = traffic(cluster, tensor_groups)
        self.tensor = {key: inside.group_link(ranks[:tp]) for key, ranks in self._ranks.items()} if tp > 1 else {}
        pairs = [
            (source, target) for here, there in pairwise(placement) for source, target in zip(here, there, strict=False)
        ]
        # A message to the next stage and one from it travel at the same time, in opposite directions.
        self.messages = traffic(cluster, pairs)
        self.holders = [tuple(rank for home in stage_homes for rank in placement[home][::tp]) for stage_homes in homes]
        # Stages on the same devices reduce their gradients one after the other, as in the simulator.
        sync_groups = [
            tuple(rank for home in stage_homes for rank in placement[home][shard::tp])
            for stage_homes in dict.fromkeys(tuple(sorted(devices)) for devices in homes)
            for shard in range(tp)
        ]
        self.sync = traffic(cluster, sync_groups)

    def ranks(self, device: int, pipeline: int) -> tuple[int, ...]:
        """The ranks of one pipeline device in one pipeline."""
        return self._ranks[device, pipeline]

    def tied_s(self, stages: tuple[int, ...], size: float) -> float:
        """Seconds of an all-reduce of tied weights among ``stages``; the groups of all shards reduce at the same time.

        Each tensor-parallel shard has one group, with one rank per device: the first replica in the first pipeline.
        Stages on one device share the weights.
        """
        if stages not in self._tied:
            heads = [self._placement[device] for device in dict.fromkeys(self.homes[stage][0] for stage in stages)]
            groups = [tuple(ranks[shard] for ranks in heads) for shard in range(self._tp)]
            self._tied[stages] = self._traffic(self._cluster, groups), groups[0]
        traffic, group = self._tied[stages]
        return traffic.all_reduce_s(group, size)

    def accelerator(self, devices: Sequence[int], pipeline: int) -> Accelerator:
        """The slowest kind of accelerator among the pipeline devices ``devices`` of one pipeline."""
        kinds = dict.fromkeys(self._slowest[device, pipeline] for device in devices)
        return (
            next(iter(kinds))
            if len(kinds) == 1
            else self._cluster.slowest(rank for device in devices for rank in self._ranks[device, pipeline])
        )

    def _find_distinct(self, dp: int, pp: int) -> list[int]:
        """One pipeline of each kind. The kind is its accelerators and which of its messages leave a node."""
        cluster = self._cluster
        first_of: dict[tuple, int] = {}
        for pipeline in range(dp):
            groups = [self._ranks[device, pipeline] for device in range(pp)]
            nodes = [cluster.node_of[ranks[0]] for ranks in groups]
            kinds = tuple(id(self._slowest[device, pipeline]) for device in range(pp))
            stays = tuple(here == there for here, there in pairwise(nodes))
            inside = tuple(cluster.node_of[ranks[0]] == cluster.node_of[ranks[-1]] for ranks in groups)
            outside = tuple(cluster.nodes[node].outside for node in nodes)
            first_of.setdefault((kinds, stays, inside, outside), pipeline)
        return list(first_of.values())
