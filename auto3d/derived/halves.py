"""Sub-pipelining, graph side: the program in which each micro-batch runs as two halves of its samples.

A tensor-parallel rank waits for the others at each collective. With two halves, the collective of a half runs while the
rank computes the other half (Merak: Lai et al. 2022, section 6.3; TPDS 2023, section 5.3).

The rules that split a value among two ranks (tensor/rules) also divide it into two halves in time. An operation that
has such a way runs once for each half. An operation that combines samples, such as a loss that is a mean over all
tokens, gets the halves joined and runs once, so that its result is the undivided program's. What does not depend on
samples runs once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from auto3d.capture.alike import DerivedCalls
from auto3d.capture.describe import describe, is_random
from auto3d.capture.model import CapturedModel
from auto3d.capture.nodes import args_of
from auto3d.conversions import conversion_of
from auto3d.derived.dropout_mask import DROPOUT_MASK, mask_arguments
from auto3d.derived.model import Derived
from auto3d.garbage import garbage_collection_paused
from auto3d.plan import NO_OVERLAP, SUB_PIPELINED, PlanError
from auto3d.tensor.collectives import VOCABULARY_CROSS_ENTROPY, VOCABULARY_EMBEDDING, split_of
from auto3d.tensor.operations import calls_of
from auto3d.tensor.rules import rule_of
from auto3d.tensor.rules.call import Axis, Call, Rule, Way
from auto3d.tensor_placement import WHOLE, PlacementKind, Split, TensorPlacement, split_along

HALVES = 2
_aten = torch.ops.aten
_BATCH_NORMALISATIONS = ("batch_norm", "_native_batch_norm_legit_functional")


def sub_pipelined(model: Derived, *, fused_attention: bool = True) -> Derived:
    """``model`` with each micro-batch in two halves. Every value is the value in ``model``, and so is every gradient
    except for the order in which the samples' gradients of a weight are added up.

    ``fused_attention`` is the argument of ``describe``.
    Raises PlanError where that is impossible: for an odd number of samples, for operations that write to buffers or
    normalise by batch statistics, and for a model of whose collectives none lies between operations on halves.
    """
    with garbage_collection_paused():
        graph = model.program.graph
        if graph.micro_batch_size % HALVES:
            raise PlanError(
                f"{_key()} divides the samples of a micro-batch into two halves, and a rank has "
                f"{graph.micro_batch_size}; choose an even number of samples per rank, or {_alternative()}"
            )
        for node in graph.nodes:
            if name := next(iter(graph.written_buffers.intersection(node.state)), None):
                raise PlanError(
                    f"{_key()} cannot run {node.name} of {node.module or 'the model'}, which writes to the buffer "
                    f"{name} once per micro-batch, not once per half; {_alternative()}"
                )
        builder = _HalvesBuilder(model)
        builder.build()
        exported = replace(model.program.exported, program=builder.graph)
        halved = describe(exported, fused_attention=fused_attention)
        return replace(
            model,
            programs=(CapturedModel(graph=halved, exported=exported),),
            positions=(tuple(builder.position[node.name] for node in halved.nodes),),
            placements={**model.placements, **builder.placements},
            half_of=builder.half_of,
        )


def _key() -> str:
    return f"tensor_overlap: {SUB_PIPELINED}"


def _alternative() -> str:
    return f"use tensor_overlap: {NO_OVERLAP}"


@dataclass
class _HalvesBuilder:
    model: Derived
    graph: fx.Graph = field(default_factory=fx.Graph)
    calls: DerivedCalls = field(init=False)
    position: dict[str, int] = field(default_factory=dict)  # node -> position in the whole Graph
    placements: dict[str, TensorPlacement] = field(default_factory=dict)  # placements among ranks of the halves
    half_of: dict[str, int] = field(default_factory=dict)
    _undivided: dict[fx.Node, fx.Node] = field(default_factory=dict)  # value of the model -> the same value here
    _halves: dict[tuple[fx.Node, Split, int], fx.Node] = field(default_factory=dict)
    _samples: dict[fx.Node, Split] = field(default_factory=dict)  # how the halves divide a value of the model
    _at: int = 0  # position in the whole Graph of what is being added
    _joining: str = ""  # the first operation that needs halves joined

    def __post_init__(self) -> None:
        self.calls = DerivedCalls(self.graph)

    def build(self) -> None:
        exported = self.model.program.exported
        position = dict(zip((n.name for n in self.model.program.graph.nodes), self.model.positions[-1], strict=True))
        for node in exported.program.find_nodes(op="placeholder"):
            copy = self.graph.node_copy(node)
            copy.name = node.name
            self._undivided[node] = copy
            if node.name in exported.inputs:
                self._samples[node] = Split(0, (node.meta["val"].shape[0],))
        hidden = 0
        for call in calls_of(exported.program):
            self._at = position[call.node.name]
            in_halves = self._add(call)
            conversion = conversion_of(call.node.target)
            communicates = conversion is not None and (conversion.forward or conversion.backward)
            hidden += bool(in_halves and communicates)
        if not hidden:
            because = f", because {self._joining} combines the samples of a micro-batch" if self._joining else ""
            raise PlanError(
                f"{_key()} hides collectives of one half of a micro-batch under operations of the other, and no "
                f"collective of this model is among operations on halves{because}; {_alternative()}"
            )
        loss = next(node for node in exported.program.nodes if node.name == exported.loss)
        self.graph.output((self._joined(loss),)).meta["val"] = None

    def _add(self, call: Call) -> bool:
        """Add what runs ``call``; returns whether it runs on halves."""
        way = self._way(call)
        if call.operator in _BATCH_NORMALISATIONS and way is None and self._depends_on_samples(call):
            raise PlanError(
                f"{_key()} cannot run {call.node.name}, which normalises by statistics of all samples of a "
                f"micro-batch; {_alternative()}"
            )
        if way is not None:
            self._samples.update(self._given(call, way))
            if call.node.target is _aten.dropout.default:
                self._add_dropout(call)
                return True
            if not is_random(call.node) and self._add_halves(call, way):
                return True
        elif not self._joining and self._depends_on_samples(call):
            self._joining = call.node.name
        args, kwargs = fx.node.map_arg((call.node.args, call.node.kwargs), self._joined)
        self._put(call, call.node.target, args, kwargs, None)
        return False

    def _depends_on_samples(self, call: Call) -> bool:
        return any(operand in self._samples for operand in call.operands)

    def _way(self, call: Call) -> Way | None:
        """The way to run ``call`` on halves of its operands; None if there is no such way, or no operand has halves."""
        splits = [self._samples.get(operand) for operand in call.operands]
        if not any(splits):
            return None
        rule = _rule_of(call)
        for axis in rule.axes:
            if (way := _along(call, axis, splits)) is not None:
                return way
        if rule.carry is not None and len(splits) == 1 and splits[0] is not None:
            carried = rule.carry(splits[0])
            if carried is not None and all(_even(split) for split in carried):
                return Way((_placed(splits[0]),), tuple(map(_placed, carried)))
        return None

    def _given(self, call: Call, way: Way) -> dict[fx.Node, Split]:
        """How the halves divide each result."""
        splits = {node: way.gives[call.number_of(node)].split for node in call.result_nodes}
        return {node: split for node, split in splits.items() if split is not None}

    def _add_halves(self, call: Call, way: Way) -> bool:
        """Add ``call`` once for each half; returns False if it does not give halves of its results after all.

        The rules cannot see that, for example, a squeeze of all dimensions removes the samples' dimension of a half
        with one sample.
        """
        target, args, kwargs = call.node.target, call.node.args, call.node.kwargs
        localise = _rule_of(call).localise
        if localise is not None:
            target, args, kwargs = localise(call, way, HALVES)
        for half in range(HALVES):
            needs = iter(way.needs)

            def divided(node: fx.Node, needs: Any = needs, half: int = half) -> fx.Node:
                split = next(needs).split
                return self._half(node, split, half) if split is not None else self._joined(node)

            half_args, half_kwargs = fx.node.map_arg((args, kwargs), divided)
            if half == 0 and not self._gives_halves(call, way, target, half_args, half_kwargs):
                return False
            self._put(call, target, half_args, half_kwargs, half)
        return True

    def _gives_halves(self, call: Call, way: Way, target: Any, args: tuple, kwargs: dict) -> bool:
        try:
            value = self.calls.result(target, args, kwargs)
        except RuntimeError:  # the operator refuses the shape of a half
            return False
        values = (value,) if isinstance(value, torch.Tensor) else value
        return all(
            tuple(tensor.shape) == given.local_shape(shape, HALVES)
            for tensor, given, shape in zip(values, way.gives, call.results, strict=True)
            if isinstance(tensor, torch.Tensor)
        )

    def _add_dropout(self, call: Call) -> None:
        """Draw one mask for the whole micro-batch, as the undivided program does; each half multiplies by its part."""
        (operand,) = call.operands
        mask = self._new(call.node.name, DROPOUT_MASK, mask_arguments(call), {}, call.node)
        split = self._samples[call.node]
        for half in range(HALVES):
            part = self._slice(mask, split, half, call.node, f"{call.node.name}_mask_half{half}")
            factors = (self._half(operand, split, half), part)
            product = self._new(f"{call.node.name}_half{half}", _aten.mul.Tensor, factors, {}, call.node, half)
            self._halves[call.node, split, half] = product

    def _put(self, call: Call, target: Any, args: tuple, kwargs: dict, half: int | None) -> None:
        """Add ``call`` and its results, for the whole micro-batch or for one half."""
        suffix = "" if half is None else f"_half{half}"
        made = self._new(f"{call.node.name}{suffix}", target, args, kwargs, call.node, half)
        for node in call.result_nodes:
            result = made if node is call.node else self.calls.take(f"{node.name}{suffix}", made, node)
            self._note(result, node, half)
            if half is None:
                self._undivided[node] = result
            else:
                self._halves[node, self._samples[node], half] = result

    def _half(self, node: fx.Node, split: Split, half: int) -> fx.Node:
        """One half of the value ``node``: as it was computed, or a slice of the whole value."""
        if (node, split, half) not in self._halves:
            name = f"{node.name}_half{half}"
            if name in self.position:
                name = f"{node.name}_dim{split.dim}_half{half}"
            self._halves[node, split, half] = self._slice(self._undivided[node], split, half, node, name)
        return self._halves[node, split, half]

    def _slice(self, source: fx.Node, split: Split, half: int, origin: fx.Node, name: str) -> fx.Node:
        ((first, last),) = split.ranges(half, HALVES)
        return self._new(name, _aten.slice.Tensor, (source, split.dim, first, last), {}, origin, half)

    def _joined(self, node: fx.Node) -> fx.Node:
        """The whole value ``node``: as it was computed, or both halves put together."""
        if node not in self._undivided:
            split = self._samples[node]
            arguments = ([self._halves[node, split, half] for half in range(HALVES)], split.dim)
            self._undivided[node] = self._new(node.name, _aten.cat.default, arguments, {}, node)
        return self._undivided[node]

    def _new(
        self, name: str, target: Callable, args: tuple, kwargs: dict, origin: fx.Node, half: int | None = None
    ) -> fx.Node:
        """A node ``name`` that calls ``target``; where it is in the model's code is taken from ``origin``."""
        node = self.calls.add(name, target, args, kwargs, origin)
        self.position[name] = self._at
        self._note(node, origin, half)
        return node

    def _note(self, node: fx.Node, origin: fx.Node, half: int | None) -> None:
        if half is not None:
            self.half_of[node.name] = half
        self.placements[node.name] = self.model.placements.get(origin.name, WHOLE)


