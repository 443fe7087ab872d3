"""The links of messages between stages, and how messages that travel at the same time share them."""

from collections.abc import Sequence
from functools import cache
from math import inf
from typing import NamedTuple

import numpy as np

from auto3d.cluster import Cluster, Link


class Sent(NamedTuple):
    """Messages of a forward, as arrays: the sending rank of each message, its pipeline device, and the receiving
    ranks."""

    source: np.ndarray
    here: np.ndarray
    target: np.ndarray
    there: np.ndarray

    def back(self) -> "Sent":
        """The gradients of these messages."""
        return Sent(self.target, self.there, self.source, self.here)


class MessageLinks:
    """The links of messages on ``cluster``, each with its equal part of the lanes that others use at the same time.

    The directions of a node's link are independent: what leaves a node does not slow down what enters it. With
    ``both_ways`` forwards and backwards alternate, so that activations and gradients travel together; otherwise all
    activations have arrived before the first gradient leaves. A rank's messages to one device go one after the other.
    """

    def __init__(self, cluster: Cluster, sent: Sent, *, both_ways: bool) -> None:
        self._cluster = cluster
        if both_ways:
            sent = Sent(*(np.concatenate(both) for both in zip(sent, sent.back(), strict=True)))
        node_of = np.array(cluster.node_of)
        across = node_of[sent.source] != node_of[sent.target]

        def counted(ranks: np.ndarray, peers: np.ndarray) -> list[int]:
            """Per node, the different pairs of a rank there and a pipeline device."""
            _, rank = np.divmod(np.unique(peers * len(node_of) + ranks), len(node_of))
            return np.bincount(node_of[rank], minlength=len(cluster.nodes)).tolist()

        self.crosses = bool(across.any())
        self._inside = counted(sent.source[~across], sent.there[~across])
        self._leaving = counted(sent.source[across], sent.there[across])
        self._entering = counted(sent.target[across], sent.here[across])
        self.link = cache(self._find_link)

    def _find_link(self, source: int, target: int) -> Link:
        """The link of a message of the forward from rank ``source`` to ``target``, and of its gradient."""
        here, there = (self._cluster.node_of[rank] for rank in (source, target))
        if here == there:
            inside = self._cluster.nodes[here].inside
            return Link(latency_s=inside.latency_s, bandwidth=inside.bandwidth_per_device(max(1, self._inside[here])))
        latency, bandwidth = 0.0, inf
        for number, messages in ((here, self._leaving[here]), (there, self._entering[there])):
            outside = self._cluster.nodes[number].outside
            assert outside is not None  # a Cluster of several nodes has links between them
            lanes = outside.lanes or self._cluster.nodes[number].devices
            latency = max(latency, outside.latency_s)
            bandwidth = min(bandwidth, outside.bandwidth * min(1.0, lanes / max(1, messages)))
        return Link(latency_s=latency, bandwidth=bandwidth)


def sent_between(pairs: Sequence[tuple[int, int, Sequence[tuple[int, int]]]]) -> Sent:
    """The messages between pipeline devices: each entry is two devices and the ranks that send and receive."""
    rows = [(source, here, target, there) for here, there, ranks in pairs for source, target in ranks]
    return Sent(*np.array(rows, dtype=int).reshape(-1, 4).T)
