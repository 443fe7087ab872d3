"""How long messages and collectives take on the links of a cluster, alone and beside each other.

Sizes are bytes, of the whole buffer that each rank holds.
"""

from collections import Counter
from collections.abc import Sequence
from math import ceil, inf, log2

from auto3d.cluster import Cluster, Link

Group = Sequence[int]  # devices, in the order of their ring


class Traffic:
    """Groups that communicate at the same time, and what each gets of the links that they share.

    A group that lies on several nodes enters and leaves each of them as often as it has devices there, at most once for
    each lane: its rings go through different lanes. Where several groups do, they share the lanes of the node.
    """

    def __init__(self, cluster: Cluster, groups: Sequence[Group]) -> None:
        self._cluster = cluster
        self._inside: Counter[int] = Counter()  # node -> devices that talk to others of it
        self._outside: Counter[int] = Counter()  # node -> devices that talk to other nodes
        self._links: dict[tuple[int, ...], Link] = {}
        for group in groups:
            homes = Counter(cluster.node_of[device] for device in group)
            for node, count in homes.items():
                if count > 1:
                    self._inside[node] += count
                if len(homes) > 1:
                    self._outside[node] += count

    def link(self, group: Group) -> Link:
        """The slowest link on the way around ``group``, with the bandwidth that it gives this group."""
        key = tuple(group)
        if key not in self._links:
            self._links[key] = self._find_link(group)
        return self._links[key]

    def _find_link(self, group: Group) -> Link:
        cluster = self._cluster
        homes = Counter(cluster.node_of[device] for device in group)
        latency, bandwidth = 0.0, inf
        for node, count in homes.items():
            if count > 1:
                link = cluster.nodes[node].inside
                latency, bandwidth = (
                    max(latency, link.latency_s),
                    min(bandwidth, link.bandwidth_per_device(self._inside[node])),
                )
            if len(homes) > 1:
                link = cluster.nodes[node].outside
                total = link.bandwidth * (link.lanes or cluster.nodes[node].devices)
                own = min(link.bandwidth * count, total * count / self._outside[node])
                latency, bandwidth = max(latency, link.latency_s), min(bandwidth, own)
        return Link(latency_s=latency, bandwidth=bandwidth)

    def all_reduce_s(self, group: Group, size: float) -> float:
        """What was measured in the node, else the faster of a ring and a tree, as libraries choose it.

        Nothing for a group of one.
        """
        if len(group) < 2 or not size:
            return 0.0
        homes = {self._cluster.node_of[device] for device in group}
        measured = self._cluster.nodes[min(homes)].all_reduce
        if len(homes) == 1 and measured is not None:
            return measured.interpolate(len(group), size)
        link = self.link(group)
        return min(ring_s(len(group), size, link), tree_s(len(group), size, link))

    def hierarchical_all_reduce_s(self, group: Group, size: float) -> float:
        """Inside each node first, then one shard for each of its devices between the nodes, then inside again."""
        homes: dict[int, list[int]] = {}
        for device in group:
            homes.setdefault(self._cluster.node_of[device], []).append(device)
        most = max(homes.values(), key=len)
        local = ring_s(len(most), size, self.link(most)) if len(most) > 1 else 0.0
        if len(homes) == 1:
            return local
        return local + ring_s(len(homes), size, self.link(group))  # all shards at a time, each on a lane of its own

    def message_s(self, source: int, target: int, size: float) -> float:
        """From one device to another, as one of the groups of two that this traffic was made of."""
        if source == target or not size:
            return 0.0
        link = self.link((source, target))
        return link.latency_s + size / link.bandwidth


def ring_s(ranks: int, size: float, link: Link) -> float:
    """All-reduce around a ring: reduce-scatter and all-gather, each ``ranks`` - 1 messages of size / ranks."""
    return 2 * (ranks - 1) * link.latency_s + 2 * (ranks - 1) / ranks * size / link.bandwidth


def tree_s(ranks: int, size: float, link: Link) -> float:
    """All-reduce up and down a binary tree, pipelined: fewer messages one after the other than a ring, more bytes."""
    return 2 * ceil(log2(ranks)) * link.latency_s + 2 * size / link.bandwidth


def amp_all_reduce_s(bandwidths: Sequence[float], size: float, *, beta: float = 1.0) -> float:
    """AMP's equation 1: β · 2M/N · Σ 1/B over the hops of the ring. For equal hops it is a ring's time and 2M/(N·B)."""
    return beta * 2 * size / len(bandwidths) * sum(1 / bandwidth for bandwidth in bandwidths)


def rabenseifner_all_reduce_s(ranks: int, size: float, link: Link) -> float:
    """Chimera, section 3.4: 2 (log2 r) α + 2 (r - 1) β L / r."""
    return 2 * log2(ranks) * link.latency_s + 2 * (ranks - 1) / ranks * size / link.bandwidth
