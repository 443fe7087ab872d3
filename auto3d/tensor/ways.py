"""All ways to run each operation of a program on every rank, from the rules of their operators."""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import fx

from auto3d.capture.model import CapturedModel
from auto3d.capture.nodes import args_of, target_of
from auto3d.tensor.rules import rule_of
from auto3d.tensor.rules.call import Axis, Call, Rule, Way, scaled
from auto3d.tensor_placement import COPIED, PARTIAL, WHOLE, PlacementKind, Split, TensorPlacement

_MOST = 4  # splits of one dimension that are tried; models need one or two


@dataclass(frozen=True, kw_only=True)
class OperationWays:
    """One operation and the ways to run it."""

    call: Call
    rule: Rule
    ways: tuple[Way, ...]
    weights: frozenset[fx.Node]
    """Operands of a product, or of a view, that are real state of two dimensions or more, or views of such."""


def operations_of(
    captured: CapturedModel, shards: int, *, pinned: Mapping[str, Split | None], sequence_parallel: bool
) -> tuple[OperationWays, ...]:
    """The operations of ``captured`` in order, with their ways on ``shards`` ranks.

    Parameters and buffers that are ``pinned``, by the names of their placeholders, have this Split, or none; all others
    may be split in every way that makes sense.
    """
    exported = captured.exported
    state = exported.parameters.keys() | exported.buffers.keys()
    sequences = exported.micro_batch_size if sequence_parallel else None
    return _Ways(calls_of(exported.program, exported.copies), state, shards, pinned, sequences).operations()


def ways_of_call(call: Call, shards: int, possible: Mapping[fx.Node, Iterable[Split]]) -> tuple[Rule, tuple[Way, ...]]:
    """The rule of one call and all ways that it gives if its operands can be split as ``possible`` says."""
    ways = _Ways([call], frozenset(), shards, {}, None)
    return rule_of(call), ways.of_call(call, rule_of(call), possible)


def calls_of(program: fx.Graph, copies: Mapping[str, str] | None = None) -> list[Call]:
    """The operations of ``program`` in order; nodes that take one result out of several are none.

    ``copies`` are those of an ExportedModel; without them, they are operands like any others.
    """
    placeholders = {node.name: node for node in program.find_nodes(op="placeholder")}
    parameter_of = {placeholders[copy]: placeholders[parameter] for copy, parameter in (copies or {}).items()}
    return [
        Call(node, parameter_of)
        for node in program.nodes
        if node.op == "call_function" and not (target_of(node).__name__ == "getitem" and len(args_of(node)) == 2)
    ]


