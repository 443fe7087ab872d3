"""Block-level partitioning (RaNNC, section III-B): k-way multilevel, down to k blocks that can run in sequence."""

from collections import Counter

from auto3d.partition.methods.rannc.atomic import Subcomponent
from auto3d.partition.methods.rannc.dag import MergingGraph, topological_order
from auto3d.partition.methods.rannc.units import Units

TOLERANCE = 0.05  # uncoarsening may let a block grow to this much above the mean to send less
OVERSIZE = 2.0  # coarsening makes no block that is longer than this times the mean
PASSES = 8  # of uncoarsening over one level, at most

Level = list[tuple[int, ...]]  # groups of units


def form_blocks(units: Units, blocks: int) -> list[tuple[Subcomponent, ...]]:
    """At most ``blocks`` blocks, in a sequence in which they can run; more only if no two neighbours fit a device."""
    formed = compact(units, uncoarsen(units, coarsen(units, blocks)), blocks)
    return [tuple(sub for unit in block for sub in units.members[unit]) for block in formed]


def coarsen(units: Units, blocks: int) -> list[Level]:
    """Merge neighbours, the shortest first, each once per level, until ``blocks`` are left or none can be merged.

    Whether two may be merged is decided on what the merges before have made of the graph: of two merges of one level,
    each alone may be possible and both not. Nor is a block made that is longer than ``OVERSIZE`` times the mean: where
    a model branches widely, that of the fork would swallow one branch after the other.
    """
    graph = MergingGraph(units.after)
    groups = {unit: (unit,) for unit in range(len(units.members))}
    seconds = dict(enumerate(units.seconds))
    at_most = {unit: sum(held.values()) for unit, held in enumerate(units.held)}  # bytes, shared ones counted twice
    levels = [list(groups.values())]
    longest = OVERSIZE * sum(units.seconds) / blocks
    while len(groups) > blocks:
        settled: set[int] = set()  # merged in this level
        for group in sorted(groups, key=lambda each: (seconds[each], each)):
            if group in settled or len(groups) == blocks:
                continue
            others = graph.neighbours(group) - settled
            for other in sorted(others, key=lambda each: (seconds[each], abs(graph.place[each] - graph.place[group]))):
                if seconds[group] + seconds[other] > longest:
                    break
                bytes_at_most = at_most[group] + at_most[other]
                if bytes_at_most > units.memory_bytes and not units.fit(groups[group] + groups[other]):
                    continue
                if graph.merge(group, other):
                    settled |= {group, other}
                    groups[group] += groups.pop(other)
                    seconds[group] += seconds.pop(other)
                    at_most[group] = bytes_at_most
                    break
        if not settled:
            break
        levels.append(list(groups.values()))
    return levels


def uncoarsen(units: Units, levels: list[Level]) -> Level:
    """Move groups of ever finer levels over the borders of the coarsest ones where that sends less or balances better.

    The paper compares what groups one level above exchange. Only what the coarsest exchange remains in the end, so
    that is what is compared here; and it looks at communication alone, which would undo the balance that the next phase
    needs: here a move that sends less must leave both blocks within ``TOLERANCE`` of the mean, or better than they
    were, and one that balances better must not send more.
    """
    borders = _Borders(units, levels[-1])
    for level in reversed(levels[:-1]):
        for _ in range(PASSES):
            if not sum(borders.improve(group) for group in level):
                break
    return borders.blocks()


