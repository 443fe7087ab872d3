"""Seconds of messages and collectives on the links of a cluster, with and without other traffic on the same links.

Sizes are bytes of the whole buffer that each rank holds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import ceil, inf, log2

import numpy as np

from auto3d.cluster import Cluster, CollectiveTimes, Link, NodeCollectives
from auto3d.conversions import Collective

MOST_LATENCY = 4  # a measured collective spends at least a quarter of its time on transfers

Group = Sequence[int]  # devices, in the order of their ring


@dataclass(frozen=True, slots=True)
class GroupLink:
    """How fast a group of devices communicates while others do: the slowest link of its ring, with its bandwidth.

    ``measured`` has the measured collectives of the node in which the whole group lies, if there are any.
    ``slowdown`` is how many times longer the group's devices compute while all of them do. ``hops`` has the bandwidth
    of each hop of the ring if collectives take AMP's equation 1. ``gather_bandwidth`` is the bandwidth of an all-gather
    or a reduce-scatter where it was measured (default: the bandwidth of ``link``).
    """

    ranks: int
    link: Link
    measured: NodeCollectives | None = None
    slowdown: float = 1.0
    hops: tuple[float, ...] = ()
    gather_bandwidth: float | None = None

    def seconds(self, collective: Collective | None, size: float) -> float:
        """Seconds of a collective on ``size`` bytes, of the whole tensor; zero for none.

        It takes its measured time where the group lies in one node that was measured. Else an all-reduce takes the
        faster of a ring and a tree, as communication libraries choose, and an all-gather or a reduce-scatter half of an
        all-reduce on a ring; by a paper's formula, half of its all-reduce.
        """
        if self.ranks < 2 or not size or collective is None:
            return 0.0
        if self.measured is not None:
            times: CollectiveTimes = getattr(self.measured, collective.name.lower())
            return times.interpolate(self.ranks, size)
        if self.hops:
            return amp_all_reduce_s(self.hops, size) * (1.0 if collective is Collective.ALL_REDUCE else 0.5)
        if collective is Collective.ALL_REDUCE:
            return min(ring_s(self.ranks, size, self.link), tree_s(self.ranks, size, self.link))
        bandwidth = self.link.bandwidth if self.gather_bandwidth is None else self.gather_bandwidth
        return gather_s(self.ranks, size, replace(self.link, bandwidth=bandwidth))

    def seconds_in_operation(self, collective: Collective, size: float) -> float:
        """What a collective adds to an operation before its device is slowed down by others.

        A measured collective was as slow as the group's own devices make each other.
        """
        return self.seconds(collective, size) / (1.0 if self.measured is None else self.slowdown)


_Homes = tuple[tuple[tuple[int, int, int], ...], tuple[int, ...]]
"""The kind of each node of a group, with its devices in groups inside it and across nodes; each device's node."""


