"""Choose the placements of a whole program with the least communication, by dynamic programming over its operations.

A state says which placements of the values that are still needed exist so far; converting a value once serves all its
later uses. Of states that agree in this, only the cheapest goes on. Operations are decided in order, but a state is
kept as long as it may still win, so a choice can pay off later (greedy choice does not: it left LLaMA with 18
collectives in place of 4 for 2 layers).

Layers repeat, so the options of an operation are computed once for all operations that are alike in ways, sizes and
placements of operands.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from auto3d.capture.in_place import is_mutable
from auto3d.capture.model import CapturedModel
from auto3d.plan import PlanError
from auto3d.tensor.collectives import CONVERSION_BETWEEN, Collective, Conversion
from auto3d.tensor.rules.call import Way
from auto3d.tensor.ways import Operation, has_gradient, operations_of
from auto3d.tensor_placement import COPIED, WHOLE, Kind, Split, TensorPlacement

STATES = 48  # states that go on after each operation; those of a transformer layer are about 20
_LATENCY_BYTES = 2.0**14  # a collective costs as much as so many bytes, however small it is
_WHOLE_FLOP = 1.0  # cost of one FLOP of a product whose weight is whole, in bytes: weights are split if they can be
_WHOLE_PRODUCT = 2.0**22  # what a product whose weight is whole costs besides, in bytes, however small it is
_WHOLE_TABLE = 16.0  # cost of one byte of a table that is whole, in bytes: with its gradient and its optimizer state
_WHOLE_BYTE = 1e-6  # cost of one byte of a value that is not split: of equal ways, the one that saves memory


@dataclass(frozen=True, slots=True)
class Converted:
    """A conversion of the value of ``node`` before an operation needs it."""

    node: fx.Node
    source: TensorPlacement
    target: TensorPlacement


@dataclass(frozen=True, slots=True)
class Decision:
    """How one operation runs, and the conversions of its operands, in order."""

    way: Way
    conversions: tuple[Converted, ...]


@dataclass(frozen=True, kw_only=True)
class Derivation:
    """The decisions for all operations, and the placement of the state that they use, by placeholder."""

    operations: tuple[Operation, ...]
    decisions: tuple[Decision, ...]
    state: Mapping[str, TensorPlacement]
    loss: tuple[Converted, ...]  # conversions of the loss, which ends whole
    cost: float
    """Bytes that each rank sends for one micro-batch, plus what latencies and whole weights count."""


_Set = frozenset[TensorPlacement]  # the placements in which a value exists
_UNPLACED: _Set = frozenset()  # state before its first use, which decides how it is placed
_Conversion = tuple[int, TensorPlacement, TensorPlacement]  # number of the operand, source, target


@dataclass(frozen=True, slots=True)
class _Operand:
    """All about an operand that its conversions depend on."""

    bytes: int
    gradient: bool
    is_state: bool
    is_weight: bool  # of a product: never sliced out of a whole one, which each rank would have to hold
    is_written: bool  # in place, so an operation must get the state itself, never a converted copy
    fixed: Split | None  # how a Plan splits it


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to run an operation whose operands are placed in a certain way, with what has to be converted."""

    cost: float
    way: Way
    after: tuple[int, ...]  # numbers of the sets of placements: of the operands still needed, then of the results
    conversions: tuple[_Conversion, ...]
    chosen: tuple[tuple[int, TensorPlacement], ...]  # operand -> placement, for state that is used the first time


@dataclass(frozen=True, slots=True)
class _Step:
    before: "_Step | None"
    option: _Option


@dataclass(frozen=True, slots=True)
class _Partway:
    """Some operands of an operation converted for one way to run it, and the others still to be."""

    cost: float
    available: tuple[_Set, ...]
    conversions: tuple[_Conversion, ...] = ()
    chosen: tuple[tuple[int, TensorPlacement], ...] = ()


