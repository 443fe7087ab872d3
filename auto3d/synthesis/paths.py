"""Heads: the earliest time at which each operation of a pipe can begin, in any order that respects some arcs.

A pipe is a graph of nodes, such as "F on stage 2", each of which stands for one operation per micro-batch. An arc with
offset m joins micro-batch n of its first node with micro-batch n + m of its second. Tails, the least times from the end
of an operation to the end of the iteration, are the heads of the reversed graph.
"""

from dataclasses import dataclass, replace

import numpy as np

Heads = list[list[float]]  # per node, per micro-batch


@dataclass(frozen=True, kw_only=True)
class Arc:
    """Micro-batch n + ``offset`` of ``after`` begins ``lag`` after the end of micro-batch n of ``before`` or later."""

    before: int
    after: int
    lag: float = 0.0
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Pipe:
    """The operations of one pipe. Arcs of offset 0 lead from a node to a node of higher number."""

    micro_batches: int
    devices: list[int]  # per node
    durations: list[float]  # per node
    release: list[float]  # per node: the head of its first operation is at least that
    arcs: list[Arc]

    def reversed(self, release: list[float]) -> "Pipe":
        """The graph against time's direction: nodes and micro-batches in reverse, with another release."""
        last = len(self.durations) - 1
        return replace(
            self,
            devices=self.devices[::-1],
            durations=self.durations[::-1],
            release=release[::-1],
            arcs=[replace(arc, before=last - arc.after, after=last - arc.before) for arc in self.arcs],
        )


def heads(graph: Pipe) -> Heads:
    """The longest paths, at first over the arcs alone and then with the ends of each device's earlier operations."""
    if not graph.micro_batches:
        return [[] for _ in graph.durations]
    return _longest_paths(graph, _machine_ends(graph, _longest_paths(graph, None)))


def least_time(graph: Pipe, first: int, last: int) -> float:
    """The least time from the start of node ``first`` to the end of node ``last``, for the same micro-batch."""
    start: dict[int, float] = {first: 0.0}
    for arc in sorted(graph.arcs, key=lambda arc: arc.before):
        if not arc.offset and arc.before in start:
            at = start[arc.before] + graph.durations[arc.before] + arc.lag
            start[arc.after] = max(at, start.get(arc.after, 0.0))
    return start[last] + graph.durations[last]


def _longest_paths(graph: Pipe, floors: Heads | None) -> Heads:
    durations = graph.durations
    into: list[list[tuple[int, float, int]]] = [[] for _ in durations]
    for arc in graph.arcs:
        into[arc.after].append((arc.before, durations[arc.before] + arc.lag, arc.offset))
    earliest: Heads = [[] for _ in durations]
    for n in range(graph.micro_batches):
        for node, arcs in enumerate(into):
            at = graph.release[node] if floors is None else floors[node][n]
            if n:
                at = max(at, earliest[node][-1] + durations[node])
            for before, gap, offset in arcs:
                if n >= offset:
                    time = earliest[before][n - offset] + gap
                    if time > at:
                        at = time
            earliest[node].append(at)
    return earliest


def _machine_ends(graph: Pipe, known: Heads) -> Heads:
    """Per operation, when one machine has ended all that precede it on its device, each begun at its head or later.

    That is the largest sum of a time and of the work of operations that begin then or later. Micro-batches up to
    n - o of one node precede micro-batch n of another, where o is the least sum of offsets along a path of arcs.
    """
    count, last = len(graph.durations), graph.micro_batches
    offsets = np.full((count, count), float(last))
    for arc in graph.arcs:
        offsets[arc.before, arc.after] = min(offsets[arc.before, arc.after], arc.offset)
    np.fill_diagonal(offsets, 1)
    for via in range(count):
        np.minimum(offsets, offsets[:, via, None] + offsets[None, via, :], out=offsets)
    ends: Heads = [[] for _ in graph.durations]
    numbers = np.arange(last)
    for device in set(graph.devices):
        nodes = [node for node, home in enumerate(graph.devices) if home == device]
        times = {node: np.array(known[node]) for node in nodes}
        thresholds = np.unique(np.concatenate(list(times.values())))
        earlier = {node: np.searchsorted(times[node], thresholds) for node in nodes}
        for node in nodes:
            work = np.zeros((last, len(thresholds)))
            for other in nodes:
                offset = int(offsets[other, node])
                if offset < last:
                    work += graph.durations[other] * np.maximum(numbers[:, None] + 1 - offset - earlier[other], 0)
            least = np.where(work > 0, work + thresholds, graph.release[node]).max(axis=1)
            ends[node] = np.maximum(least, graph.release[node]).tolist()
    return ends
