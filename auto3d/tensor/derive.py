"""Choose the placements of a whole program with the least communication, by dynamic programming over its operations.

A state says which placements of the values that are still needed exist so far; converting a value once serves all its
later uses. Of states that agree in this, only the cheapest goes on. Operations are decided in order, but a state is
kept as long as it may still win, so a choice can pay off later (greedy choice does not: it left LLaMA with 18
collectives in place of 4 for 2 layers).

Layers repeat, so transitions between states are computed once for all operations that are alike in ways, sizes and
live values. Costs differ from layer to layer, so only they are computed for each operation, as arrays.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np
from torch import fx

from auto3d.capture.in_place import is_mutable
from auto3d.capture.model import CapturedModel
from auto3d.plan import PlanError
from auto3d.tensor.collectives import CONVERSION_BETWEEN, Collective, Conversion
from auto3d.tensor.rules.call import Way
from auto3d.tensor.ways import OperationWays, has_gradient, made_from_inputs, operations_of
from auto3d.tensor_placement import COPIED, PARTIAL, WHOLE, PlacementKind, Split, TensorPlacement

STATES = 64  # states that go on after each operation
_UNITS = 10**6  # costs are integers, in millionths of a byte, so that equal ways come to equal costs
_FEW = 2  # states that the others are compared with
_LATENCY_BYTES = 2.0**13  # a collective costs each sample as much as so many bytes, however small it is
_WHOLE_FLOP = 1.0  # cost of one FLOP of a product that every rank computes, in bytes: it is split if it can be
_WHOLE_PRODUCT = 2.0**22  # extra cost, in bytes, of a product whose weight is whole, however small the weight
_WHOLE_TABLE = 16.0  # cost of one byte of a table that is whole, in bytes: with its gradient and its optimizer state
_HELD = {  # cost of one byte of a value: of equal ways, the one that saves memory, then that of Megatron-LM
    PlacementKind.SPLIT: 0.0,
    PlacementKind.WHOLE: 2e-6,
    PlacementKind.COPIED: 3e-6,  # the most but one: a copy comes right before the product
    PlacementKind.PARTIAL: 4e-6,  # the most: a reduce comes right behind the product
}


class ImpossibleSplitError(PlanError):
    """No operation can use the parameter or buffer ``name`` as it is pinned."""

    def __init__(self, name: str, split: Split, operator: str) -> None:
        super().__init__(
            f"split: {name} cannot be split along dimension {split.dim} in blocks {list(split.blocks)}, because "
            f"{operator} needs it in another way; split it along another dimension, or not at all"
        )
        self.name = name


class _DeadEndError(Exception):
    """No state of the search can run the next operation, which needs one of ``state``, so far not pinned, whole."""

    def __init__(self, state: Sequence[str]) -> None:
        super().__init__(*state)
        self.state = state


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

    operations: tuple[OperationWays, ...]
    decisions: tuple[Decision, ...]
    state: Mapping[str, TensorPlacement]
    loss: tuple[Converted, ...]  # conversions of the loss, which ends whole
    cost: float
    """Bytes that each rank sends for one sample, plus what latencies and whole weights count."""


_Set = frozenset[TensorPlacement]  # the placements in which a value exists
_UNPLACED: _Set = frozenset()  # state before its first use, which decides how it is placed
_Conversion = tuple[int, TensorPlacement, TensorPlacement]  # number of the operand, source, target


@dataclass(frozen=True, slots=True)
class _Operand:
    """All about an operand that its conversions depend on."""

    bytes: int  # per sample
    dims: int
    gradient: bool
    is_state: bool
    is_weight: bool  # weight of a product: a slice of a whole one will not do, since each rank would hold the whole
    is_written: bool  # in place, so an operation must get the state itself, never a converted copy
    is_pinned: bool  # to the Split that follows, or to none
    pinned: Split | None


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to run an operation whose operands are placed in a certain way, with what has to be converted."""

    cost: int  # in units
    way: Way
    after: tuple[int, ...]  # numbers of the sets of placements: of the operands still needed, then of the results
    conversions: tuple[_Conversion, ...]
    chosen: tuple[tuple[int, TensorPlacement], ...]  # operand -> placement, for state that is used the first time