class Traffic:
    """Groups that communicate at the same time, and the bandwidth that each gets of the links they share.

    A group on several nodes enters and leaves each node once per device that it has there, at most once per lane: its
    rings use different lanes. Several such groups share the lanes of a node.
    """

    shares_links = True

    def __init__(self, cluster: Cluster, groups: Sequence[Group]) -> None:
        self._cluster = cluster
        self._links: dict[_Homes, Link] = {}
        self._group_links: dict[_Homes, GroupLink] = {}
        self._distinct: dict[GroupLink, GroupLink] = {}  # groups on different kinds of nodes may have equal links
        devices, nodes = len(cluster.node_of), len(cluster.nodes)
        device_of = np.fromiter(chain.from_iterable(groups), dtype=int)
        group_of = np.repeat(np.arange(len(groups)), np.fromiter(map(len, groups), dtype=int))
        assert len(np.unique(group_of * devices + device_of)) == len(device_of), "a group has a device twice"
        parts, counts = np.unique(group_of * nodes + np.array(cluster.node_of)[device_of], return_counts=True)
        group, node = np.divmod(parts, nodes)  # a part of a group is its devices in one node
        leaves = np.bincount(group, minlength=len(groups))[group] > 1
        inside, outside = np.where(counts > 1, counts, 0), np.where(leaves, counts, 0)
        # Per node, the number of devices that communicate inside the node, and with other nodes.
        self._inside: list[int] = np.bincount(node, inside, nodes).astype(int).tolist()
        self._outside: list[int] = np.bincount(node, outside, nodes).astype(int).tolist()

    def _homes(self, group: Group) -> _Homes:
        """All that the link of ``group`` depends on: thousands of groups differ only in the numbers of their nodes."""
        nodes = [self._cluster.node_of[device] for device in group]
        order = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        kind_of, inside, outside = self._cluster.kind_of, self._inside, self._outside
        kinds = tuple([(kind_of[node], inside[node], outside[node]) for node in order])
        return kinds, tuple([order[node] for node in nodes])

    def link(self, group: Group) -> Link:
        """The slowest link on the ring of ``group``, with the bandwidth that it gets beside the groups."""
        key = self._homes(group)
        if key not in self._links:
            self._links[key] = self._find_link(group)
        return self._links[key]

    def _measured(self, group: Group) -> tuple[float, float] | None:
        """The bandwidths of links on which an all-reduce and an all-gather of ``group`` take their measured times.

        None where a node has no measurements. A ring is as slow as the slowest of its hops, so its number of ranks
        counts: a group has the bandwidth per lane of full nodes with as many ranks, and a lane for each of its devices.
        """
        cluster, link, ranks = self._cluster, self.link(group), len(group)
        homes = Counter(cluster.node_of[device] for device in group)
        bandwidths: list[tuple[float, float]] = []
        for number, count in homes.items():
            node = cluster.nodes[number]
            if node.bus is None:
                return None
            nodes = ranks / node.devices if len(homes) > 1 else 1
            share, most = 1.0, inf
            if len(homes) > 1:
                assert node.outside is not None  # a Cluster of several nodes has links between them
                share = count / max(node.devices, self._outside[number])
                most = node.outside.bandwidth * count
            reached = (
                all_reduce_bandwidth(node.bus.interpolate(node.bus.all_reduce, nodes), node.bus.size, ranks, link),
                all_gather_bandwidth(node.bus.interpolate(node.bus.all_gather, nodes), node.bus.size, ranks, link),
            )
            bandwidths.append((min(most, share * reached[0]), min(most, share * reached[1])))
        return min(pair[0] for pair in bandwidths), min(pair[1] for pair in bandwidths)

    def _find_link(self, group: Group) -> Link:
        cluster = self._cluster
        homes = Counter(cluster.node_of[device] for device in group)
        latency, bandwidth = 0.0, inf
        for node, count in homes.items():
            if count > 1:
                inside = cluster.nodes[node].inside
                latency = max(latency, inside.latency_s)
                bandwidth = min(bandwidth, inside.bandwidth_per_device(max(count, self._inside[node])))
            if len(homes) > 1:
                outside = cluster.nodes[node].outside
                assert outside is not None  # a Cluster of several nodes has links between them
                total = outside.bandwidth * (outside.lanes or cluster.nodes[node].devices)
                of_group = min(outside.bandwidth * count, total * count / max(count, self._outside[node]))
                latency, bandwidth = max(latency, outside.latency_s), min(bandwidth, of_group)
        return Link(latency_s=latency, bandwidth=bandwidth)

    def seconds(self, collective: Collective | None, group: Group, size: float) -> float:
        """Seconds of a collective of ``group`` on ``size`` bytes; zero for none, or for a single rank."""
        return self.group_link(group).seconds(collective, size) if len(group) > 1 and size else 0.0

    def group_link(self, group: Group) -> GroupLink:
        """The link of ``group``, with the collectives that were measured on it."""
        key = self._homes(group)
        if key not in self._group_links:
            link = self._find_group_link(group)
            self._group_links[key] = self._distinct.setdefault(link, link)
        return self._group_links[key]

    def _find_group_link(self, group: Group) -> GroupLink:
        homes = {self._cluster.node_of[device] for device in group}
        node = self._cluster.nodes[min(homes)]
        if len(homes) > 1 or node.collectives is None:
            link, measured = self.link(group), self._measured(group)
            if measured is None:
                return GroupLink(ranks=len(group), link=link)
            return GroupLink(ranks=len(group), link=replace(link, bandwidth=measured[0]), gather_bandwidth=measured[1])
        slowdown = node.slowdown[len(group) - 1] if node.slowdown else 1.0
        return GroupLink(ranks=len(group), link=self.link(group), measured=node.collectives, slowdown=slowdown)

    def message_s(self, source: int, target: int, size: float) -> float:
        """Seconds of a message between two devices; the pair is one of the groups given to this Traffic."""
        if source == target or not size:
            return 0.0
        link = self.link((source, target))
        return link.latency_s + size / link.bandwidth