def derive(
    captured: CapturedModel,
    shards: int,
    *,
    split: Mapping[str, Split] | None,
    sequence_parallel: bool,
    states: int = STATES,
) -> Derivation:
    """The placements of ``captured`` on ``shards`` ranks; see ``operations_of`` for ``split``.

    After each operation the ``states`` cheapest states go on. Raises PlanError if ``split`` allows no placements.
    """
    operations = operations_of(captured, shards, split=split, sequence_parallel=sequence_parallel)
    return _Search(captured, shards, operations, split, sequence_parallel).run(states)


class _Search:
    def __init__(
        self,
        captured: CapturedModel,
        shards: int,
        operations: Sequence[Operation],
        split: Mapping[str, Split] | None,
        sequence_parallel: bool,
    ) -> None:
        exported, graph = captured.exported, captured.graph
        self._shards = shards
        self._operations = tuple(operations)
        self._split = split
        self._sequence_parallel = sequence_parallel
        # Copied state is summed once per iteration; with few micro-batches that costs as much as a collective in each.
        self._sync = 1e-3 if sequence_parallel else 1.0
        self._state_names = exported.parameters.keys() | exported.buffers.keys()
        self._written = {name for name, buffer in exported.buffers.items() if buffer in exported.written_buffers}
        self._flops = {node.name: node.flops for node in graph.nodes}
        self._loss = next(node for node in exported.program.nodes if node.name == exported.loss)
        self._last_use: dict[fx.Node, int] = {self._loss: len(self._operations)}
        for number, operation in enumerate(self._operations):
            for operand in operation.call.operands:
                self._last_use[operand] = max(number, self._last_use.get(operand, 0))
        self._number_of: dict[_Set, int] = {}
        self._sets: list[_Set] = []
        self._options: dict[tuple, tuple[_Option, ...]] = {}

    def run(self, states: int) -> Derivation:
        beam: dict[tuple[int, ...], tuple[float, _Step | None]] = {(): (0.0, None)}
        live: list[fx.Node] = []  # the values whose sets of placements make up a state, in its order
        for number, operation in enumerate(self._operations):
            operands = tuple(dict.fromkeys(operation.call.operands))
            first_used = [node for node in operands if node not in live]
            entering = tuple(self._numbered(self._at_first(node)) for node in first_used)
            live += first_used
            places = [live.index(node) for node in operands]
            others = [place for place in range(len(live)) if place not in places]
            staying = tuple(place for place, node in enumerate(operands) if self._last_use[node] > number)
            results = [node for node in operation.call.result_nodes if self._last_use.get(node, -1) > number]
            alike = self._alike(operation, operands, staying, results)
            after: dict[tuple[int, ...], tuple[float, _Step | None]] = {}
            for short, (cost, step) in beam.items():
                state = short + entering
                placed = tuple([state[place] for place in places])
                options = self._options.get((alike, placed))
                if options is None:
                    found = self._options_of(operation, operands, placed, staying, results)
                    options = self._options[alike, placed] = found
                rest = tuple([state[place] for place in others])
                for option in options:
                    key, total = rest + option.after, cost + option.cost
                    known = after.get(key)
                    if known is None or total < known[0]:
                        after[key] = (total, _Step(step, option))
            if not after:
                raise PlanError(self._impossible(operation))
            live = [live[place] for place in others] + [operands[place] for place in staying] + results
            beam = after
            if len(after) > states:
                beam = dict(sorted(after.items(), key=lambda item: item[1][0])[:states])
        place = live.index(self._loss)
        finals = [
            (cost + prepared.cost, prepared.conversions, step)
            for state, (cost, step) in beam.items()
            for prepared in self._prepared(
                self._operand(self._loss), 0, WHOLE, _Partway(0.0, (self._sets[state[place]],))
            )
        ]
        cost, conversions, last = min(finals, key=lambda each: each[0])
        return self._derivation(cost, [Converted(self._loss, a, b) for _, a, b in conversions], last)

    def _derivation(self, cost: float, loss: Sequence[Converted], last: _Step | None) -> Derivation:
        options: list[_Option] = []
        while last is not None:
            options.append(last.option)
            last = last.before
        decisions: list[Decision] = []
        placed: dict[str, TensorPlacement] = {}
        for operation, option in zip(self._operations, reversed(options), strict=True):
            operands = tuple(dict.fromkeys(operation.call.operands))
            converted = tuple(Converted(operands[number], a, b) for number, a, b in option.conversions)
            decisions.append(Decision(option.way, converted))
            placed.update((operands[number].name, placement) for number, placement in option.chosen)
        return Derivation(
            operations=self._operations, decisions=tuple(decisions), state=placed, loss=tuple(loss), cost=cost
        )

    def _numbered(self, placements: _Set) -> int:
        """The number of a set of placements; numbers are quicker to hash than sets."""
        number = self._number_of.setdefault(placements, len(self._sets))
        if number == len(self._sets):
            self._sets.append(placements)
        return number

    def _at_first(self, node: fx.Node) -> _Set:
        return _UNPLACED if node.name in self._state_names else frozenset({WHOLE})

    def _alike(
        self,
        operation: Operation,
        operands: Sequence[fx.Node],
        staying: tuple[int, ...],
        results: Sequence[fx.Node],
    ) -> tuple:
        """All that the options of ``operation`` depend on, besides the placements of its operands."""
        return (
            id(operation.ways),  # equal operations share them
            self._flops.get(operation.call.node.name, 0),
            tuple(node.meta["val"].nbytes for node in operation.call.result_nodes),
            tuple(self._operand(node, operation) for node in operands),
            tuple(operands.index(node) for node in operation.call.operands),
            staying,
            tuple(operation.call.number_of(node) for node in results),
        )

    def _operand(self, node: fx.Node, operation: Operation | None = None) -> _Operand:
        call = None if operation is None else operation.call
        writes = call is not None and is_mutable(call.node) and node is call.operands[0]
        return _Operand(
            bytes=node.meta["val"].nbytes,
            gradient=has_gradient(node),
            is_state=node.name in self._state_names,
            is_weight=operation is not None and node in operation.weights,
            is_written=writes or node.name in self._written,
            fixed=None if self._split is None else self._split.get(node.name),
        )

    def _options_of(
        self,
        operation: Operation,
        operands: Sequence[fx.Node],
        placed: Sequence[int],
        staying: Sequence[int],
        results: Sequence[fx.Node],
    ) -> tuple[_Option, ...]:
        """The options to run ``operation``: of those that leave the same placements behind, the cheapest."""
        about = [self._operand(node, operation) for node in operands]
        numbers = [operands.index(node) for node in operation.call.operands]
        found: dict[tuple[int, ...], _Option] = {}
        for way in operation.ways:
            partway = [_Partway(self._cost_of(operation, way), tuple(self._sets[number] for number in placed))]
            for number, need in zip(numbers, way.needs, strict=True):
                partway = [
                    extended for each in partway for extended in self._prepared(about[number], number, need, each)
                ]
            given = tuple(self._numbered(frozenset({way.gives[operation.call.number_of(node)]})) for node in results)
            for each in partway:
                after = tuple(self._numbered(each.available[place]) for place in staying) + given
                if after not in found or each.cost < found[after].cost:
                    found[after] = _Option(each.cost, way, after, each.conversions, each.chosen)
        return tuple(found.values())

    def _prepared(self, operand: _Operand, number: int, need: TensorPlacement, partway: _Partway) -> Iterator[_Partway]:
        """``partway`` after each chain of conversions that gives operand ``number`` the placement ``need``."""
        available = partway.available[number]
        for first in self._first_placements(operand, need) if available == _UNPLACED else (None,):
            cost, chosen = partway.cost, partway.chosen
            if first is not None:
                available, chosen = frozenset({first}), (*chosen, (number, first))
                if first == COPIED:
                    cost += self._sync * self._all_reduce(operand)
            for extra, path in self._paths(operand, available, need):
                sets = list(partway.available)
                sets[number] = available.union(path[1:])
                steps = tuple((number, source, target) for source, target in pairwise(path))
                yield _Partway(cost + extra, tuple(sets), (*partway.conversions, *steps), chosen)

    def _first_placements(self, operand: _Operand, need: TensorPlacement) -> tuple[TensorPlacement, ...]:
        """The placements that state may have whose first use needs it as ``need``."""
        if operand.fixed is not None:
            return (need,) if need.split == operand.fixed else ()
        if need.split is not None:  # where a Plan leaves it whole, each rank takes its slice
            return (need,) if self._split is None else (COPIED if operand.gradient else WHOLE,)
        return (WHOLE,) if need == WHOLE else (WHOLE, COPIED) if need == COPIED else (WHOLE,)

    def _paths(
        self, operand: _Operand, available: _Set, need: TensorPlacement
    ) -> list[tuple[float, tuple[TensorPlacement, ...]]]:
        """Chains of conversions, with their cost, from an available placement to ``need``."""
        if need in available or (need == COPIED and WHOLE in available and not operand.gradient):
            return [(0.0, ())]
        if operand.is_written or (operand.is_weight and need.split is not None):
            return []
        found = []
        for source in available:
            if source.kind is Kind.SPLIT and operand.is_state:
                continue
            for through in ((), (WHOLE,)):
                path = (source, *through, need)
                if len(set(path)) == len(path) and not available.intersection(through):
                    costs = [self._conversion_cost(operand, a, b) for a, b in pairwise(path)]
                    if None not in costs:
                        found.append((sum(cost for cost in costs if cost is not None), path))
        return found

    def _conversion_cost(self, operand: _Operand, source: TensorPlacement, target: TensorPlacement) -> float | None:
        conversion = CONVERSION_BETWEEN.get((source.kind, target.kind))
        if conversion is None or (conversion.name == "reduce_scatter" and not self._allows_scatter(target)):
            return None
        if target.kind is Kind.PARTIAL and not operand.gradient:
            return None
        return self._cost_of_conversion(conversion, operand)

    def _allows_scatter(self, target: TensorPlacement) -> bool:
        return self._sequence_parallel and target.split is not None and target.split.dim == 1

    def _cost_of_conversion(self, conversion: Conversion, operand: _Operand) -> float:
        whole = self._all_reduce(operand)
        cost = 0.0
        for collective in (conversion.forward, conversion.backward if operand.gradient else None):
            if collective is Collective.ALL_REDUCE:
                cost += whole + _LATENCY_BYTES
            elif collective is not None:  # half of an all-reduce; a sequence is split in spite of the latency
                cost += whole / 2 + _LATENCY_BYTES / (2 if self._sequence_parallel else 1)
        return cost

    def _all_reduce(self, operand: _Operand) -> float:
        """Bytes that each rank sends in an all-reduce of ``operand``, by a ring."""
        return 2 * (self._shards - 1) / self._shards * operand.bytes

    def _cost_of(self, operation: Operation, way: Way) -> float:
        call, whole_share = operation.call, 1 - 1 / self._shards
        cost = 0.0
        for node in call.result_nodes:
            if way.gives[call.number_of(node)].kind is not Kind.SPLIT:
                cost += _WHOLE_BYTE * whole_share * node.meta["val"].nbytes
        if operation.rule.product:
            weights = [number for number, each in enumerate(call.operands) if each in operation.weights]
            is_split = any(need.split is not None for need in way.needs)
            if not is_split or any(way.needs[number].kind is not Kind.SPLIT for number in weights):
                flops = self._flops.get(call.node.name, 0)
                table = sum(float(call.operands[number].meta["val"].nbytes) for number in weights)
                cost += whole_share * (_WHOLE_PRODUCT + _WHOLE_FLOP * flops if flops else _WHOLE_TABLE * table)
        return cost

    def _impossible(self, operation: Operation) -> str:
        names = [operand.name for operand in operation.call.operands if operand.name in (self._split or {})]
        assert self._split is not None, "whole operands are always possible"
        split = self._split[names[0]]
        return (
            f"split: {names[0]} cannot be split along dimension {split.dim} in blocks {list(split.blocks)}, because "
            f"{operation.call.operator} needs it in another way; split it along another dimension, or not at all"
        )
