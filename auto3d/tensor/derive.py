"""Choose the placements of a whole program with the least communication, by dynamic programming over its operations.

A state says which placements of the values that are still needed exist so far; converting a value once serves all its
later uses. Of states that agree in this, only the cheapest goes on. Operations are decided in order, but a state is
kept as long as it may still win, so a choice can pay off later (greedy choice does not: it left LLaMA with 18
collectives in place of 4 for 2 layers).

Layers repeat, so transitions between states are computed once for all operations that are alike in ways, sizes and
live values, and what follows from the costs of states once for equal costs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf

import numpy as np
from torch import fx

from auto3d.capture.in_place import is_mutable
from auto3d.capture.model import CapturedModel
from auto3d.share import Share
from auto3d.tensor.derivation import Converted, Decision, Derivation, ImpossibleSplitError
from auto3d.tensor.operations import Numbers, ProgramOperation, analysed, has_gradient
from auto3d.tensor.placement_costs import Operand, PlacementCosts
from auto3d.tensor.search_states import (
    UNPLACED,
    LiveStates,
    PartlyConverted,
    PlacementSet,
    RunOption,
    SearchStep,
    StateTransitions,
)
from auto3d.tensor.ways import OperationWays, operations_of
from auto3d.tensor_placement import COPIED, PARTIAL, WHOLE, PlacementKind, Split, TensorPlacement

STATES = 64  # states that go on after each operation
_UNITS = 10**6  # costs are integers, in millionths of a byte, so that equal ways come to equal costs
_FEW = 2  # states that the others are compared with


class _DeadEndError(Exception):
    """No state of the search can run the next operation, which needs a tensor of ``state`` whole that is not pinned so
    far."""

    def __init__(self, state: Sequence[str]) -> None:
        super().__init__(*state)
        self.state = state


def _units(cost: float) -> int:
    return round(cost * _UNITS)


def derive(
    captured: CapturedModel, share: Share, *, pinned: Mapping[str, Split | None], states: int = STATES
) -> Derivation:
    """The placements of ``captured`` on ranks that have ``share`` of it; see ``operations_of`` for ``pinned``.

    After each operation the ``states`` cheapest states go on. If none of them can go on, because an earlier operation
    has split state that a later operation needs whole, the search starts again with that state whole. Raises
    ImpossibleSplitError if ``pinned`` allows no placements.
    """
    while True:
        operations = operations_of(captured, share, pinned=pinned)
        try:
            return _Search(captured, share, operations, pinned).run(states)
        except _DeadEndError as error:
            pinned = {**pinned, **dict.fromkeys(error.state)}


class _Search:
    def __init__(
        self,
        captured: CapturedModel,
        share: Share,
        operations: Sequence[OperationWays],
        pinned: Mapping[str, Split | None],
    ) -> None:
        exported = captured.exported
        self._operations = tuple(operations)
        self._program = analysed(captured)
        self._pinned = pinned
        self._name_of = {**exported.parameters, **exported.buffers}
        self.costs = PlacementCosts(captured, share)
        self._written = {name for name, buffer in exported.buffers.items() if buffer in exported.written_buffers}
        self._loss = next(node for node in exported.program.nodes if node.name == exported.loss)
        self._about: dict[fx.Node, Operand] = {}
        self._number_of = Numbers()
        self._sets: list[PlacementSet] = []
        self._options: dict[tuple, tuple[RunOption, ...]] = {}
        self._transitions: dict[tuple[int, int, int], StateTransitions] = {}
        self._keys = Numbers()
        self._only_partial = self._numbered(frozenset({PARTIAL}))
        self._debts: dict[Operand, int] = {}
        self._between: dict[tuple[Operand, int, int], float] = {}

    def run(self, states: int) -> Derivation:
        live = LiveStates((), ((),))
        key = self._keys[live]
        costs = np.zeros(1)  # cost of each state beyond the cheapest state's; whole numbers
        base = 0  # cost of the cheapest state
        steps: list[SearchStep] = []
        for operation in self._operations:
            known = operation.number, operation.operation.step, key
            if known not in self._transitions:
                self._transitions[known] = self._transitions_of(operation, live.states)
            transitions = self._transitions[known]
            cost_bytes = costs.tobytes()
            if cost_bytes not in transitions.steps:
                transitions.steps[cost_bytes] = self._step(transitions, costs, states)
            step = transitions.steps[cost_bytes]
            steps.append(step)
            key, live, costs = step.key, step.live, step.costs
            base += step.added
        place = self._operations[-1].operation.live.index(self._loss)
        finals = [
            (base + int(cost) + _units(prepared.cost), prepared.conversions, number)
            for number, (state, cost) in enumerate(zip(live.states, costs, strict=True))
            for prepared in self._prepared(
                self._operand(self._loss), 0, WHOLE, PartlyConverted(0.0, (self._sets[state[place]],))
            )
        ]
        total, conversions, last = min(finals, key=lambda final: final[0])
        return self._derivation(total, [Converted(self._loss, a, b) for _, a, b in conversions], steps, last)

    def _step(self, transitions: StateTransitions, costs: np.ndarray, states: int) -> SearchStep:
        totals = np.minimum.reduceat(costs[transitions.sources] + transitions.costs, transitions.bounds[:-1])
        kept = self._kept(transitions, totals, states)
        kept_bytes = kept.tobytes()
        if kept_bytes not in transitions.kept:
            live = LiveStates(transitions.values, tuple([transitions.states[number] for number in kept]))
            transitions.kept[kept_bytes] = self._keys[live], live
        key, live = transitions.kept[kept_bytes]
        least = totals[kept].min()
        return SearchStep(
            transitions=transitions,
            costs_before=costs,
            kept=kept,
            key=key,
            live=live,
            costs=totals[kept] - least,
            added=int(least),
        )

    def _transitions_of(self, ways: OperationWays, states: Sequence[tuple[int, ...]]) -> StateTransitions:
        """The transitions from ``states`` by an operation."""
        operation = ways.operation
        entering = tuple([self._numbered(UNPLACED if state else frozenset({WHOLE})) for state in operation.entering])
        after: dict[tuple[int, ...], list[tuple[int, RunOption]]] = {}
        for number, short in enumerate(states):
            state = short + entering
            placed = tuple([state[place] for place in operation.places])
            known = ways.number, operation.use, placed
            options = self._options.get(known)
            if options is None:
                options = self._options[known] = self._options_of(ways, placed)
            rest = tuple([state[place] for place in operation.others])
            for option in options:
                after.setdefault(rest + option.after, []).append((number, option))
        if not after:
            raise self._impossible(operation)
        values = tuple(map(self._operand, operation.live))
        pairs = [way for group in after.values() for way in group]
        of_state = [place for place, value in enumerate(values) if value.is_state]
        weights = Numbers()
        return StateTransitions(
            sources=np.array([source for source, _ in pairs]),
            options=[option for _, option in pairs],
            costs=np.array([float(option.cost) for _, option in pairs]),
            bounds=np.cumsum([0, *(len(group) for group in after.values())]),
            states=list(after),
            debts=np.array([float(sum(map(self._debt, values, state))) for state in after]),
            weights=[weights[tuple([after_state[place] for place in of_state])] for after_state in after],
            values=values,
        )

    def _kept(self, transitions: StateTransitions, totals: np.ndarray, states: int) -> np.ndarray:
        """Numbers of the states that can still win, of which these are the costs ``totals``: at most ``states``.

        A state cannot win if another state becomes like it by conversions and then costs no more. If too many are left,
        the states go on that cost the least with all partial values reduced: a row-parallel product costs nothing until
        its result is. At most a quarter of them agree in how weights are placed that are used again, for such a choice
        may pay off only at the end of the model.
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

    def _debt(self, value: Operand, placements: int) -> int:
        """The cost of reducing ``value`` if it is only partial."""
        if placements != self._only_partial:
            return 0
        if value not in self._debts:
            self._debts[value] = _units(self.costs.of_reduction(value))
        return self._debts[value]

    def _to_others(self, transitions: StateTransitions, number: int) -> np.ndarray:
        """The cost of conversions from state ``number`` to each state; infinite where there are none."""
        if number not in transitions.to_others:
            values, source = transitions.values, transitions.states[number]
            costs = [self._cost_between(values, source, target) for target in transitions.states]
            transitions.to_others[number] = np.array(costs)
        return transitions.to_others[number]

    def _cost_between(self, values: Sequence[Operand], source: tuple[int, ...], target: tuple[int, ...]) -> float:
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

    def _cost_of_adding(self, value: Operand, available: PlacementSet, wanted: PlacementSet) -> float:
        total: float = 0
        for placement in wanted - available:
            if value.is_state and placement.split is not None:
                return inf  # it depends on the operation whether it may slice state
            paths = self._paths(value, available, placement)
            total += min((_units(cost) for cost, _ in paths), default=inf)
        return total

    def _derivation(self, total: int, loss: Sequence[Converted], steps: Sequence[SearchStep], last: int) -> Derivation:
        options: list[RunOption] = []
        for step in reversed(steps):
            way = step.way_to(last)
            last = int(step.transitions.sources[way])
            options.append(step.transitions.options[way])
        decisions: list[Decision] = []
        placed: dict[str, TensorPlacement] = {}
        for ways, option in zip(self._operations, reversed(options), strict=True):
            operands = ways.operation.operands
            converted = tuple([Converted(operands[number], a, b) for number, a, b in option.conversions])
            decisions.append(Decision(option.way, converted))
            for number, placement in option.chosen:
                placed[operands[number].name] = placement
        return Derivation(
            operations=self._operations, decisions=tuple(decisions), state=placed, loss=tuple(loss), cost=total / _UNITS
        )

    def _numbered(self, placements: PlacementSet) -> int:
        """The number of a set of placements; numbers are quicker to hash than sets."""
        number = self._number_of[placements]
        if number == len(self._sets):
            self._sets.append(placements)
        return number

    def _operand(self, node: fx.Node, operation: ProgramOperation | None = None) -> Operand:
        if operation is None and node in self._about:
            return self._about[node]
        call = None if operation is None else operation.call
        writes = call is not None and is_mutable(call.node) and node is call.operands[0]
        about = Operand(
            bytes=self.costs.bytes(node),
            dims=node.meta["val"].dim(),
            gradient=has_gradient(node),
            is_state=node.name in self._program.state,
            is_weight=node in (self._program.weights if operation is None else operation.weights),
            is_written=writes or node.name in self._written,
            is_pinned=node.name in self._pinned,
            pinned=self._pinned.get(node.name),
        )
        return about if operation is not None else self._about.setdefault(node, about)

    def _options_of(self, ways: OperationWays, placed: Sequence[int]) -> tuple[RunOption, ...]:
        """The options to run an operation: of all options that leave the same placements behind, the cheapest."""
        operation = ways.operation
        about = [self._operand(node, operation) for node in operation.operands]
        numbers = [operation.operands.index(node) for node in operation.call.operands]
        cheapest: dict[tuple[int, ...], RunOption] = {}
        for way in ways.ways:
            partway = [
                PartlyConverted(self.costs.of_way(operation, way), tuple(self._sets[number] for number in placed))
            ]
            for number, need in zip(numbers, way.needs, strict=True):
                partway = [
                    extended for prefix in partway for extended in self._prepared(about[number], number, need, prefix)
                ]
            given = tuple(self._numbered(frozenset({way.gives[number]})) for number, _ in operation.needed)
            for prefix in partway:
                after = tuple(self._numbered(prefix.available[place]) for place in operation.staying) + given
                cost = _units(prefix.cost)
                if after not in cheapest or cost < cheapest[after].cost:
                    cheapest[after] = RunOption(cost, way, after, prefix.conversions, prefix.chosen)
        return tuple(cheapest.values())

    def _prepared(
        self, operand: Operand, number: int, need: TensorPlacement, partway: PartlyConverted
    ) -> Iterator[PartlyConverted]:
        """``partway`` after each chain of conversions that gives operand ``number`` the placement ``need``."""
        available = partway.available[number]
        for first in self._first_placements(operand, need) if available == UNPLACED else (None,):
            cost, chosen = partway.cost, partway.chosen
            if first is not None:
                available, chosen = frozenset({first}), (*chosen, (number, first))
                if first == COPIED:
                    cost += self.costs.of_copied_state(operand)
            for extra, path in self._paths(operand, available, need):
                sets = list(partway.available)
                sets[number] = available.union(path[1:])
                steps = tuple((number, source, target) for source, target in pairwise(path))
                yield PartlyConverted(cost + extra, tuple(sets), (*partway.conversions, *steps), chosen)

    def _first_placements(self, operand: Operand, need: TensorPlacement) -> tuple[TensorPlacement, ...]:
        """The placements that state may have whose first use needs it as ``need``."""
        if operand.pinned is not None:
            return (need,) if need.split == operand.pinned else ()
        if need.split is not None:  # each rank takes its slice of what is pinned whole
            return (COPIED if operand.gradient else WHOLE,) if operand.is_pinned else (need,)
        return (WHOLE, COPIED) if need == COPIED else (WHOLE,)

    def _paths(
        self, operand: Operand, available: PlacementSet, need: TensorPlacement
    ) -> list[tuple[float, tuple[TensorPlacement, ...]]]:
        """Chains of conversions, with their cost, from an available placement to ``need``."""
        if need in available or (need == COPIED and WHOLE in available and not operand.gradient):
            return [(0.0, ())]
        if operand.is_written or (operand.is_weight and need.split is not None):
            return []
        chains = []
        for source in available:
            if source.kind is PlacementKind.SPLIT and operand.is_state:
                continue
            for through in ((), (WHOLE,), (COPIED,)):
                path = (source, *through, need)
                if len(set(path)) == len(path) and not available.intersection(through):
                    costs = [self.costs.of_conversion(operand, a, b) for a, b in pairwise(path)]
                    if None not in costs:
                        chains.append((sum(cost for cost in costs if cost is not None), path))
        return chains

    def _impossible(self, operation: ProgramOperation) -> _DeadEndError | ImpossibleSplitError:
        """The error if no way to run ``operation`` remains: state that is split does not fit it."""
        nodes = list(operation.call.operands)
        free = [node.name for node in nodes if node.name in self._program.state and node.name not in self._pinned]
        if free:
            return _DeadEndError(free)
        for node in nodes:  # operands, then what they are computed from
            split = self._pinned.get(node.name)
            if split is not None:
                return ImpossibleSplitError(self._name_of[node.name], split, operation.call.operator)
            nodes += (maker for maker in node.all_input_nodes if maker not in nodes)
        raise AssertionError("whole operands are always possible")