class AmpTraffic(Traffic):
    """Traffic as AMP counts it (section 4.2): groups do not share links, and collectives take equation 1.

    A message has the whole bandwidth of the link between its two devices, whatever else uses the link.
    """

    shares_links = False

    def group_link(self, group: Group) -> GroupLink:
        """The link of ``group`` with the bandwidths of the hops of its ring."""
        alone = super().group_link(group)
        return replace(alone, hops=tuple(link.bandwidth for link in self._hops(group)))

    def _find_link(self, group: Group) -> Link:
        hops = self._hops(group)
        slowest = min(hops, key=lambda link: link.bandwidth)
        return replace(slowest, latency_s=max(link.latency_s for link in hops))

    def _hops(self, group: Group) -> list[Link]:
        """The link of each hop of the ring; a hop between two nodes is as slow as the slower of their links."""
        return [self._hop(here, there) for here, there in pairwise([*group, group[0]])]

    def _hop(self, here: int, there: int) -> Link:
        nodes = [self._cluster.nodes[self._cluster.node_of[device]] for device in (here, there)]
        if self._cluster.node_of[here] == self._cluster.node_of[there]:
            return replace(nodes[0].inside, lanes=None)
        outside = [node.outside for node in nodes if node.outside is not None]  # nodes of a cluster have links
        return Link(
            latency_s=max(link.latency_s for link in outside), bandwidth=min(link.bandwidth for link in outside)
        )


class ChimeraTraffic(Traffic):
    """Traffic as Chimera counts it (section 3.4): gradients are reduced by Rabenseifner's algorithm."""

    def seconds(self, collective: Collective | None, group: Group, size: float) -> float:
        """The same by Rabenseifner's algorithm, of which a reduce-scatter or an all-gather is a half."""
        if len(group) < 2 or not size or collective is None:
            return 0.0
        whole = rabenseifner_all_reduce_s(len(group), size, self.link(group))
        return whole if collective is Collective.ALL_REDUCE else whole / 2


TRAFFIC: dict[str, type[Traffic]] = {"amp": AmpTraffic, "chimera": ChimeraTraffic}
"""prediction.method -> the traffic of that paper's formula; default: Traffic."""


def ring_s(ranks: int, size: float, link: Link) -> float:
    """Seconds of an all-reduce on a ring: reduce-scatter, then all-gather.

    Both steps take ``ranks`` - 1 messages of ``size`` / ``ranks`` bytes.
    """
    return 2 * (ranks - 1) * link.latency_s + 2 * (ranks - 1) / ranks * size / link.bandwidth


def gather_s(ranks: int, size: float, link: Link) -> float:
    """Seconds of an all-gather to ``size`` bytes on a ring, or of a reduce-scatter of them: half of an all-reduce."""
    return ring_s(ranks, size, link) / 2


def tree_s(ranks: int, size: float, link: Link) -> float:
    """Seconds of a pipelined all-reduce up and down a binary tree: fewer messages in sequence than on a ring, but more
    bytes."""
    return 2 * ceil(log2(ranks)) * link.latency_s + 2 * size / link.bandwidth


def all_gather_bandwidth(bus: float, size: float, ranks: int, link: Link) -> float:
    """The bandwidth at which an all-gather of ``size`` bytes on a ring with the latency of ``link`` has the bus
    bandwidth ``bus``: without the latency of its hops, which a larger tensor does not take again."""
    sent = (ranks - 1) / ranks * size
    return sent / max(sent / bus - (ranks - 1) * link.latency_s, sent / bus / MOST_LATENCY)


def all_reduce_bandwidth(bus: float, size: float, ranks: int, link: Link) -> float:
    """The same for an all-reduce, by the faster of a ring and a tree."""
    seconds = 2 * (ranks - 1) / ranks * size / bus
    ring = 2 * (ranks - 1) / ranks * size, 2 * (ranks - 1) * link.latency_s
    tree = 2 * size, 2 * ceil(log2(ranks)) * link.latency_s
    return min(sent / max(seconds - latency, seconds / MOST_LATENCY) for sent, latency in (ring, tree))


def amp_all_reduce_s(bandwidths: Sequence[float], size: float) -> float:
    """Seconds by AMP, equation 1, with β = 1: 2M/N · Σ 1/B over the hops of the ring.

    For equal hops this is a ring's time plus 2M/(N·B).
    """
    return 2 * size / len(bandwidths) * sum(1 / bandwidth for bandwidth in bandwidths)


def rabenseifner_all_reduce_s(ranks: int, size: float, link: Link) -> float:
    """Seconds by Chimera, section 3.4: 2 (log2 r) α + 2 (r - 1) β L / r."""
    return 2 * log2(ranks) * link.latency_s + 2 * (ranks - 1) / ranks * size / link.bandwidth
