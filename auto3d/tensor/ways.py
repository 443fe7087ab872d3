"""All ways to run each operation of a program on every rank, from the rules of their operators."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from auto3d.capture.model import CapturedModel
from auto3d.share import Share
from auto3d.tensor.operations import AnalysedProgram, Numbers, ProgramOperation, analysed, has_gradient
from auto3d.tensor.rules.call import Axis, Call, Rule, Way, scaled
from auto3d.tensor_placement import COPIED, PARTIAL, WHOLE, PlacementKind, Split, TensorPlacement

_MOST = 4  # splits of one dimension that are tried; models need one or two
_NONE = 0  # number of no splits, for a value that is not pinned


@dataclass(frozen=True, kw_only=True)
class OperationWays:
    """One operation and the ways to run it."""

    operation: ProgramOperation
    ways: tuple[Way, ...]
    number: int  # equal for operations of one kind that have the same ways

    @property
    def call(self) -> Call:
        return self.operation.call

    @property
    def rule(self) -> Rule:
        return self.operation.rule

    @property
    def weights(self) -> frozenset[fx.Node]:
        return self.operation.weights


def operations_of(
    captured: CapturedModel, share: Share, *, pinned: Mapping[str, Split | None]
) -> tuple[OperationWays, ...]:
    """The operations of ``captured`` in order, with their ways on ranks that have ``share`` of it.

    Parameters and buffers that are ``pinned``, by the names of their placeholders, have this Split, or none; all others
    may be split in every way that makes sense.
    """
    sequences = captured.exported.micro_batch_size if share.sequence_parallel else None
    return _Ways(analysed(captured), share.tp, pinned, sequences).operations()


@dataclass(frozen=True, slots=True)
class _Wish:
    """A split that an operation could use of one of its operands."""

    split: Split
    if_none: bool  # only where no other split of this dimension is wanted


class _Ways:
    def __init__(
        self, program: AnalysedProgram, shards: int, pinned: Mapping[str, Split | None], samples: int | None
    ) -> None:
        """``samples`` is the size of the dimension before a sequence's, if sequences may be split."""
        self._program = program
        self._shards = shards
        self._pinned = pinned
        self._samples = samples
        # Value -> its possible splits. Splits of state come from what the model later does with the result.
        self._possible: dict[fx.Node, tuple[Split, ...]] = {}

    def operations(self) -> tuple[OperationWays, ...]:
        state = [node for node in self._graph.find_nodes(op="placeholder") if node.name in self._program.state]
        free = any(node.name not in self._pinned for node in state)
        wanted = _Wanted(self._program, self._shards).splits() if free else {}
        numbers = Numbers({(False, ()): _NONE})  # (whether pinned, possible splits) -> number
        number_of: dict[fx.Node, int] = {}
        for node in state:
            is_pinned = node.name in self._pinned
            split = self._pinned.get(node.name)
            self._possible[node] = (() if split is None else (split,)) if is_pinned else wanted.get(node, ())
            number_of[node] = numbers[is_pinned, self._possible[node]]
        known: dict[tuple, tuple[int, tuple[Way, ...], list[tuple[tuple[Split, ...], int]]]] = {}
        operations = []
        for operation in self._program.operations:
            alike = operation.kind, *[number_of.get(node, _NONE) for node in operation.operands]
            if alike not in known:
                ways = tuple(dict.fromkeys(self._ways_of(operation)))
                possible = [self._splits_given(ways, number, node) for number, node in operation.results]
                known[alike] = len(known), ways, [(splits, numbers[False, splits]) for splits in possible]
            number, ways, given = known[alike]
            for (_, node), (splits, number_of_splits) in zip(operation.results, given, strict=True):
                self._possible[node] = splits
                number_of[node] = number_of_splits
            operations.append(OperationWays(operation=operation, ways=ways, number=number))
        return tuple(operations)

    def of_operation(self, operation: ProgramOperation, possible: Mapping[fx.Node, Iterable[Split]]) -> tuple[Way, ...]:
        self._possible = {node: tuple(splits) for node, splits in possible.items()}
        return tuple(dict.fromkeys(self._ways_of(operation)))

    @cached_property
    def _graph(self) -> fx.Graph:
        return self._program.operations[0].call.node.graph

    def _splits_given(self, ways: Sequence[Way], number: int, node: fx.Node) -> tuple[Split, ...]:
        """The possible splits of ``node``, result ``number`` of an operation with these ways.

        Under sequence parallelism, [samples, sequence, width] may be split along its sequence.
        """
        splits = [split for way in ways if (split := way.gives[number].split) is not None]
        shape = tuple(node.meta["val"].shape)
        is_sequence = len(shape) == 3 and shape[0] == self._samples and node in self._program.of_samples
        if is_sequence and has_gradient(node) and shape[1] % self._shards == 0:
            splits.append(Split(1, (shape[1],)))
        return tuple(dict.fromkeys(splits))

    def _ways_of(self, operation: ProgramOperation) -> Iterator[Way]:
        call, rule = operation.call, operation.rule
        copied = tuple(COPIED if has_gradient(operand) else WHOLE for operand in call.operands)
        results = self._result_gradients(operation)
        yield Way((WHOLE,) * len(call.operands), (WHOLE,) * len(results))
        if COPIED in copied:
            yield Way(copied, tuple(COPIED if gradient else WHOLE for gradient in results))
        for together in rule.linear:
            if all(has_gradient(call.operands[number]) for number in together):
                needs = tuple(PARTIAL if number in together else placement for number, placement in enumerate(copied))
                yield Way(needs, (PARTIAL,) * len(results))
        for axis in rule.axes:
            for blocks in self._blocks_along(operation, axis):
                way = self._along(call, axis, blocks, copied, results)
                if way is not None:
                    yield way
        if rule.carry is not None:
            for split in self._possible.get(call.operands[0], ()):
                carried = rule.carry(split)
                if carried is not None and all(_carried(split, result, self._shards) for result in carried):
                    gives = tuple(_split(result) for result in carried)
                    for others in (
                        copied[1:],
                        gives * (len(copied) - 1),
                    ):  # the second operand of view_as only gives its shape
                        yield Way((_split(split), *others), gives)
        if rule.joins is not None:
            yield from self._joined(call, rule.joins)
        for way in rule.special:
            yield way

    def _result_gradients(self, operation: ProgramOperation) -> list[bool]:
        value = operation.call.node.meta["val"]
        if isinstance(value, torch.Tensor):
            return [value.requires_grad]
        gradients = [isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in value]
        for number, node in operation.results:
            gradients[number] = has_gradient(node)
        return gradients

    def _blocks_along(self, operation: ProgramOperation, axis: Axis) -> Iterable[tuple[int, ...]]:
        """The blocks in which the first operand that has ``axis`` can be split along it."""
        call = operation.call
        first = next(number for number, dim in enumerate(axis.operands) if dim is not None)
        size = call.shapes[first][axis.operands[first] or 0]
        distinct: dict[tuple[int, ...], None] = {}
        for number, dim in enumerate(axis.operands):
            operand = call.operands[number]
            is_free = operand.name in self._program.state and operand.name not in self._pinned
            if dim is None or (is_free and not self._decides(operation)):
                continue
            for split in self._possible.get(operand, ()):
                if split.dim == dim:
                    blocks = scaled(split.blocks, call.shapes[number][dim], size)
                    if blocks is not None:
                        distinct.setdefault(blocks)
        return list(distinct)[:_MOST]

    def _decides(self, operation: ProgramOperation) -> bool:
        """Whether ``operation`` may decide how its state is split: a product, or a view of a weight."""
        operands = operation.call.operands
        return operation.rule.product or (len(operands) == 1 and operands[0] in self._program.tables)

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
        by_operand = [
            [
                split
                for split in self._possible.get(operand, ())
                if split.dim == along and not split.padding(self._shards)
            ]
            for operand in call.operands
        ]
        if all(by_operand):
            blocks = tuple(block for splits in by_operand for block in splits[0].blocks)
            yield Way(tuple(_split(splits[0]) for splits in by_operand), (_split(Split(along, blocks)),))


