"""A graph without cycles whose nodes are merged, in an order in which they can run that is kept up to date."""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush


def topological_order(after: Sequence[Iterable[int]]) -> list[int] | None:
    """Nodes so that each comes before those ``after`` it, the lower number first where both may; None if there is none.

    Taking the lower number first keeps neighbours of the model's own order together.
    """
    waiting = [0] * len(after)
    for followers in after:
        for node in followers:
            waiting[node] += 1
    ready = [node for node, count in enumerate(waiting) if not count]
    heapify(ready)
    order = []
    while ready:
        node = heappop(ready)
        order.append(node)
        for follower in after[node]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heappush(ready, follower)
    return order if len(order) == len(after) else None


def strong_components(after: Sequence[Iterable[int]]) -> list[list[int]]:
    """Groups of nodes that reach each other (Kosaraju: by a reversed walk in the order in which a walk leaves them)."""
    before: list[list[int]] = [[] for _ in after]
    for node, followers in enumerate(after):
        for follower in followers:
            before[follower].append(node)
    left: list[int] = []
    seen = [False] * len(after)
    for root in range(len(after)):
        if seen[root]:
            continue
        seen[root] = True
        path = [(root, iter(after[root]))]
        while path:
            node, followers = path[-1]
            follower = next((follower for follower in followers if not seen[follower]), None)
            if follower is None:
                left.append(node)
                path.pop()
            else:
                seen[follower] = True
                path.append((follower, iter(after[follower])))
    components: list[list[int]] = []
    for root in reversed(left):
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
    """Two neighbours may be merged if no path leads from one to the other through a third node.

    That is the paper's convexity (section III-B) for two groups that are convex, and more: the merged graph has no
    cycle, so its groups can be put in sequence. Convex groups alone need not allow that, though the paper concludes so:
    of a1 -> b1 and b2 -> a2, {a1, a2} and {b1, b2} are convex and each needs the other first.

    To find such a path, only nodes between the two in the kept order have to be visited, from both ends in turn until
    one side has no more: in a model, neighbours are near each other, so a check and a merge visit a few nodes.
    """

    def __init__(self, after: Sequence[set[int]]) -> None:
        self.after = [set(followers) for followers in after]
        self.before: list[set[int]] = [set() for _ in after]
        for node, followers in enumerate(after):
            for follower in followers:
                self.before[follower].add(node)
        order = topological_order(after)
        assert order is not None
        self.place = [0] * len(after)  # in the order; places of nodes that were merged away are not used again
        for place, node in enumerate(order):
            self.place[node] = place

    def neighbours(self, node: int) -> set[int]:
        return self.after[node] | self.before[node]

    def merge(self, node: int, other: int) -> bool:
        """Put ``other``, a neighbour, into ``node`` if that makes no cycle; whether it was done."""
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
        # As Pearce and Kelly keep an order: what the pair needs, the pair, what needs it, on the places of all these.
        places = sorted(self.place[each] for each in (*ancestors, first, last, *descendants))
        moved = (*sorted(ancestors, key=self.place.__getitem__), node)
        tail = sorted(descendants, key=self.place.__getitem__)
        self.place[other] = -1
        for each, place in zip(moved, places, strict=False):
            self.place[each] = place
        for each, place in zip(reversed(tail), reversed(places), strict=False):
            self.place[each] = place
        return True

    def _between(self, first: int, last: int) -> tuple[set[int], set[int]] | None:
        """Nodes placed between the two that ``first`` leads to, and that lead to ``last``; None if one does both."""
        place = self.place
        low, high = place[first], place[last]
        descendants: set[int] = set()
        ancestors: set[int] = set()
        forward = [node for node in self.after[first] if place[node] < high]
        backward = [node for node in self.before[last] if place[node] > low]
        exhausted = False  # one side has no more and did not meet the other: there is no path
        while forward or backward:
            exhausted = exhausted or not forward or not backward
            if forward:
                node = forward.pop()
                if node not in descendants:
                    if not exhausted and (node in ancestors or last in self.after[node]):
                        return None
                    descendants.add(node)
                    forward.extend(each for each in self.after[node] if place[each] < high)
            if backward:
                node = backward.pop()
                if node not in ancestors:
                    if not exhausted and (node in descendants or first in self.before[node]):
                        return None
                    ancestors.add(node)
                    backward.extend(each for each in self.before[node] if place[each] > low)
        return descendants, ancestors