def has_gradient(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.requires_grad


def made_from_inputs(program: fx.Graph, state: Set[str]) -> set[fx.Node]:
    """The inputs of ``program``, which are its placeholders apart from ``state``, and all that depends on them."""
    found: set[fx.Node] = set()
    for node in program.nodes:
        if (node.op == "placeholder" and node.name not in state) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


class _Ways:
    def __init__(
        self,
        calls: list[Call],
        state: Set[str],
        shards: int,
        pinned: Mapping[str, Split | None],
        samples: int | None,
    ) -> None:
        """``samples`` is the size of the dimension before a sequence's, if sequences may be split."""
        self._calls = calls
        self._state = state
        self._shards = shards
        self._pinned = pinned
        self._samples = samples
        self._rules = [rule_of(call) for call in self._calls]
        self._of_samples = made_from_inputs(calls[0].node.graph, state) if samples is not None else set()
        # Value -> its possible splits. Those of state come from what the model later does with the result.
        self._possible: dict[fx.Node, dict[Split, None]] = {}
        self._tables: set[fx.Node] = set()  # real state of two dimensions or more, and its views
        self._found: dict[tuple, tuple[Way, ...]] = {}  # ways of equal calls

    def operations(self) -> tuple[OperationWays, ...]:
        wanted = self._wanted()
        for node in self._calls[0].node.graph.find_nodes(op="placeholder"):
            if node.name not in self._state:
                continue
            if node.meta["val"].dim() > 1 and node.meta["val"].is_floating_point():
                self._tables.add(node)
            if node.name in self._pinned:
                split = self._pinned[node.name]
                self._possible[node] = {} if split is None else {split: None}
            else:
                self._possible[node] = dict.fromkeys(wanted.get(node, ()))
        found = []
        for call, rule in zip(self._calls, self._rules, strict=True):
            alike = self._alike(call)
            if alike not in self._found:
                self._found[alike] = tuple(dict.fromkeys(self._ways_of(call, rule)))
            ways = self._found[alike]
            for number, node in self._numbered_results(call):
                splits = [way.gives[number].split for way in ways]
                self._possible[node] = {each: None for each in splits if each is not None}
                self._add_sequence(node)
            found.append(OperationWays(call=call, rule=rule, ways=ways, weights=self._weights_of(call, rule)))
        return tuple(found)

    def _alike(self, call: Call) -> tuple:
        """All that the ways of ``call`` depend on. Layers repeat, so most calls are like an earlier one."""
        operands = {node: number for number, node in enumerate(dict.fromkeys(call.operands))}
        arguments = fx.node.map_arg(
            (call.node.args, call.node.kwargs), lambda node: f"operand {operands[call.operand(node)]}"
        )
        about = tuple(
            (
                node.meta["val"].shape,
                node.meta["val"].dtype,
                node.meta["val"].requires_grad,
                node.name in self._state,
                node.name in self._pinned,
                tuple(self._possible.get(node, ())),
            )
            for node in operands
        )
        taken = tuple((number, has_gradient(node)) for number, node in self._numbered_results(call))
        return str(call.node.target), repr(arguments), about, taken

    def of_call(self, call: Call, rule: Rule, possible: Mapping[fx.Node, Iterable[Split]]) -> tuple[Way, ...]:
        self._possible.update({node: dict.fromkeys(splits) for node, splits in possible.items()})
        return tuple(dict.fromkeys(self._ways_of(call, rule)))

    def _weights_of(self, call: Call, rule: Rule) -> frozenset[fx.Node]:
        """The weights among the operands of ``call``; notes which results are views of weights."""
        tables = frozenset(each for each in call.operands if each in self._tables)
        is_view = len(tables) == len(call.operands) == 1 and not rule.product
        if is_view:
            self._tables.update(call.result_nodes)
        return tables if is_view or rule.product else frozenset()

    def _numbered_results(self, call: Call) -> list[tuple[int, fx.Node]]:
        return [(call.number_of(node), node) for node in call.result_nodes]

    def _add_sequence(self, node: fx.Node) -> None:
        """Under sequence parallelism, [samples, sequence, width] may be split along its sequence."""
        shape = tuple(node.meta["val"].shape)
        is_sequence = len(shape) == 3 and shape[0] == self._samples and node in self._of_samples
        if is_sequence and has_gradient(node) and shape[1] % self._shards == 0:
            self._possible[node].setdefault(Split(1, (shape[1],)))

    def _wanted(self) -> dict[fx.Node, dict[Split, None]]:
        """The splits of each value that later operations could use, found from the last operation to the first."""
        wanted: dict[fx.Node, dict[Split, None]] = {}
        tables = self._state_and_views()

        def add(node: fx.Node, split: Split) -> None:
            padded = split.padding(self._shards) > 0
            if not padded or len(split.blocks) == 1:
                of_dim = [each for each in wanted.get(node, ()) if each.dim == split.dim]
                if len(of_dim) < _MOST:
                    wanted.setdefault(node, {}).setdefault(split)

        for call, rule in reversed(list(zip(self._calls, self._rules, strict=True))):
            for way in rule.special:
                for operand, need in zip(call.operands, way.needs, strict=True):
                    if need.split is not None:
                        add(operand, need.split)
            for number, node in self._numbered_results(call):
                shape = call.results[number]
                if rule.carry_back is not None:  # a dimension that a view makes can be split by itself
                    for dim, size in enumerate(shape):
                        if size % self._shards == 0 and size > 1:
                            wanted.setdefault(node, {}).setdefault(Split(dim, (size,)))
                for split in wanted.get(node, ()):
                    if rule.carry_back is not None:
                        back = rule.carry_back(number, split)
                        if back is not None and self._carried(split, back):
                            add(call.operands[0], back)
                    for axis in rule.axes:
                        if axis.results[number] == split.dim:
                            for operand, place in zip(call.operands, axis.operands, strict=True):
                                if place is not None:
                                    size = operand.meta["val"].shape[place]
                                    blocks = scaled(split.blocks, shape[split.dim], size)
                                    if blocks is not None:
                                        add(operand, Split(place, blocks))
            if rule.product:  # weights can be split along any axis
                for axis in rule.axes:
                    for operand, place in zip(call.operands, axis.operands, strict=True):
                        if place is not None and operand in tables:
                            of_dim = [each for each in wanted.get(operand, ()) if each.dim == place]
                            if not of_dim:
                                add(operand, Split(place, (operand.meta["val"].shape[place],)))
        return wanted

    def _state_and_views(self) -> set[fx.Node]:
        """State, and what is computed from one tensor of it alone."""
        found: set[fx.Node] = set()
        for call, rule in zip(self._calls, self._rules, strict=True):
            found.update(operand for operand in call.operands if operand.name in self._state)
            if len(call.operands) == 1 and call.operands[0] in found and not rule.product:
                found.update(call.result_nodes)
        return found

    def _carried(self, split: Split, other: Split) -> bool:
        """Whether a split that a view turns into ``other`` stays even, or keeps its padding where it was."""
        if split.padding(self._shards):
            return split.blocks == other.blocks
        return not other.padding(self._shards)

    def _ways_of(self, call: Call, rule: Rule) -> Iterator[Way]:
        copied = tuple(COPIED if has_gradient(operand) else WHOLE for operand in call.operands)
        results = self._result_gradients(call)
        yield Way((WHOLE,) * len(call.operands), (WHOLE,) * len(results))
        if COPIED in copied:
            yield Way(copied, tuple(COPIED if gradient else WHOLE for gradient in results))
        for together in rule.linear:
            if all(has_gradient(call.operands[number]) for number in together):
                needs = tuple(PARTIAL if number in together else each for number, each in enumerate(copied))
                yield Way(needs, (PARTIAL,) * len(results))
        for axis in rule.axes:
            for blocks in self._blocks_along(call, rule, axis):
                way = self._along(call, axis, blocks, copied, results)
                if way is not None:
                    yield way
        if rule.carry is not None:
            for split in self._possible.get(call.operands[0], ()):
                carried = rule.carry(split)
                if carried is not None and all(self._carried(split, each) for each in carried):
                    gives = tuple(_split(each) for each in carried)
                    for others in (
                        copied[1:],
                        gives * (len(copied) - 1),
                    ):  # the second operand of view_as only gives its shape
                        yield Way((_split(split), *others), gives)
        if rule.joins is not None:
            yield from self._joined(call, rule.joins)
        for way in rule.special:
            yield way

    def _result_gradients(self, call: Call) -> list[bool]:
        value = call.node.meta["val"]
        if isinstance(value, torch.Tensor):
            return [value.requires_grad]
        gradients = [isinstance(each, torch.Tensor) and each.requires_grad for each in value]
        for number, node in self._numbered_results(call):
            gradients[number] = has_gradient(node)
        return gradients

    def _blocks_along(self, call: Call, rule: Rule, axis: Axis) -> Iterable[tuple[int, ...]]:
        """The blocks in which the first operand that has ``axis`` can be split along it."""
        first = next(number for number, dim in enumerate(axis.operands) if dim is not None)
        size = call.shapes[first][axis.operands[first] or 0]
        found: dict[tuple[int, ...], None] = {}
        for number, dim in enumerate(axis.operands):
            operand = call.operands[number]
            is_free = operand.name in self._state and operand.name not in self._pinned
            if dim is None or (is_free and not self._decides(call, rule)):
                continue
            for split in self._possible.get(operand, ()):
                if split.dim == dim:
                    blocks = scaled(split.blocks, call.shapes[number][dim], size)
                    if blocks is not None:
                        found.setdefault(blocks)
        return list(found)[:_MOST]

    def _decides(self, call: Call, rule: Rule) -> bool:
        """Whether ``call`` may decide how its state is split: a product, or a view of a weight."""
        return rule.product or (len(call.operands) == 1 and call.operands[0] in self._tables)

    def _along(
        self,
        call: Call,
        axis: Axis,
        blocks: tuple[int, ...],
        copied: tuple[TensorPlacement, ...],
        results: list[bool],
    ) -> Way | None:
        """The way that splits ``axis`` in ``blocks`` of the first operand that has it; None if it cannot."""
        first = next(number for number, dim in enumerate(axis.operands) if dim is not None)
        size = call.shapes[first][axis.operands[first] or 0]
        padded = Split(0, blocks).padding(self._shards) > 0
        if any(block % axis.together for block in Split(0, blocks).local_blocks(self._shards)):
            return None

        def split_of(dim: int, length: int) -> TensorPlacement | None:
            local = scaled(blocks, size, length)
            if local is None or (padded and (length != size or not axis.padded or len(blocks) > 1)):
                return None
            return None if not padded and Split(0, local).padding(self._shards) else _split(Split(dim, local))

        needs: list[TensorPlacement | None] = []
        for number, dim in enumerate(axis.operands):
            if dim is not None:
                needs.append(split_of(dim, call.shapes[number][dim]))
            else:
                needs.append(PARTIAL if number in axis.added else copied[number])
        gives: list[TensorPlacement | None] = []
        for number, dim in enumerate(axis.results):
            if dim is not None:
                gives.append(split_of(dim, call.results[number][dim]))
            else:
                gives.append(PARTIAL if results[number] else None)
        if None in needs or None in gives:
            return None
        return Way(tuple(filter(None, needs)), tuple(filter(None, gives)))

    def _joined(self, call: Call, along: int) -> Iterator[Way]:
        each = [
            [
                split
                for split in self._possible.get(operand, ())
                if split.dim == along and not split.padding(self._shards)
            ]
            for operand in call.operands
        ]
        if all(each):
            blocks = tuple(block for splits in each for block in splits[0].blocks)
            yield Way(tuple(_split(splits[0]) for splits in each), (_split(Split(along, blocks)),))


def _split(split: Split) -> TensorPlacement:
    return TensorPlacement(PlacementKind.SPLIT, split)
