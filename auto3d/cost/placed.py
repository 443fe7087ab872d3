"""The groups that communicate at the same time under a placement on a cluster, and the kinds of devices of each
group."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from auto3d.cluster import Accelerator, Cluster, Link
from auto3d.cost.collectives import GroupLink, Traffic
from auto3d.cost.message_links import MessageLinks, Sent, sent_between
from auto3d.mesh import PIPELINE, REPLICA, TENSOR, Mesh
from auto3d.resplit import pieces

TOTALS_BYTES = 16  # the loss and the gradient norm, which all ranks reduce once per iteration


class PlacedTraffic:
    """Tensor-parallel groups, messages and gradient syncs under a placement.

    ``homes`` lists the pipeline devices of each stage. ``tensor`` has, for each pipeline device in each pipeline, the
    link of its first tensor-parallel group. ``distinct_pipelines`` has one pipeline of each kind: pipelines of one kind
    take equally long. ``holders`` lists, for each stage, the ranks that hold a copy of the first tensor-parallel shard
    of its weights. ``crosses`` says whether messages between pipeline devices cross nodes. ``traffic`` is the kind of
    Traffic: how links are shared, and what collectives take on them. ``alternates`` says whether forwards and backwards
    alternate, so that activations and gradients travel at the same time.
    """

    def __init__(
        self,
        cluster: Cluster,
        meshes: Sequence[Mesh],
        homes: tuple[tuple[int, ...], ...],
        traffic: type[Traffic] = Traffic,
        *,
        alternates: bool = True,
    ) -> None:
        self._traffic, self._meshes = traffic, meshes
        self.homes, self._tp = homes, meshes[0].size(TENSOR)
        self._tied: dict[tuple[tuple[int, ...], bool], tuple[Traffic, tuple[int, ...]]] = {}
        pipelines = range(meshes[0].size(PIPELINE))
        self._ranks = {(n, p): mesh.at(pipeline=p) for n, mesh in enumerate(meshes) for p in pipelines}
        self._slowest = {key: cluster.slowest(ranks) for key, ranks in self._ranks.items()}
        self._cluster = cluster
        self.distinct_pipelines = self._find_distinct(len(pipelines), len(meshes))
        # Besides its operations, an iteration takes the time of the slowest host and an all-reduce of loss and norm.
        self.iteration_s = max(kind.iteration_s for kind in dict.fromkeys(self._slowest.values()))
        links = MessageLinks(cluster, self._sent(len(pipelines)), both_ways=alternates)
        self.crosses = links.crosses
        every_rank = [rank for mesh in meshes for rank in mesh.ranks]
        nodes = {cluster.node_of[rank] for rank in every_rank}
        measured = cluster.nodes[min(nodes)].collectives
        if measured is not None and len(nodes) == 1 < len(every_rank):
            self.iteration_s += measured.all_reduce.interpolate(len(every_rank), TOTALS_BYTES)
        self.tensor: dict[tuple[int, int], GroupLink] = {}
        if self._tp > 1:
            inside = traffic(cluster, [group for mesh in meshes for group in mesh.groups(TENSOR)])
            self.tensor = {key: inside.group_link(ranks[: self._tp]) for key, ranks in self._ranks.items()}
        alone = traffic(cluster, [])
        self._link = links.link if traffic.shares_links else lambda source, target: alone.link((source, target))
        self.routes = cache(self._find_routes)
        self.holders = [_holders(meshes, stage_homes, tensor=0) for stage_homes in homes]
        # Stages on the same devices reduce their gradients one after the other, as in the simulator.
        sync_groups = [
            _holders(meshes, stage_homes, tensor=shard)
            for stage_homes in dict.fromkeys(tuple(sorted(devices)) for devices in homes)
            for shard in range(self._tp)
        ]
        self.sync = traffic(cluster, sync_groups)

    def ranks(self, device: int, pipeline: int) -> tuple[int, ...]:
        """The ranks of one pipeline device in one pipeline."""
        return self._ranks[device, pipeline]

    def _sent(self, pipelines: int) -> Sent:
        """The messages of a forward, in all pipelines and of all shards."""
        pairs = {pair for here, there in pairwise(self.homes) for pair in zip(here, there, strict=True)}
        return sent_between(
            [
                (here, there, [*_exchanging(self._ranks[here, pipeline], self._ranks[there, pipeline], self._tp)])
                for here, there in sorted(pairs)
                if here != there
                for pipeline in range(pipelines)
            ]
        )

    def _find_routes(self, source: int, target: int, pipeline: int) -> tuple["Route", ...]:
        """The routes of a micro-batch from pipeline device ``source`` to ``target`` in one pipeline."""
        here, there = (self._ranks[device, pipeline][:: self._tp] for device in (source, target))
        whole = len(here) * len(there)  # a length that both sides can slice
        return tuple(
            Route(
                sender=piece.source,
                receiver=piece.target,
                link=self._link(here[piece.source], there[piece.target]),
                part=piece.length / whole,
            )
            for piece in pieces(whole, sources=len(here), targets=len(there))
            if piece.length is not None
        )

    def summing(self, stages: tuple[int, ...], *, apart: bool = False) -> tuple[Traffic, tuple[int, ...]]:
        """The ranks that hold the weights of ``stages``, of the first shard, and their Traffic, beside other shards'.

        ``apart``: each of the stages has summed its own copy of the gradients, so one rank per device takes part, of
        the first replica in the first pipeline. Stages on one device share the weights.
        """
        if len(stages) == 1:
            return self.sync, self.holders[stages[0]]
        if (stages, apart) not in self._tied:
            devices = tuple(dict.fromkeys(d for stage in stages for d in self.homes[stage][: 1 if apart else None]))
            first = {PIPELINE: 0, REPLICA: 0} if apart else {}
            groups = [_holders(self._meshes, devices, tensor=shard, **first) for shard in range(self._tp)]
            self._tied[stages, apart] = self._traffic(self._cluster, groups), groups[0]
        return self._tied[stages, apart]

    def accelerator(self, devices: Sequence[int], pipeline: int) -> Accelerator:
        """The slowest kind of accelerator among the pipeline devices ``devices`` of one pipeline."""
        kinds = dict.fromkeys(self._slowest[device, pipeline] for device in devices)
        if len(kinds) == 1:
            return next(iter(kinds))
        return self._cluster.slowest(rank for device in devices for rank in self._ranks[device, pipeline])

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


class Route(NamedTuple):
    """What replica ``sender`` of a stage sends to replica ``receiver`` of the next: this part of a micro-batch."""

    sender: int
    receiver: int
    link: Link
    part: float


def _exchanging(here: Sequence[int], there: Sequence[int], tp: int) -> Iterator[tuple[int, int]]:
    """The pairs of ranks of two pipeline devices that exchange samples; each tensor-parallel rank has its peer."""
    if len(here) == len(there):
        yield from zip(here, there, strict=True)
        return
    sources, targets = len(here) // tp, len(there) // tp
    for piece in pieces(sources * targets, sources=sources, targets=targets):
        source, target = piece.source * tp, piece.target * tp
        yield from zip(here[source : source + tp], there[target : target + tp], strict=True)


def _holders(meshes: Sequence[Mesh], devices: Sequence[int], **place: int) -> tuple[int, ...]:
    """The ranks of the pipeline devices ``devices`` at ``place``, such as ``tensor=0``: the holders of that shard."""
    return tuple(rank for device in devices for rank in meshes[device].at(**place))
