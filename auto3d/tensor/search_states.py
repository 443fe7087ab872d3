"""The states that the search for placements goes through, and the ways between them."""

from dataclasses import dataclass

import numpy as np
from torch import fx

from auto3d.tensor.placement_costs import Operand
from auto3d.tensor.rules.call import Way
from auto3d.tensor.ways import OperationWays
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


StatesKey = tuple[tuple[Operand, ...], tuple[tuple[int, ...], ...]]  # values, and states that go on


@dataclass(frozen=True, kw_only=True)
class StateTransitions:
    """All ways from the states before an operation to those after it, in the order of the states that they reach."""

    sources: np.ndarray  # numbers of the states before, [ways]
    options: list[RunOption]  # [ways]
    costs: np.ndarray  # [ways]
    starts: np.ndarray  # number of the first way to each state after, [states]
    states: list[tuple[int, ...]]
    debts: np.ndarray  # cost of reducing all values that are only partial, [states]
    weights: list[int]  # states with equal numbers place weights that are used again alike, [states]
    values: tuple[Operand, ...]
    to_others: dict[int, np.ndarray]  # state -> cost of conversions to each, [states]; filled when first needed
    kept: dict[bytes, StatesKey]  # numbers of the states that go on -> key


@dataclass(frozen=True, slots=True)
class SearchStep:
    """How the states after an operation are reached."""

    transitions: StateTransitions
    costs: np.ndarray  # costs of the states before
    kept: np.ndarray  # numbers of the states that go on


@dataclass(frozen=True, kw_only=True)
class SearchOperation:
    """One operation of the program as the search sees it: places are those in a state."""

    operation: OperationWays
    operands: tuple[fx.Node, ...]  # without repetitions
    entering: tuple[int, ...]  # sets of placements of the operands that are used the first time
    places: tuple[int, ...]  # places of the operands
    staying: tuple[int, ...]  # numbers of the operands that are used again
    results: list[fx.Node]  # those that are used


@dataclass(frozen=True, slots=True)
class PartlyConverted:
    """Some operands of an operation converted for one way to run it, and the others still to be."""

    cost: float
    available: tuple[PlacementSet, ...]
    conversions: tuple[OperandConversion, ...] = ()
    chosen: tuple[tuple[int, TensorPlacement], ...] = ()
