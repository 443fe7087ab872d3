"""One call of an operator in a captured program, and what a rule says about it."""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from auto3d.capture.alike import described
from auto3d.capture.nodes import args_of, kwargs_of, operands_of, target_of
from auto3d.tensor_placement import COPIED, PARTIAL, WHOLE, Split, TensorPlacement


@dataclass(frozen=True)
class Call:
    """One operation of the program on whole tensors. Tensors among its arguments are its operands, in order.

    In place of a copy of a parameter in low precision, the operand is the parameter, which has the same placement.
    """

    node: fx.Node
    parameter_of: Mapping[fx.Node, fx.Node] = field(default_factory=dict, compare=False)

    @cached_property
    def operator(self) -> str:
        """Name without namespace and overload, for example "add"."""
        target = target_of(self.node)
        return target._opname if isinstance(target, torch._ops.OpOverload) else str(target)

    @cached_property
    def operands(self) -> tuple[fx.Node, ...]:
        return tuple(map(self.operand, operands_of(self.node)))

    def operand(self, argument: fx.Node) -> fx.Node:
        """The operand that ``argument`` is."""
        return self.parameter_of.get(argument, argument)

    @cached_property
    def alike(self) -> Hashable:
        """Equal for calls that have the same rule: of one operator, with arguments and results that are alike."""
        numbers = {node: number for number, node in enumerate(dict.fromkeys(self.operands))}

        def operand(node: fx.Node) -> Hashable:
            own = self.operand(node)
            return numbers[own], own is node

        arguments = described((args_of(self.node), kwargs_of(self.node)), operand)
        tensors = tuple([_about(node.meta["val"]) for node in numbers])
        value = self.node.meta["val"]
        results = (value,) if isinstance(value, torch.Tensor) else value
        taken = tuple([(self.number_of(node), node.meta["val"].requires_grad) for node in self.result_nodes])
        return target_of(self.node), arguments, tensors, tuple(map(_about, results)), taken

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each operand."""
        return tuple(tuple(operand.meta["val"].shape) for operand in self.operands)

    @cached_property
    def result_nodes(self) -> tuple[fx.Node, ...]:
        """The nodes of its results: itself, or the nodes that take results out of its tuple."""
        if isinstance(self.node.meta["val"], torch.Tensor):
            return (self.node,)
        return tuple(user for user in self.node.users if user.target is operator.getitem)

    def number_of(self, node: fx.Node) -> int:
        """The number of the result that ``node``, one of ``result_nodes``, is."""
        return 0 if node is self.node else int(args_of(node)[1])

    @cached_property
    def results(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its results. A result of a tuple that nobody takes counts as well."""
        value = self.node.meta["val"]
        values = (value,) if isinstance(value, torch.Tensor) else value
        return tuple(tuple(result.shape) if isinstance(result, torch.Tensor) else () for result in values)

    def argument(self, name: str, default: Any = None) -> Any:
        """The argument ``name`` of the operator's schema, or its ``default``."""
        if name in kwargs_of(self.node):
            return kwargs_of(self.node)[name]
        declared = target_of(self.node)._schema.arguments
        position = next((number for number, argument in enumerate(declared) if argument.name == name), None)
        if position is None:
            return default
        if position < len(args_of(self.node)):
            return args_of(self.node)[position]
        value = declared[position].default_value
        return default if value is None else value

    def operand_number(self, name: str) -> int | None:
        """The number among the operands of the argument ``name``; None if it is no tensor."""
        value = self.argument(name)
        return self.operands.index(self.operand(value)) if isinstance(value, fx.Node) else None


def _about(value: Any) -> Hashable:
    """All about a value that rules depend on."""
    return (value.shape, value.dtype, value.requires_grad) if isinstance(value, torch.Tensor) else None


@dataclass(frozen=True)
class Inner:
    """A call whose result is an argument of a localised call; its arguments are written like the arguments of that
    call."""

    name: str  # appended to the name of the call that it is for
    target: Callable
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Way:
    """One way to run a call on every rank: the placements that its operands must have, and the placements of its
    results."""

    needs: tuple[TensorPlacement, ...]
    gives: tuple[TensorPlacement, ...]


@dataclass(frozen=True)
class Axis:
    """Dimensions of operands and results that an operator runs through together, one element independent of the next.

    An operand without the dimension (None) is needed as a whole, and its gradient is a partial sum. A result without it
    is a partial sum over the axis. An operand in ``added`` is added to such a sum, so it must be partial too.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    added: frozenset[int] = frozenset()
    together: int = 1  # elements of the first operand that has the axis which stay on one rank: a group of channels
    padded: bool = False  # the dimension may have padding, because no element affects another and none is summed


@dataclass(frozen=True)
class Rule:
    """Ways to run a call besides whole and copied operands, which every operator allows; calls that are alike
    share it."""

    axes: tuple[Axis, ...] = ()
    linear: tuple[frozenset[int], ...] = ()
    """Sets of operands in which the operator is linear, with the others fixed: if they are partial, its result is."""
    carry: Callable[[Split], tuple[Split, ...] | None] | None = None
    """For an operator with one operand that lays its elements out anew: its split -> the split of each result."""
    carry_back: Callable[[int, Split], Split | None] | None = None
    """The opposite of ``carry`` for one result: the split that the operand must have."""
    special: tuple[Way, ...] = ()  # ways with an operator of their own, see localise
    joins: int | None = None
    """The dimension along which the operator puts its operands one after the other."""
    localise: Callable[[Call, Way, int], tuple[Any, tuple, dict]] | None = None
    """The operator and its arguments (nodes of the whole program and Inner calls among them) of a call that has this
    rule, for a way and a number of shards, if they differ from the whole program's."""
    product: bool = False  # a product of matrices, a convolution, attention, or a lookup of rows in a table


def scaled(split_blocks: Sequence[int], size: int, other: int) -> tuple[int, ...] | None:
    """``split_blocks`` of a dimension of ``size`` for a dimension of ``other`` elements that corresponds to it.

    Blocks 6, 3 of 9 elements are blocks 2, 1 of 3 elements; None if a block would have a fraction of an element.
    """
    if size == other:
        return tuple(split_blocks)
    if any(block * other % size for block in split_blocks):
        return None
    return tuple(block * other // size for block in split_blocks)


__all__ = ["COPIED", "PARTIAL", "WHOLE", "Axis", "Call", "Inner", "Rule", "Split", "TensorPlacement", "Way", "scaled"]
