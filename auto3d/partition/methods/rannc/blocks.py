"""Block-level partitioning (RaNNC, section III-B): k-way multilevel partitioning into k blocks in sequence."""

from collections import Counter

from auto3d.partition.methods.rannc.atomic import Subcomponent
from auto3d.partition.methods.rannc.dag import MergingGraph, topological_order
from auto3d.partition.methods.rannc.units import Units

TOLERANCE = 0.05  # uncoarsening may let a block grow to this much above the mean to send less
OVERSIZE = 2.0  # coarsening makes no block longer than this times the mean
PASSES = 8  # uncoarsening passes over one level at most this often

Level = list[tuple[int, ...]]  # groups of units


def form_blocks(units: Units, blocks: int) -> list[tuple[Subcomponent, ...]]:
    """At most ``blocks`` blocks in a sequence in which they can run; more only if no two neighbours fit one device."""
    formed = compact(units, uncoarsen(units, coarsen(units, blocks)), blocks)
    return [tuple(sub for unit in block for sub in units.members[unit]) for block in formed]


def coarsen(units: Units, blocks: int) -> list[Level]:
    """The levels of merging neighbours, shortest first and once per level, until ``blocks`` remain or none can merge.

    Each merge is checked on the graph that earlier merges have produced: two merges of one level may each be possible
    alone and not together. No block becomes longer than ``OVERSIZE`` times the mean: in a model that branches widely,
    the block of the fork would swallow one branch after the other.
    """
    graph = MergingGraph(units.after)
    groups: dict[int, tuple[int, ...]] = {unit: (unit,) for unit in range(len(units.members))}
    seconds = dict(enumerate(units.seconds))
    at_most = {unit: sum(held.values()) for unit, held in enumerate(units.held)}  # bytes, shared tensors counted twice
    levels = [list(groups.values())]
    longest = OVERSIZE * sum(units.seconds) / blocks
    while len(groups) > blocks:
        settled: set[int] = set()  # groups that were merged in this level
        for group in sorted(groups, key=lambda unit: (seconds[unit], unit)):
            if group in settled or len(groups) == blocks:
                continue
            others = graph.neighbours(group) - settled
            for other in sorted(others, key=lambda unit: (seconds[unit], abs(graph.place[unit] - graph.place[group]))):
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
    """Move groups of ever finer levels between blocks of the coarsest level where that sends less or balances better.

    The paper compares the messages between groups one level above. Only the messages between blocks of the coarsest
    level remain in the end, so these are compared here. The paper also looks at communication alone, which would undo
    the balance that the next phase needs. Here a move that sends less must leave both blocks within ``TOLERANCE`` of
    the mean, or better than before, and a move that balances better must not send more.
    """
    borders = _Borders(units, levels[-1])
    for level in reversed(levels[:-1]):
        for _ in range(PASSES):
            if not sum(borders.improve(group) for group in level):
                break
    return borders.blocks()


class _Borders:
    """The blocks while groups move between them."""

    def __init__(self, units: Units, blocks: Level) -> None:
        self.units = units
        self.block_of = {unit: block for block, members in enumerate(blocks) for unit in members}
        self.members = [set(block) for block in blocks]
        self.seconds = [sum(units.seconds[unit] for unit in block) for block in blocks]
        self.limit = (1 + TOLERANCE) * sum(self.seconds) / len(blocks)
        self.roomy = sum(sum(held.values()) for held in units.held) <= units.memory_bytes  # everything fits one device
        self.neighbours: list[set[int]] = [set(after) for after in units.after]
        for unit, after in enumerate(units.after):
            for follower in after:
                self.neighbours[follower].add(unit)
        self.makes: list[list[int]] = [[] for _ in units.after]  # per unit, numbers of the values it sends
        self.uses: list[list[int]] = [[] for _ in units.after]
        for number, value in enumerate(units.sent_values):
            self.makes[value.maker].append(number)
            for user in value.users:
                self.uses[user].append(number)
        # per sent value: block -> number of its units that use the value
        self.users = [Counter(self.block_of[user] for user in value.users) for value in units.sent_values]
        pairs = (
            (self.block_of[unit], self.block_of[later]) for unit, after in enumerate(units.after) for later in after
        )
        self.edges = Counter(pairs)  # (block, block) -> number of pairs of units

    def blocks(self) -> Level:
        order = topological_order(self._after(self.edges))
        assert order is not None
        return [tuple(sorted(self.members[block])) for block in order]

    def improve(self, group: tuple[int, ...]) -> bool:
        """Move ``group`` to the neighbouring block where that helps most; returns whether it moved."""
        home = self.block_of[group[0]]
        targets = {self.block_of[neighbour] for unit in group for neighbour in self.neighbours[unit]} - {home}
        if not targets or len(group) == len(self.members[home]):
            return False
        weight = sum(self.units.seconds[unit] for unit in group)
        moving = set(group)
        made = {number for unit in group for number in self.makes[unit]}
        used = Counter(number for unit in group for number in self.uses[unit])
        moves = []
        for target in sorted(targets):
            sent = sum(
                self._sends_more(number, used[number], number in made, home, target) for number in made | set(used)
            )
            was = max(self.seconds[home], self.seconds[target])
            longest = max(self.seconds[home] - weight, self.seconds[target] + weight)
            if (sent < 0 and longest <= max(was, self.limit)) or (sent <= 0 and longest < was):
                moves.append((sent, longest, target))
        for _, _, target in sorted(moves):
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
        """Bytes that sent value ``number`` takes more if ``moved`` of its users, and maybe its maker, change block.

        A value is sent once to each block that uses it.
        """
        users, source = self.users[number], self.block_of[self.units.sent_values[number].maker]
        before = len(users) - (source in users)
        leaves, comes = 0 < moved == users[home], moved > 0 and target not in users
        source = target if maker_moves else source
        uses_itself = {home: users[home] > moved, target: users[target] + moved > 0}.get(source, source in users)
        after = len(users) - leaves + comes - uses_itself
        return self.units.sent_values[number].bytes * (after - before)

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
    """Merge neighbours in the sequence, shortest first, until ``limit`` blocks remain or memory forbids it.

    Consecutive blocks can always be merged, and the blocks can still run in sequence. If the shorter of the two
    neighbours does not fit, the other is tried; the paper is silent on this.
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