class _Wanted:
    """Finds the splits of each value that later operations could use, from the last operation to the first."""

    def __init__(self, program: AnalysedProgram, shards: int) -> None:
        self._program = program
        self._shards = shards
        self._numbers = Numbers({(): _NONE})  # splits of one value -> number
        self._splits: list[tuple[Split, ...]] = [()]  # number -> splits
        self._wishes: list[_Wish] = []
        self._wish_numbers = Numbers()
        self._extended: dict[tuple[int, int], int] = {}  # (splits, wish) -> splits

    def splits(self) -> dict[fx.Node, tuple[Split, ...]]:
        wanted: dict[fx.Node, int] = {}
        known: dict[tuple, tuple[list[int], list[tuple[int, int]]]] = {}
        for operation in reversed(self._program.operations):
            alike = operation.kind, *[wanted.get(node, _NONE) for _, node in operation.results]
            if alike not in known:
                known[alike] = self._of_operation(operation, list(alike[1:]))
            results, wishes = known[alike]
            for (_, node), number in zip(operation.results, results, strict=True):
                wanted[node] = number
            for operand, wish in wishes:
                node = operation.call.operands[operand]
                wanted[node] = self._extend(wanted.get(node, _NONE), wish)
        return {node: self._splits[number] for node, number in wanted.items()}

    def _numbered(self, splits: tuple[Split, ...]) -> int:
        number = self._numbers[splits]
        if number == len(self._splits):
            self._splits.append(splits)
        return number

    def _extend(self, number: int, wish_number: int) -> int:
        """The number of the splits ``number`` after a wish, of which there are at most ``_MOST`` for one dimension."""
        known = number, wish_number
        if known not in self._extended:
            splits, wish = self._splits[number], self._wishes[wish_number]
            of_dim = sum(split.dim == wish.split.dim for split in splits)
            is_new = wish.split not in splits and of_dim < (1 if wish.if_none else _MOST)
            self._extended[known] = self._numbered((*splits, wish.split)) if is_new else number
        return self._extended[known]

    def _of_operation(self, operation: ProgramOperation, results: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """(wanted splits of the results, given the later operations' wishes; wishes for operands), all by numbers."""
        call, rule = operation.call, operation.rule
        wishes: list[tuple[int, int]] = []

        def add(operand: int, split: Split, *, if_none: bool = False) -> None:
            padded = split.padding(self._shards) > 0
            if not padded or len(split.blocks) == 1:
                number = self._wish_numbers[split, if_none]
                if number == len(self._wishes):
                    self._wishes.append(_Wish(split, if_none))
                wishes.append((operand, number))

        for way in rule.special:
            for operand, need in enumerate(way.needs):
                if need.split is not None:
                    add(operand, need.split)
        for place, (number, _) in enumerate(operation.results):
            shape = call.results[number]
            if rule.carry_back is not None:  # a dimension that a view makes can be split by itself
                sizes = [(dim, size) for dim, size in enumerate(shape) if size % self._shards == 0 and size > 1]
                splits = dict.fromkeys((*self._splits[results[place]], *(Split(dim, (size,)) for dim, size in sizes)))
                results[place] = self._numbered(tuple(splits))
            for split in self._splits[results[place]]:
                if rule.carry_back is not None:
                    back = rule.carry_back(number, split)
                    if back is not None and _carried(split, back, self._shards):
                        add(0, back)
                for axis in rule.axes:
                    if axis.results[number] == split.dim:
                        for operand, dim in enumerate(axis.operands):
                            if dim is not None:
                                size = call.shapes[operand][dim]
                                blocks = scaled(split.blocks, shape[split.dim], size)
                                if blocks is not None:
                                    add(operand, Split(dim, blocks))
        if rule.product:  # weights can be split along any axis
            for axis in rule.axes:
                for operand, dim in enumerate(axis.operands):
                    if dim is not None and call.operands[operand] in self._program.from_state:
                        add(operand, Split(dim, (call.shapes[operand][dim],)), if_none=True)
        return results, wishes


def _carried(split: Split, other: Split, shards: int) -> bool:
    """Whether a split that a view turns into ``other`` stays even, or keeps its padding where it was."""
    if split.padding(shards):
        return split.blocks == other.blocks
    return not other.padding(shards)


def _split(split: Split) -> TensorPlacement:
    return TensorPlacement(PlacementKind.SPLIT, split)
