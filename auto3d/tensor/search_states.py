"""The states that the search for placements goes through, and the ways between them."""

from dataclasses import dataclass, field

import numpy as np

from auto3d.tensor.placement_costs import Operand
from auto3d.tensor.rules.call import Way
from auto3d.tensor_placement import TensorPlacement

PlacementSet = frozenset[TensorPlacement]  # the placements in which a value exists
UNPLACED: PlacementSet = frozenset()  # state before its first use, which decides how it is placed
OperandConversion = tuple[int, TensorPlacement, TensorPlacement]  # number of the operand, source, target


@dataclass(frozen=True, slots=True)
class RunOption:
    """One way to run an operation whose operands are placed in a certain way, with what has to be converted."""

    cost: int  # in units
    way: Way
    after: tuple[int, ...]  # numbers of the sets of placements: of the operands still needed, then of the results
    conversions: tuple[OperandConversion, ...]
    chosen: tuple[tuple[int, TensorPlacement], ...]  # operand -> placement, for state that is used the first time


@dataclass(frozen=True, slots=True)
class LiveStates:
    """The states that go on after an operation: the values whose sets of placements make up a state, and these sets."""

    values: tuple[Operand, ...]
    states: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class StateTransitions:
    """All ways from the states before an operation to the states after it, in the order of the latter."""

    sources: np.ndarray  # numbers of the states before, [ways]
    options: list[RunOption]  # [ways]
    costs: np.ndarray  # [ways]
    bounds: np.ndarray  # number of the first way to each state after, and the number of ways, [states + 1]
    states: list[tuple[int, ...]]
    debts: np.ndarray  # cost of reducing all values that are only partial, [states]
    weights: list[int]  # states with equal numbers place weights that are used again alike, [states]
    values: tuple[Operand, ...]
    to_others: dict[int, np.ndarray] = field(default_factory=dict)
    """State -> cost of conversions to every other state, [states]; filled when first needed."""
    kept: dict[bytes, tuple[int, LiveStates]] = field(default_factory=dict)
    """Numbers of the states that go on -> (a number for these states together, the states)."""
    steps: dict[bytes, "SearchStep"] = field(default_factory=dict)
    """Costs of the states before -> what follows; layers come to the same costs again and again."""


@dataclass(frozen=True, kw_only=True)
class SearchStep:
    """How the states after an operation are reached from the states before it, which have certain costs."""

    transitions: StateTransitions
    costs_before: np.ndarray
    kept: np.ndarray  # numbers of the states that go on
    key: int  # a number for the states that go on, together
    live: LiveStates
    costs: np.ndarray  # costs of the states that go on, beyond the cheapest state's
    added: int  # cost of the cheapest
    ways: dict[int, int] = field(default_factory=dict)  # state that goes on -> the cheapest way to it

    def way_to(self, state: int) -> int:
        """The number of the cheapest way to the ``state`` that goes on."""
        if state not in self.ways:
            ways = self.transitions
            first, end = ways.bounds[self.kept[state]], ways.bounds[self.kept[state] + 1]
            costs = self.costs_before[ways.sources[first:end]] + ways.costs[first:end]
            self.ways[state] = int(first + np.argmin(costs))
        return self.ways[state]


@dataclass(frozen=True, slots=True)
class PartlyConverted:
    """Some operands of an operation converted for one way to run it, and the others still to be."""

    cost: float
    available: tuple[PlacementSet, ...]
    conversions: tuple[OperandConversion, ...] = ()
    chosen: tuple[tuple[int, TensorPlacement], ...] = ()