_Key = tuple[tuple[_Operand, ...], tuple[tuple[int, ...], ...]]  # values, and states that go on


@dataclass(frozen=True, kw_only=True)
class _Transitions:
    """All ways from the states before an operation to those after it, in the order of the states that they reach."""

    sources: np.ndarray  # numbers of the states before, [ways]
    options: list[_Option]  # [ways]
    costs: np.ndarray  # [ways]
    starts: np.ndarray  # number of the first way to each state after, [states]
    states: list[tuple[int, ...]]
    debts: np.ndarray  # cost of reducing all values that are only partial, [states]
    weights: list[int]  # states with equal numbers place weights that are used again alike, [states]
    values: tuple[_Operand, ...]
    to_others: dict[int, np.ndarray]  # state -> cost of conversions to each, [states]; filled when first needed
    kept: dict[bytes, _Key]  # numbers of the states that go on -> key


@dataclass(frozen=True, slots=True)
class _Step:
    """How the states after an operation are reached."""

    transitions: _Transitions
    costs: np.ndarray  # costs of the states before
    kept: np.ndarray  # numbers of the states that go on


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """One operation of the program as the search sees it: places are those in a state."""

    operation: OperationWays
    operands: tuple[fx.Node, ...]  # without repetitions
    entering: tuple[int, ...]  # sets of placements of the operands that are used the first time
    places: tuple[int, ...]  # places of the operands
    staying: tuple[int, ...]  # numbers of the operands that are used again
    results: list[fx.Node]  # those that are used


@dataclass(frozen=True, slots=True)
class _Partway:
    """Some operands of an operation converted for one way to run it, and the others still to be."""

    cost: float
    available: tuple[_Set, ...]
    conversions: tuple[_Conversion, ...] = ()
    chosen: tuple[tuple[int, TensorPlacement], ...] = ()


def _units(cost: float) -> int:
    return round(cost * _UNITS)


def derive(
    captured: CapturedModel,
    shards: int,
    *,
    pinned: Mapping[str, Split | None],
    sequence_parallel: bool,
    states: int = STATES,
) -> Derivation:
    """The placements of ``captured`` on ``shards`` ranks; see ``operations_of`` for ``pinned``.

    After each operation the ``states`` cheapest states go on. If none of them can go on, because an earlier operation
    has split state that a later one needs whole, the search starts again with that state whole. Raises
    ImpossibleSplitError if ``pinned`` allows no placements.
    """
    while True:
        operations = operations_of(captured, shards, pinned=pinned, sequence_parallel=sequence_parallel)
        try:
            return _Search(captured, shards, operations, pinned, sequence_parallel).run(states)
        except _DeadEndError as error:
            pinned = {**pinned, **dict.fromkeys(error.state)}