def _rule_of(call: Call) -> Rule:
    """How a dimension of samples passes through ``call``, an operation of a tensor-parallel program."""
    target = call.node.target
    if conversion_of(target) is not None:
        return _conversion_rule(call)
    if target is VOCABULARY_EMBEDDING:
        return Rule(axes=tuple(Axis((None, dim), (dim,)) for dim in range(len(call.shapes[1]))))
    if target is VOCABULARY_CROSS_ENTROPY:
        return Rule()
    return rule_of(call)


def _conversion_rule(call: Call) -> Rule:
    """A conversion exchanges each sample by itself, unless one dimension holds the samples and what it splits.

    There, as in [samples × sequence, width] with a split sequence, each half has half of the blocks.
    """
    exchanged = split_of(args_of(call.node))
    blocks = exchanged.blocks if exchanged is not None else ()
    middle = len(blocks) // HALVES
    dims = range(len(call.shapes[0]))
    together = exchanged.dim if exchanged is not None else -1
    axes = tuple(Axis((d,), (d,)) for d in dims if d != together or blocks[:middle] == blocks[middle:])

    def localise(call: Call, way: Way, shards: int) -> tuple[Any, tuple, dict]:
        value, ranks, dim, _ = call.node.args
        split = way.needs[0].split
        half = blocks[:middle] if split is not None and split.dim == together else blocks
        return call.node.target, (value, ranks, dim, list(half)), {}

    return Rule(axes=axes, localise=localise)


def _along(call: Call, axis: Axis, splits: list[Split | None]) -> Way | None:
    """The way to run ``call`` in halves along ``axis``; None if its operands are divided along other dimensions.

    An operand that has the dimension but is not made from samples, such as a mask, is sliced.
    """
    needs, gives = [], []
    if len(axis.operands) != len(splits):
        return None  # the rule leaves out an operand of which only the shape matters, as in expand_as
    for dim, split, shape in zip(axis.operands, splits, call.shapes, strict=True):
        if split is not None and split.dim != dim:
            return None
        needs.append(WHOLE if dim is None else split_along(dim, shape[dim]))
    for dim, shape in zip(axis.results, call.results, strict=True):
        if dim is None:
            return None
        gives.append(split_along(dim, shape[dim] if dim < len(shape) else HALVES))
    if not all(placement.split is None or _even(placement.split) for placement in (*needs, *gives)):
        return None
    return Way(tuple(needs), tuple(gives))


def _even(split: Split) -> bool:
    """Whether the halves of a value are the first and the second half of one of its dimensions."""
    return len(split.blocks) == 1 and split.size % HALVES == 0


def _placed(split: Split) -> TensorPlacement:
    return TensorPlacement(PlacementKind.SPLIT, split)
