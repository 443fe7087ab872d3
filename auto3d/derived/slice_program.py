"""The program of one slice of the sequence.

The rules that split a value among tensor-parallel ranks (tensor/rules) also divide it along its sequence. An operation
on values of the slice runs on these alone, if its rule has a way along the sequence. Attention takes the keys and
values of earlier slices too. What follows from inputs alone, such as positions, masks and labels, is computed for the
whole sequence, and the slice takes its places of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from auto3d.capture.alike import DerivedCalls
from auto3d.capture.describe import is_random
from auto3d.capture.export import ExportedModel, module_path
from auto3d.capture.loss_terms import LossTerms, loss_terms
from auto3d.capture.masks import ATTENTION
from auto3d.capture.model import CapturedModel
from auto3d.derived.dropout_mask import DROPOUT_MASK, mask_arguments
from auto3d.derived.slice_operators import CAUSAL_ROWS, WITH_EARLIER
from auto3d.plan import PlanError
from auto3d.tensor.operations import RuledCall, calls_of, ruled_calls
from auto3d.tensor.rules.call import Axis, Call, Rule, Way
from auto3d.tensor_placement import WHOLE, PlacementKind, Split, TensorPlacement

_aten = torch.ops.aten
_INDIVISIBLE = "does not divide along the sequence"
_CLASSES = 1  # dimension of the classes in the logits of a cross-entropy


@dataclass(frozen=True, kw_only=True)
class SliceProgram:
    """The program of one slice, and where it comes from."""

    exported: ExportedModel
    operation_of: Mapping[str, str]  # node -> name of the operation of the whole program that it belongs to
    joined: dict[str, str]  # keys or values of all slices so far -> keys or values of this slice
    masked: frozenset[str]  # attentions that take a mask here, and in the whole program are causal by their kernel


def sliceable_terms(captured: CapturedModel) -> LossTerms:
    """The terms of the loss; raises PlanError if no slices of ``captured`` can add up to the whole, whatever its
    operations are."""
    for node in captured.graph.nodes:
        if name := next(iter(captured.graph.written_buffers.intersection(node.state)), None):
            where = node.module or "the model"
            raise refused(f"{node.name} of {where} writes to the buffer {name} once per micro-batch")
    terms = loss_terms(captured.exported)
    if terms.other:
        raise refused(f"the loss is no sum of means over places of the sequence: {', '.join(terms.other)} is none")
    return terms


def refused(reason: str) -> PlanError:
    return PlanError(
        f"schedule: this model cannot run in slices of its sequence: {reason}; use a schedule without slices, such as "
        "1f1b"
    )


def sequence_inputs(captured: CapturedModel, slices: int) -> dict[str, Split]:
    """How the slices divide the inputs of ``captured`` that have a sequence: along dimension 1, behind the samples.

    These are its inputs of tokens, or if it has none, its inputs of vectors. Raises PlanError if there are none, if
    they have different lengths, or if ``slices`` does not divide the length.
    """
    inputs = captured.graph.inputs
    tokens = {name: value for name, value in inputs.items() if len(value.shape) == 2 and not value.differentiable}
    sequences = tokens or {name: value for name, value in inputs.items() if len(value.shape) == 3}
    lengths = {name: value.shape[1] for name, value in sequences.items()}
    if not lengths:
        raise refused("it has no input of tokens, [samples, sequence], or of vectors, [samples, sequence, width]")
    if len(set(lengths.values())) > 1:
        raise refused(f"its inputs have sequences of different lengths, {lengths}")
    length = next(iter(lengths.values()))
    if length % slices or length < 2 * slices:
        divisors = [number for number in range(1, length // 2 + 1) if length % number == 0]
        raise PlanError(
            f"schedule: slices: {slices} does not divide a sequence of {length} into slices of 2 tokens or more; use "
            f"one of {', '.join(map(str, divisors))}"
        )
    return {name: Split(1, (length,)) for name in lengths}


def slice_programs(captured: CapturedModel, slices: int) -> Iterator[SliceProgram]:
    """The program of each of ``slices`` slices of the sequence, in order.

    Raises PlanError where no slices can add up to the whole, for an operation that combines places of the sequence
    other than by causal attention, and for random numbers other than dropout's outside of attention.
    """
    terms, sequence = sliceable_terms(captured), sequence_inputs(captured, slices)
    calls = ruled_calls(calls_of(captured.exported.program))
    divided: dict[tuple[int, tuple[Split | None, ...]], Division | None] = {}
    for number in range(slices):
        yield _SliceBuilder(captured.exported, calls, sequence, terms, slices, number, divided).build()


Division = tuple[list[Split | None], list[Split]]  # how slices divide operands (None: not at all) and results


@dataclass
class _SliceBuilder:
    exported: ExportedModel
    calls: Sequence[RuledCall]
    sequence: Mapping[str, Split]
    terms: LossTerms
    slices: int
    number: int
    divided: dict[tuple[int, tuple[Split | None, ...]], Division | None]
    """(number of a call, division of its operands) -> how the slices divide it; the same in all slices."""
    graph: fx.Graph = field(default_factory=fx.Graph)
    _added: DerivedCalls = field(init=False)
    _counted: set[str] = field(init=False)  # names of the terms of the loss that count
    operation_of: dict[str, str] = field(default_factory=dict)
    joined: dict[str, str] = field(default_factory=dict)
    masked: set[str] = field(default_factory=set)
    _whole: dict[fx.Node, fx.Node] = field(default_factory=dict)  # value of the model -> the same value here
    _own: dict[fx.Node, fx.Node] = field(default_factory=dict)  # value of the model -> what this slice has of it
    _parts: dict[tuple[fx.Node, Split], fx.Node] = field(default_factory=dict)  # whole value -> places of the slice
    _division: dict[fx.Node, Split] = field(default_factory=dict)
    """How the slices divide a value: a value of which a slice has its own part, or a value of the whole sequence that
    follows from inputs."""
    _follows_sequence: set[fx.Node] = field(default_factory=set)  # inputs with a sequence, and all that depends on them
    _rows: dict[fx.Node | None, fx.Node] = field(default_factory=dict)  # mask, or None if the kernel's -> its rows here
    _at: str = ""  # name of the operation of the whole program that is being added

    def __post_init__(self) -> None:
        self._added = DerivedCalls(self.graph)
        self._counted = {term.name for term in self.terms.counted}

    @property
    def _length(self) -> int:
        """Places of the whole sequence."""
        return next(iter(self.sequence.values())).size

    def build(self) -> SliceProgram:
        program = self.exported.program
        for node in program.find_nodes(op="placeholder"):
            copy = self.graph.node_copy(node)
            copy.name = node.name
            self._whole[node] = copy
            if node.name in self.sequence:
                self._division[node] = self.sequence[node.name]
                self._follows_sequence.add(node)
        for ruled in self.calls:
            self._at = ruled.call.node.name
            self._add(ruled)
        loss = next(node for node in program.nodes if node.name == self.exported.loss)
        if loss in self._own:
            raise refused(f"its loss {loss.name} is no mean over places of the sequence")
        self.graph.output((self._whole[loss],)).meta["val"] = None
        self.graph.eliminate_dead_code()
        return SliceProgram(
            exported=replace(self.exported, program=self.graph),
            operation_of=self.operation_of,
            joined=self.joined,
            masked=frozenset(self.masked),
        )

    def _add(self, ruled: RuledCall) -> None:
        """Add what runs the call in this slice."""
        call = ruled.call
        runs_in_slices = any(operand in self._own for operand in call.operands)
        divided = any(operand in self._division for operand in call.operands)
        learned = any(node.meta["val"].requires_grad for node in call.result_nodes if _is_tensor(node))
        counted = call.node.name in self._counted
        if runs_in_slices and (counted or call.node.name in self.terms.constant):
            self._add_mean(call)
            return
        if counted:
            raise self._refused(call, "is a mean of values that do not follow the sequence")
        if not self._follows_sequence.isdisjoint(call.operands):
            self._follows_sequence.update(call.result_nodes)
            if learned and not divided:
                raise self._refused(call, "combines places of the sequence")
        if not runs_in_slices and not (divided and learned):
            args, kwargs = fx.node.map_arg((call.node.args, call.node.kwargs), self._whole.__getitem__)
            self._put(call, call.node.target, args, kwargs, self._whole)
            if divided and (way := self._divided(ruled)) is not None:
                self._note(call, way[1])
        elif call.node.target is ATTENTION:
            self._add_attention(call)
        else:
            self._add_own(ruled)

    def _add_own(self, ruled: RuledCall) -> None:
        """Add the call on the slice's parts of its operands."""
        call, rule = ruled.call, ruled.rule
        divided = self._divided(ruled)
        if divided is None:
            raise self._refused(call, "combines places of the sequence")
        needs, gives = divided
        way = _as_way(needs, gives)
        draws = is_random(call.node) and not _draws_nothing(call)
        if draws and call.node.target is not _aten.dropout.default:
            raise self._refused(call, "draws random numbers")
        self._note(call, gives)
        if draws:
            self._add_dropout(call, gives[0])
            return
        target, args, kwargs = call.node.target, call.node.args, call.node.kwargs
        if rule.localise is not None:
            target, args, kwargs = rule.localise(call, way, self.slices)
        order = iter(needs)
        args, kwargs = fx.node.map_arg((args, kwargs), lambda node: self._operand(call, node, next(order)))
        made = self._put(call, target, args, kwargs, self._own)
        values = (made,) if isinstance(made, torch.Tensor) else made
        for value, shape, given in zip(values, call.results, way.gives, strict=True):
            if isinstance(value, torch.Tensor) and tuple(value.shape) != given.local_shape(shape, self.slices):
                raise self._refused(call, _INDIVISIBLE)

    def _divided(self, ruled: RuledCall) -> Division | None:
        """How the slices divide each operand and each result of the call; None if they cannot."""
        divisions = tuple([self._division.get(operand) for operand in ruled.call.operands])
        known = ruled.number, divisions
        if known not in self.divided:
            self.divided[known] = self._found_division(ruled.call, ruled.rule, divisions)
        return self.divided[known]

    def _found_division(self, call: Call, rule: Rule, divisions: Sequence[Split | None]) -> Division | None:
        for axis in rule.axes:
            if (way := _along(call, axis, divisions)) is not None:
                return way
        if rule.carry is not None and len(divisions) == 1 and divisions[0] is not None:
            carried = rule.carry(divisions[0])
            if carried is not None and all(block % self.slices == 0 for split in carried for block in split.blocks):
                return [divisions[0]], list(carried)
        return None

    def _add_dropout(self, call: Call, split: Split) -> None:
        """Draw the mask of the whole value, as the undivided program does, and multiply by the slice's part of it."""
        (operand,) = call.operands
        mask = self._new(call.node.name, DROPOUT_MASK, mask_arguments(call), {}, call.node)
        factors = self._operand(call, operand, split), self._part_of(mask, split, call.node, "_mask")
        self._own[call.node] = self._new(f"{call.node.name}_product", _aten.mul.Tensor, factors, {}, call.node)

    def _add_attention(self, call: Call) -> None:
        """Add attention of the slice's queries to the keys and values of all slices so far."""
        query, key, value = call.operands[:3]
        causal, mask = bool(call.argument("is_causal", False)), call.argument("attn_mask")
        places = [self._division.get(operand) for operand in (query, key, value)]
        expected = [Split(len(operand.meta["val"].shape) - 2, (self._length,)) for operand in (query, key, value)]
        if places != expected or any(operand not in self._own for operand in (query, key, value)):
            raise self._refused(call, "attends to another sequence than its own")
        length = self._length // self.slices
        first, last = self.number * length, (self.number + 1) * length
        shows = tuple(mask.meta["val"].shape[-2:]) if isinstance(mask, fx.Node) else ()
        if not causal and (mask in self._own or shows != (self._length, self._length)):
            raise self._refused(call, "lets tokens attend to later ones")
        if is_random(call.node):
            raise self._refused(call, "draws random numbers inside of attention, by its dropout")
        rows = self._rows_of(call, None if causal else mask, first, last) if first or not causal else None
        if causal and rows is not None:
            self.masked.add(call.node.name)
        joined = []
        for what, node in (("keys", key), ("values", value)):
            name = f"{call.node.name}_{what}"
            arguments = (self._own[node], len(node.meta["val"].shape) - 2, first)
            joined.append(self._new(name, WITH_EARLIER, arguments, {}, call.node))
            self.joined[name] = self._own[node].name
        others = {"scale": call.argument("scale"), "enable_gqa": bool(call.argument("enable_gqa", False))}
        args = (self._own[query], *joined, rows, 0.0, rows is None)
        self._own[call.node] = self._new(call.node.name, ATTENTION, args, others, call.node)
        self._division[call.node] = expected[0]

    def _rows_of(self, call: Call, mask: fx.Node | None, first: int, last: int) -> fx.Node:
        """What attention adds to the scores of the slice's tokens, [..., last - first, last]: 0 for the tokens that a
        token sees. It sees what ``mask`` shows or, without a mask, all tokens up to itself: the second slice of two
        tokens has the rows 0 0 0 -inf and 0 0 0 0.

        The mask has numbers, and layers share it. Of a mask of booleans the kernel would make a mask of numbers, and
        each layer's backward would keep its own.
        """
        if mask in self._rows:
            return self._rows[mask]
        options: dict[str, Any] = {"dtype": torch.bool, "device": torch.device("meta")}
        name = f"{call.node.name}_rows"
        if mask is None:
            sees = self._new(f"{name}_ones", _aten.ones.default, ([last - first, last],), options, call.node)
            sees = self._new(f"{name}_sees", _aten.tril.default, (sees, first), {}, call.node)
        else:
            sees = self._new(f"{name}_sees", CAUSAL_ROWS, (self._whole[mask], first, last), {}, call.node)
        if sees.meta["val"].dtype is torch.bool:
            options["dtype"] = call.operands[0].meta["val"].dtype
            zeros = self._new(f"{name}_zeros", _aten.zeros.default, (list(sees.meta["val"].shape),), options, call.node)
            hidden = self._new(f"{name}_hidden", _aten.logical_not.default, (sees,), {}, call.node)
            infinity = float("-inf")
            sees = self._new(name, _aten.masked_fill.Scalar, (zeros, hidden, infinity), {}, call.node)
        self._rows[mask] = sees
        return sees

    def _add_mean(self, call: Call) -> None:
        """Add a term of the loss as the mean over the slice's places."""
        first = next(number for number, operand in enumerate(call.operands) if operand in self._own)
        split = self._division[call.operands[first]]
        whole = call.shapes[first]
        needs = [split if shape == whole else None for shape in call.shapes]  # others, such as weights, are broadcast
        targets = call.operand_number("target")
        if targets is not None and len(call.shapes[targets]) == len(whole) - 1:  # classes are no places
            needs[targets] = Split(split.dim - (split.dim > _CLASSES), split.blocks)
        order = iter(needs)
        args, kwargs = fx.node.map_arg(
            (call.node.args, call.node.kwargs), lambda node: self._operand(call, node, next(order))
        )
        self._put(call, call.node.target, args, kwargs, self._whole)

    def _operand(self, call: Call, node: fx.Node, split: Split | None) -> fx.Node:
        """What the slice has of the value ``node``: all of it or, if it is ``split``, its part."""
        if split is None:
            if node in self._own:
                raise self._refused(call, "needs the whole sequence")
            return self._whole[node]
        if node in self._own:
            if self._division[node] != split:
                raise self._refused(call, "combines places of the sequence")
            return self._own[node]
        if (node, split) not in self._parts:
            size = tuple(node.meta["val"].shape)[split.dim]
            if size != split.size or len(set(split.blocks)) > 1:
                raise self._refused(call, f"combines {size} places with those of the sequence")
            self._parts[node, split] = self._part_of(self._whole[node], split, node, f"_dim{split.dim}_slice")
        return self._parts[node, split]

    def _part_of(self, source: fx.Node, split: Split, origin: fx.Node, suffix: str) -> fx.Node:
        """The slice's places of the whole value ``source``."""
        shape = tuple(source.meta["val"].shape)
        blocks, block = len(split.blocks), split.blocks[0]
        length = block // self.slices
        bounds = (self.number * length, (self.number + 1) * length)
        name = f"{source.name}{suffix}"
        if blocks == 1:
            return self._new(name, _aten.slice.Tensor, (source, split.dim, *bounds), {}, origin)
        before, after = shape[: split.dim], shape[split.dim + 1 :]
        apart = self._new(
            f"{name}_apart", _aten.reshape.default, (source, [*before, blocks, block, *after]), {}, origin
        )
        own = self._new(f"{name}_own", _aten.slice.Tensor, (apart, split.dim + 1, *bounds), {}, origin)
        return self._new(name, _aten.reshape.default, (own, [*before, blocks * length, *after]), {}, origin)

    def _note(self, call: Call, gives: list[Split]) -> None:
        """Note how the slices divide each result."""
        for node in call.result_nodes:
            self._division[node] = gives[call.number_of(node)]

    def _put(self, call: Call, target: Any, args: tuple, kwargs: dict, values: dict[fx.Node, fx.Node]) -> Any:
        """Add ``call`` and its results to ``values``; returns what it makes of meta tensors."""
        try:
            made = self._new(call.node.name, target, args, kwargs, call.node)
        except RuntimeError:  # the operator refuses the shapes of a slice
            raise self._refused(call, _INDIVISIBLE) from None
        for node in call.result_nodes:
            values[node] = made if node is call.node else self._added.take(node.name, made, node)
        return made.meta["val"]

    def _new(self, name: str, target: Any, args: tuple, kwargs: dict, origin: fx.Node) -> fx.Node:
        """A node ``name`` that calls ``target``; where it is in the model's code is taken from ``origin``."""
        node = self._added.add(name, target, args, kwargs, origin)
        self.operation_of[node.name] = self._at
        return node

    def _refused(self, call: Call, reason: str) -> PlanError:
        return refused(f"{call.operator} of {module_path(call.node) or 'the model'} {reason}")