class _Search:
    def __init__(
        self,
        captured: CapturedModel,
        shards: int,
        operations: Sequence[OperationWays],
        pinned: Mapping[str, Split | None],
        sequence_parallel: bool,
    ) -> None:
        exported, graph = captured.exported, captured.graph
        self._shards = shards
        self._operations = tuple(operations)
        self._pinned = pinned
        self._name_of = {**exported.parameters, **exported.buffers}
        self._sequence_parallel = sequence_parallel
        # Copied state is summed once per iteration; with few micro-batches that costs as much as a collective in each.
        self._sync = 1e-3 if sequence_parallel else 1.0
        self._state_names = exported.parameters.keys() | exported.buffers.keys()
        self._written = {name for name, buffer in exported.buffers.items() if buffer in exported.written_buffers}
        self._samples = exported.micro_batch_size
        self._of_samples = made_from_inputs(exported.program, self._state_names)
        self._flops = {node.name: node.flops for node in graph.nodes}
        self._loss = next(node for node in exported.program.nodes if node.name == exported.loss)
        self._last_use: dict[fx.Node, int] = {self._loss: len(self._operations)}
        for number, operation in enumerate(self._operations):
            for operand in operation.call.operands:
                self._last_use[operand] = max(number, self._last_use.get(operand, 0))
        self._weights = frozenset().union(*(operation.weights for operation in self._operations))
        self._about: dict[fx.Node, _Operand] = {}
        self._number_of: dict[_Set, int] = {}
        self._sets: list[_Set] = []
        self._alike_as: dict[tuple, int] = {}
        self._options: dict[tuple, tuple[_Option, ...]] = {}
        self._transitions: dict[tuple, _Transitions] = {}
        self._numbers_of: dict[_Key, int] = {}
        self._debts: dict[tuple[_Operand, int], int] = {}
        self._between: dict[tuple[_Operand, int, int], float] = {}

    def run(self, states: int) -> Derivation:
        key: _Key = ((), ((),))
        costs = np.zeros(1)  # cost of each state beyond that of the cheapest; whole numbers
        base = 0  # cost of the cheapest state
        live: list[fx.Node] = []  # the values whose sets of placements make up a state, in its order
        steps: list[_Step] = []
        for number, operation in enumerate(self._operations):
            operands = tuple(dict.fromkeys(operation.call.operands))
            first_used = [node for node in operands if node not in live]
            live += first_used
            step = _Operation(
                operation=operation,
                operands=operands,
                entering=tuple(self._numbered(self._at_first(node)) for node in first_used),
                places=tuple(live.index(node) for node in operands),
                staying=tuple(place for place, node in enumerate(operands) if self._last_use[node] > number),
                results=[node for node in operation.call.result_nodes if self._last_use.get(node, -1) > number],
            )
            others = [place for place in range(len(live)) if place not in step.places]
            live = [live[place] for place in others] + [operands[place] for place in step.staying] + step.results
            known = self._alike(step), step.entering, step.places, self._number_of_key(key)
            if known not in self._transitions:
                values = tuple(map(self._operand, live))
                self._transitions[known] = self._transitions_of(step, key[1], others, values)
            transitions = self._transitions[known]
            totals = np.minimum.reduceat(costs[transitions.sources] + transitions.costs, transitions.starts)
            kept = self._kept(transitions, totals, states)
            steps.append(_Step(transitions, costs, kept))
            key = self._key(transitions, kept)
            least = totals[kept].min()
            costs = totals[kept] - least
            base += int(least)
        place = live.index(self._loss)
        finals = [
            (base + int(cost) + _units(prepared.cost), prepared.conversions, number)
            for number, (state, cost) in enumerate(zip(key[1], costs, strict=True))
            for prepared in self._prepared(
                self._operand(self._loss), 0, WHOLE, _Partway(0.0, (self._sets[state[place]],))
            )
        ]
        total, conversions, last = min(finals, key=lambda each: each[0])
        return self._derivation(total, [Converted(self._loss, a, b) for _, a, b in conversions], steps, last)

    def _number_of_key(self, key: _Key) -> int:
        """A number for ``key``; numbers are quicker to hash."""
        return self._numbers_of.setdefault(key, len(self._numbers_of))

    def _key(self, transitions: _Transitions, kept: np.ndarray) -> _Key:
        found = kept.tobytes()
        if found not in transitions.kept:
            transitions.kept[found] = transitions.values, tuple(transitions.states[number] for number in kept)
        return transitions.kept[found]

    def _transitions_of(
        self,
        step: _Operation,
        states: Sequence[tuple[int, ...]],
        others: Sequence[int],
        values: tuple[_Operand, ...],
    ) -> _Transitions:
        """The transitions from ``states`` by an operation.

        ``values`` are those of the new states, first the ``others`` that the operation does not touch.
        """
        alike = self._alike(step)
        after: dict[tuple[int, ...], list[tuple[int, _Option]]] = {}
        for number, short in enumerate(states):
            state = short + step.entering
            placed = tuple([state[place] for place in step.places])
            options = self._options.get((alike, placed))
            if options is None:
                options = self._options[alike, placed] = self._options_of(step, placed)
            rest = tuple([state[place] for place in others])
            for option in options:
                after.setdefault(rest + option.after, []).append((number, option))
        if not after:
            raise self._impossible(step.operation)
        ways = [way for found in after.values() for way in found]
        counts = [len(found) for found in after.values()]
        of_state = [place for place, value in enumerate(values) if value.is_state]
        weights: dict[tuple[int, ...], int] = {}
        return _Transitions(
            sources=np.array([source for source, _ in ways]),
            options=[option for _, option in ways],
            costs=np.array([float(option.cost) for _, option in ways]),
            starts=np.cumsum([0, *counts[:-1]]),
            states=list(after),
            debts=np.array([float(sum(map(self._debt, values, state))) for state in after]),
            weights=[weights.setdefault(tuple([each[p] for p in of_state]), len(weights)) for each in after],
            values=values,
            to_others={},
            kept={},
        )

    def _kept(self, transitions: _Transitions, totals: np.ndarray, states: int) -> np.ndarray:
        """Numbers of the states that can still win, of which these are the costs ``totals``: at most ``states``.

        A state cannot win if another one becomes like it by conversions and then costs no more. If too many are left,
        those go on that cost the least with all partial values reduced: a row-parallel product costs nothing until its
        result is. At most a quarter of them agree in how weights are placed that are used again, for such a choice may
        pay off only at the end of the model.
        """
        kept = np.argsort(totals, kind="stable")
        for place in range(_FEW):
            if place < len(kept):
                cheap, dearer = kept[place], kept[place + 1 :]
                can_win = totals[cheap] + self._to_others(transitions, int(cheap))[dearer] > totals[dearer]
                kept = np.concatenate([kept[: place + 1], dearer[can_win]])
        if len(kept) > states // 4:
            counts: Counter[int] = Counter()
            best: list[int] = []
            for number in kept[np.argsort((totals + transitions.debts)[kept], kind="stable")].tolist():
                weights = transitions.weights[number]
                counts[weights] += 1
                if counts[weights] <= states // 4 and len(best) < states:
                    best.append(number)
            kept = np.array(best)
        return np.sort(kept)

    def _debt(self, value: _Operand, placements: int) -> int:
        """The cost of reducing ``value`` if it is only partial."""
        key = value, placements
        if key not in self._debts:
            only_partial = self._sets[placements] == {PARTIAL}
            self._debts[key] = _units(self._all_reduce(value) + _LATENCY_BYTES) if only_partial else 0
        return self._debts[key]

    def _to_others(self, transitions: _Transitions, number: int) -> np.ndarray:
        """The cost of conversions from state ``number`` to each state; infinite where there are none."""
        if number not in transitions.to_others:
            values, source = transitions.values, transitions.states[number]
            costs = [self._cost_between(values, source, target) for target in transitions.states]
            transitions.to_others[number] = np.array(costs)
        return transitions.to_others[number]

    def _cost_between(self, values: Sequence[_Operand], source: tuple[int, ...], target: tuple[int, ...]) -> float:
        """The cost of conversions after which ``values`` in state ``source`` have all placements of ``target``."""
        total: float = 0
        for value, before, after in zip(values, source, target, strict=True):
            if before != after:
                key = value, before, after
                if key not in self._between:
                    self._between[key] = self._cost_of_adding(value, self._sets[before], self._sets[after])
                total += self._between[key]
                if total == inf:
                    break
        return total

    def _cost_of_adding(self, value: _Operand, available: _Set, wanted: _Set) -> float:
        total: float = 0
        for placement in wanted - available:
            if value.is_state and placement.split is not None:
                return inf  # it depends on the operation whether it may slice state
            paths = self._paths(value, available, placement)
            total += min((_units(cost) for cost, _ in paths), default=inf)
        return total

    def _derivation(self, total: int, loss: Sequence[Converted], steps: Sequence[_Step], last: int) -> Derivation:
        options: list[_Option] = []
        for step in reversed(steps):
            ways, state = step.transitions, step.kept[last]
            first, end = np.append(ways.starts, len(ways.options))[state : state + 2]
            way = first + int(np.argmin(step.costs[ways.sources[first:end]] + ways.costs[first:end]))
            last = ways.sources[way]
            options.append(ways.options[way])
        decisions: list[Decision] = []
        placed: dict[str, TensorPlacement] = {}
        for operation, option in zip(self._operations, reversed(options), strict=True):
            operands = tuple(dict.fromkeys(operation.call.operands))
            converted = tuple(Converted(operands[number], a, b) for number, a, b in option.conversions)
            decisions.append(Decision(option.way, converted))
            placed.update((operands[number].name, placement) for number, placement in option.chosen)
        return Derivation(
            operations=self._operations, decisions=tuple(decisions), state=placed, loss=tuple(loss), cost=total / _UNITS
        )

    def _numbered(self, placements: _Set) -> int:
        """The number of a set of placements; numbers are quicker to hash than sets."""
        number = self._number_of.setdefault(placements, len(self._sets))
        if number == len(self._sets):
            self._sets.append(placements)
        return number

    def _at_first(self, node: fx.Node) -> _Set:
        return _UNPLACED if node.name in self._state_names else frozenset({WHOLE})

    def _alike(self, step: _Operation) -> int:
        """A number that operations share whose options are the same for equal placements of their operands."""
        operation, operands = step.operation, step.operands
        about = (
            id(operation.ways),  # equal operations share them
            self._flops_of(operation),
            tuple(self._bytes(node) for node in operation.call.result_nodes),
            tuple(self._operand(node, operation) for node in operands),
            tuple(operands.index(node) for node in operation.call.operands),
            step.staying,
            tuple((operation.call.number_of(node), self._operand(node)) for node in step.results),
        )
        return self._alike_as.setdefault(about, len(self._alike_as))

    def _operand(self, node: fx.Node, operation: OperationWays | None = None) -> _Operand:
        if operation is None and node in self._about:
            return self._about[node]
        call = None if operation is None else operation.call
        writes = call is not None and is_mutable(call.node) and node is call.operands[0]
        about = _Operand(
            bytes=self._bytes(node),
            dims=node.meta["val"].dim(),
            gradient=has_gradient(node),
            is_state=node.name in self._state_names,
            is_weight=node in (self._weights if operation is None else operation.weights),
            is_written=writes or node.name in self._written,
            is_pinned=node.name in self._pinned,
            pinned=self._pinned.get(node.name),
        )
        return about if operation is not None else self._about.setdefault(node, about)

    def _options_of(self, step: _Operation, placed: Sequence[int]) -> tuple[_Option, ...]:
        """The options to run an operation: of those that leave the same placements behind, the cheapest."""
        operation = step.operation
        about = [self._operand(node, operation) for node in step.operands]
        numbers = [step.operands.index(node) for node in operation.call.operands]
        found: dict[tuple[int, ...], _Option] = {}
        for way in operation.ways:
            partway = [_Partway(self._cost_of(operation, way), tuple(self._sets[number] for number in placed))]
            for number, need in zip(numbers, way.needs, strict=True):
                partway = [
                    extended for each in partway for extended in self._prepared(about[number], number, need, each)
                ]
            given = tuple(
                self._numbered(frozenset({way.gives[operation.call.number_of(node)]})) for node in step.results
            )
            for each in partway:
                after = tuple(self._numbered(each.available[place]) for place in step.staying) + given
                cost = _units(each.cost)
                if after not in found or cost < found[after].cost:
                    found[after] = _Option(cost, way, after, each.conversions, each.chosen)
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
        if operand.pinned is not None:
            return (need,) if need.split == operand.pinned else ()
        if need.split is not None:  # each rank takes its slice of what is pinned whole
            return (COPIED if operand.gradient else WHOLE,) if operand.is_pinned else (need,)
        return (WHOLE, COPIED) if need == COPIED else (WHOLE,)

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
            if source.kind is PlacementKind.SPLIT and operand.is_state:
                continue
            for through in ((), (WHOLE,), (COPIED,)):
                path = (source, *through, need)
                if len(set(path)) == len(path) and not available.intersection(through):
                    costs = [self._conversion_cost(operand, a, b) for a, b in pairwise(path)]
                    if None not in costs:
                        found.append((sum(cost for cost in costs if cost is not None), path))
        return found

    def _conversion_cost(self, operand: _Operand, source: TensorPlacement, target: TensorPlacement) -> float | None:
        conversion = CONVERSION_BETWEEN.get((source.kind, target.kind))
        if conversion is None or (conversion.name == "reduce_scatter" and not self._is_sequence(operand, target)):
            return None
        if target.kind is PlacementKind.PARTIAL and not operand.gradient:
            return None
        return self._cost_of_conversion(conversion, operand)

    def _is_sequence(self, operand: _Operand, target: TensorPlacement) -> bool:
        """Whether ``target`` splits [samples, sequence, width] along its sequence, under sequence parallelism."""
        return self._sequence_parallel and operand.dims == 3 and target.split is not None and target.split.dim == 1

    def _cost_of_conversion(self, conversion: Conversion, operand: _Operand) -> float:
        whole = self._all_reduce(operand)
        cost = _HELD[conversion.target] * operand.bytes
        for collective in (conversion.forward, conversion.backward if operand.gradient else None):
            if collective is Collective.ALL_REDUCE:
                cost += whole + _LATENCY_BYTES
            elif collective is not None:  # half of an all-reduce; a sequence is split in spite of the latency
                cost += whole / 2 + _LATENCY_BYTES * (0.4 if self._sequence_parallel else 1)
        return cost

    def _per_sample(self, node: fx.Node, amount: int) -> int:
        """``amount`` of ``node`` for one sample, so that decisions do not depend on the micro-batch size.

        A value that is computed from inputs has its samples, unless it combines them, as the loss does.
        """
        has_samples = node in self._of_samples and amount % self._samples == 0
        return amount // self._samples if has_samples else amount

    def _bytes(self, node: fx.Node) -> int:
        return self._per_sample(node, node.meta["val"].nbytes)

    def _flops_of(self, operation: OperationWays) -> int:
        node = operation.call.node
        return self._per_sample(node, self._flops.get(node.name, 0))

    def _all_reduce(self, operand: _Operand) -> float:
        """Bytes that each rank sends in an all-reduce of ``operand``, by a ring."""
        return 2 * (self._shards - 1) / self._shards * operand.bytes

    def _cost_of(self, operation: OperationWays, way: Way) -> float:
        call, whole_share = operation.call, 1 - 1 / self._shards
        cost = 0.0
        for node in call.result_nodes:
            cost += _HELD[way.gives[call.number_of(node)].kind] * whole_share * self._bytes(node)
        if way in operation.rule.special and call.operator == "cross_entropy_loss":
            logits, labels = call.operands[:2]
            count = self._per_sample(labels, labels.meta["val"].numel())
            cost += 6 * whole_share * count * logits.meta["val"].element_size()
        if operation.rule.product and any(has_gradient(node) for node in call.result_nodes):
            weights = [number for number, each in enumerate(call.operands) if each in operation.weights]
            is_split = any(need.split is not None for need in way.needs)
            if not is_split or any(way.needs[number].kind is not PlacementKind.SPLIT for number in weights):
                flops = self._flops_of(operation)
                table = sum(float(call.operands[number].meta["val"].nbytes) for number in weights)
                if flops:
                    cost += whole_share * (_WHOLE_FLOP * flops + (_WHOLE_PRODUCT if weights else 0))
                else:
                    cost += whole_share * _WHOLE_TABLE * table
        return cost

    def _impossible(self, operation: OperationWays) -> _DeadEndError | ImpossibleSplitError:
        """The error if no way to run ``operation`` remains: state that is split does not fit it."""
        nodes = list(operation.call.operands)
        free = [node.name for node in nodes if node.name in self._state_names and node.name not in self._pinned]
        if free:
            return _DeadEndError(free)
        for node in nodes:  # operands, then what they are computed from
            split = self._pinned.get(node.name)
            if split is not None:
                return ImpossibleSplitError(self._name_of[node.name], split, operation.call.operator)
            nodes += (each for each in node.all_input_nodes if each not in nodes)
        raise AssertionError("whole operands are always possible")
