"""A directed acyclic graph whose nodes can be merged, with a topological order that is kept up to date."""

from collections.abc import Iterable, Sequence, Set
from heapq import heapify, heappop, heappush


def topological_order(after: Sequence[Iterable[int]]) -> list[int] | None:
    """The nodes in an order in which each node precedes the nodes ``after`` it; None if the graph has a cycle.

    Of several possible nodes, the node with the lowest number is next. This keeps neighbours of the model's order
    together.
    """
    pending = [0] * len(after)  # predecessors that are not in the order yet
    for followers in after:
        for node in followers:
            pending[node] += 1
    ready = [node for node, count in enumerate(pending) if not count]
    heapify(ready)
    order = []
    while ready:
        node = heappop(ready)
        order.append(node)
        for follower in after[node]:
            pending[follower] -= 1
            if not pending[follower]:
                heappush(ready, follower)
    return order if len(order) == len(after) else None


def strong_components(after: Sequence[Iterable[int]]) -> list[list[int]]:
    """Groups of nodes that reach each other, by Kosaraju's algorithm: two walks, the second on reversed edges."""
    before: list[list[int]] = [[] for _ in after]
    for node, followers in enumerate(after):
        for follower in followers:
            before[follower].append(node)
    finished: list[int] = []
    seen = [False] * len(after)
    for root in range(len(after)):
        if seen[root]:
            continue
        seen[root] = True
        path = [(root, iter(after[root]))]
        while path:
            node, followers = path[-1]
            unseen = next((follower for follower in followers if not seen[follower]), None)
            if unseen is None:
                finished.append(node)
                path.pop()
            else:
                seen[unseen] = True
                path.append((unseen, iter(after[unseen])))
    components: list[list[int]] = []
    for root in reversed(finished):
        if not seen[root]:
            continue
        seen[root] = False
        component = [root]
        for node in component:
            for earlier in before[node]:
                if seen[earlier]:
                    seen[earlier] = False
                    component.append(earlier)
        components.append(component)
    return components


class MergingGraph:
    """A graph in which two neighbours can be merged if no path leads from one to the other through a third node.

    For two convex groups this is the paper's convexity (section III-B), and more: the merged graph has no cycle, so its
    groups can be put in sequence. Convexity alone does not guarantee that, although the paper concludes so: of a1 -> b1
    and b2 -> a2, {a1, a2} and {b1, b2} are convex, and each needs the other first.

    A search for such a path only visits nodes between the two in the current order, from both ends in turn, until one
    side has no more nodes. In a model, neighbours are close to each other, so a check and a merge visit few nodes.
    """

    def __init__(self, after: Sequence[Set[int]]) -> None:
        self.after = [set(followers) for followers in after]
        self.before: list[set[int]] = [set() for _ in after]
        for node, followers in enumerate(after):
            for follower in followers:
                self.before[follower].add(node)
        order = topological_order(after)
        assert order is not None
        self.place = [0] * len(after)  # index in the order; indices of merged nodes are not reused
        for place, node in enumerate(order):
            self.place[node] = place

    def neighbours(self, node: int) -> set[int]:
        return self.after[node] | self.before[node]

    def merge(self, node: int, other: int) -> bool:
        """Merge the neighbour ``other`` into ``node`` unless that makes a cycle; returns whether it did."""
        first, last = (node, other) if other in self.after[node] else (other, node)
        between = self._between(first, last)
        if between is None:
            return False
        descendants, ancestors = between
        for follower in self.after[other]:
            self.before[follower].discard(other)
            if follower != node:
                self.before[follower].add(node)
        for earlier in self.before[other]:
            self.after[earlier].discard(other)
            if earlier != node:
                self.after[earlier].add(node)
        self.after[node] = (self.after[node] | self.after[other]) - {node, other}
        self.before[node] = (self.before[node] | self.before[other]) - {node, other}
        self.after[other], self.before[other] = set(), set()
        # As in Pearce and Kelly's algorithm: ancestors, then the pair, then descendants, at the places they all had
        # before.
        places = sorted(self.place[member] for member in (*ancestors, first, last, *descendants))
        moved = (*sorted(ancestors, key=self.place.__getitem__), node)
        tail = sorted(descendants, key=self.place.__getitem__)
        self.place[other] = -1
        for member, place in zip(moved, places, strict=False):
            self.place[member] = place
        for member, place in zip(reversed(tail), reversed(places), strict=False):
            self.place[member] = place
        return True

    def _between(self, first: int, last: int) -> tuple[set[int], set[int]] | None:
        """(descendants of ``first``, ancestors of ``last``) between the two in the order; None if a node is both."""
        place = self.place
        low, high = place[first], place[last]
        descendants: set[int] = set()
        ancestors: set[int] = set()
        forward = [node for node in self.after[first] if place[node] < high]
        backward = [node for node in self.before[last] if place[node] > low]
        exhausted = False  # one side ran out of nodes without meeting the other, so there is no path
        while forward or backward:
            exhausted = exhausted or not forward or not backward
            if forward:
                node = forward.pop()
                if node not in descendants:
                    if not exhausted and (node in ancestors or last in self.after[node]):
                        return None
                    descendants.add(node)
                    forward.extend(follower for follower in self.after[node] if place[follower] < high)
            if backward:
                node = backward.pop()
                if node not in ancestors:
                    if not exhausted and (node in descendants or first in self.before[node]):
                        return None
                    ancestors.add(node)
                    backward.extend(earlier for earlier in self.before[node] if place[earlier] > low)
        return descendants, ancestors