def _along(call: Call, axis: Axis, divisions: Sequence[Split | None]) -> Division | None:
    """How the operands and the results are divided if ``axis`` is the sequence; None if it is another dimension.

    An operand of the whole sequence, such as an embedding of positions, is divided where it has that dimension.
    """
    if len(axis.operands) != len(divisions):
        return None  # the rule leaves out an operand of which only the shape matters, as in expand_as
    blocks = next((split.blocks for split in divisions if split is not None), ())
    needs: list[Split | None] = []
    for dim, split, shape in zip(axis.operands, divisions, call.shapes, strict=True):
        if (split is not None and split != Split(-1 if dim is None else dim, blocks)) or (
            dim is not None and shape[dim] != sum(blocks)
        ):
            return None
        needs.append(None if dim is None else Split(dim, blocks))
    gives = []
    for dim, shape in zip(axis.results, call.results, strict=True):
        if dim is None or (shape and shape[dim] != sum(blocks)):
            return None
        gives.append(Split(dim, blocks))
    return needs, gives


def _as_way(needs: list[Split | None], gives: list[Split]) -> Way:
    def placed(split: Split | None) -> TensorPlacement:
        return WHOLE if split is None else TensorPlacement(PlacementKind.SPLIT, split)

    return Way(tuple(map(placed, needs)), tuple(map(placed, gives)))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _draws_nothing(call: Call) -> bool:
    return call.node.target is _aten.dropout.default and not (call.argument("p") and call.argument("train", True))