class _Borders:
    """Blocks while groups move between them."""

    def __init__(self, units: Units, blocks: Level) -> None:
        self.units = units
        self.block_of = {unit: block for block, own in enumerate(blocks) for unit in own}
        self.members = [set(own) for own in blocks]
        self.seconds = [sum(units.seconds[unit] for unit in own) for own in blocks]
        self.limit = (1 + TOLERANCE) * sum(self.seconds) / len(blocks)
        self.roomy = sum(sum(held.values()) for held in units.held) <= units.memory_bytes  # all fit one device
        self.neighbours: list[set[int]] = [set(after) for after in units.after]
        for unit, after in enumerate(units.after):
            for follower in after:
                self.neighbours[follower].add(unit)
        self.makes: list[list[int]] = [[] for _ in units.after]  # numbers of exchanges, by unit
        self.uses: list[list[int]] = [[] for _ in units.after]
        for number, exchange in enumerate(units.exchanges):
            self.makes[exchange.maker].append(number)
            for user in exchange.users:
                self.uses[user].append(number)
        # exchange -> block -> its units that use the value
        self.users = [Counter(self.block_of[user] for user in exchange.users) for exchange in units.exchanges]
        pairs = ((self.block_of[unit], self.block_of[each]) for unit, after in enumerate(units.after) for each in after)
        self.edges = Counter(pairs)  # (block, block) -> pairs of units

    def blocks(self) -> Level:
        order = topological_order(self._after(self.edges))
        assert order is not None
        return [tuple(sorted(self.members[block])) for block in order]

    def improve(self, group: tuple[int, ...]) -> bool:
        """Move ``group`` to the neighbouring block where that helps most, if to any; whether it moved."""
        home = self.block_of[group[0]]
        targets = {self.block_of[each] for unit in group for each in self.neighbours[unit]} - {home}
        if not targets or len(group) == len(self.members[home]):
            return False
        weight = sum(self.units.seconds[unit] for unit in group)
        moving = set(group)
        made = {number for unit in group for number in self.makes[unit]}
        used = Counter(number for unit in group for number in self.uses[unit])
        found = []
        for target in sorted(targets):
            sent = sum(
                self._sends_more(number, used[number], number in made, home, target) for number in made | set(used)
            )
            was = max(self.seconds[home], self.seconds[target])
            longest = max(self.seconds[home] - weight, self.seconds[target] + weight)
            if (sent < 0 and longest <= max(was, self.limit)) or (sent <= 0 and longest < was):
                found.append((sent, longest, target))
        for _, _, target in sorted(found):
            edges = self._edges_after(moving, target)
            fits = self.roomy or self.units.fit(self.members[target] | moving)
            if fits and topological_order(self._after(edges)) is not None:
                self.edges = edges
                self.members[home] -= moving
                self.members[target] |= moving
                self.seconds[home] -= weight
                self.seconds[target] += weight
                self.block_of.update(dict.fromkeys(group, target))
                for number, units in used.items():
                    self.users[number] += Counter({target: units})
                    self.users[number] -= Counter({home: units})
                return True
        return False

    def _sends_more(self, number: int, moved: int, maker_moves: bool, home: int, target: int) -> float:
        """By how many bytes exchange ``number`` grows if ``moved`` of its users, and maybe its maker, change block.

        A value is sent once to each block that uses it.
        """
        users, source = self.users[number], self.block_of[self.units.exchanges[number].maker]
        before = len(users) - (source in users)
        leaves, comes = 0 < moved == users[home], moved > 0 and target not in users
        source = target if maker_moves else source
        uses_itself = {home: users[home] > moved, target: users[target] + moved > 0}.get(source, source in users)
        after = len(users) - leaves + comes - uses_itself
        return self.units.exchanges[number].bytes * (after - before)

    def _edges_after(self, moving: set[int], target: int) -> Counter[tuple[int, int]]:
        edges = self.edges.copy()
        for unit in moving:
            for other in self.neighbours[unit]:
                if other in moving:
                    continue
                pair, moved = (self.block_of[unit], self.block_of[other]), (target, self.block_of[other])
                if other in self.units.after[unit]:
                    edges[pair] -= 1
                    edges[moved] += 1
                else:
                    edges[pair[::-1]] -= 1
                    edges[moved[::-1]] += 1
        inside = sum(other in moving for unit in moving for other in self.units.after[unit])
        home = self.block_of[next(iter(moving))]
        edges[home, home] -= inside
        edges[target, target] += inside
        return edges

    def _after(self, edges: Counter[tuple[int, int]]) -> list[set[int]]:
        after: list[set[int]] = [set() for _ in self.members]
        for (source, target), count in edges.items():
            if count and source != target:
                after[source].add(target)
        return after


def compact(units: Units, blocks: Level, limit: int) -> Level:
    """Merge neighbours in the sequence, the shortest first, until ``limit`` blocks are left or memory forbids.

    Blocks that follow each other always may be merged, and the sequence stays one in which they can run. Where the
    shorter of the two neighbours does not fit, the other is tried, on which the paper is silent.
    """
    blocks = list(blocks)
    seconds = [sum(units.seconds[unit] for unit in block) for block in blocks]
    while len(blocks) > limit:
        for place in sorted(range(len(blocks)), key=seconds.__getitem__):
            sides = [side for side in (place - 1, place + 1) if 0 <= side < len(blocks)]
            fitting = [side for side in sides if units.fit(blocks[place] + blocks[side])]
            if fitting:
                first, last = sorted((place, min(fitting, key=seconds.__getitem__)))
                blocks[first : last + 1] = [blocks[first] + blocks[last]]
                seconds[first : last + 1] = [seconds[first] + seconds[last]]
                break
        else:
            break
    return blocks
