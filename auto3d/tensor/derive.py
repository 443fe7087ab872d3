"""Choose the placements of a whole program with the least communication, by dynamic programming over its operations.

A state says which placements of the values that are still needed exist so far; converting a value once serves all its
later uses. Of states that agree in this, only the cheapest goes on. Operations are decided in order, but a state is
kept as long as it may still win, so a choice can pay off later (greedy choice does not: it left LLaMA with 18
collectives in place of 4 for 2 layers).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from auto3d.capture.model import CapturedModel
from auto3d.plan import PlanError
from auto3d.tensor.collectives import CONVERSION_BETWEEN, Collective, Conversion
from auto3d.tensor.rules.call import Way
from auto3d.tensor.ways import Operation, has_gradient, operations_of
from auto3d.tensor_placement import COPIED, WHOLE, Kind, Split, TensorPlacement

_STATES = 48  # states that go on; those of a transformer layer are about 20
_LATENCY_BYTES = 4096.0  # a collective costs as much as so many bytes, however small it is
_WHOLE_FLOP = 1.0  # cost of one FLOP of a product whose weight is whole, in bytes: weights are split if they can be
_WHOLE_BYTE = 1e-3  # cost of one byte of a value that is not split: of equal ways, the one that saves memory


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


@dataclass(frozen=True, slots=True)
class _Step:
    before: "_Step | None"
    decision: Decision
    state: tuple[tuple[str, TensorPlacement], ...]


_State = dict[fx.Node, frozenset[TensorPlacement]]


def derive(
    captured: CapturedModel, shards: int, *, split: Mapping[str, Split] | None, sequence_parallel: bool
) -> Derivation:
    """The placements of ``captured`` on ``shards`` ranks; see ``operations_of`` for ``split``."""
    operations = operations_of(captured, shards, split=split, sequence_parallel=sequence_parallel)
    return _Search(captured, shards, operations, split, sequence_parallel).run()


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
        self._flops = {node.name: node.flops for node in graph.nodes}
        self._loss = next(node for node in exported.program.nodes if node.name == exported.loss)
        self._last_use: dict[fx.Node, int] = {self._loss: len(self._operations)}
        for number, operation in enumerate(self._operations):
            for operand in operation.call.operands:
                self._last_use[operand] = max(number, self._last_use.get(operand, 0))
        self._ending: dict[int, list[fx.Node]] = {}
        for node, number in self._last_use.items():
            self._ending.setdefault(number, []).append(node)

    def run(self) -> Derivation:
        beam: dict[frozenset, tuple[float, _State, _Step | None]] = {frozenset(): (0.0, {}, None)}
        for number, operation in enumerate(self._operations):
            costs = [self._cost_of(operation, way) for way in operation.ways]
            after: dict[frozenset, tuple[float, _State, _Step | None]] = {}
            for cost, state, step in beam.values():
                for way, own in zip(operation.ways, costs, strict=True):
                    self._advance(number, operation, way, cost + own, state, step, after)
            if not after:
                raise PlanError(self._impossible(operation))
            best = sorted(after.items(), key=lambda item: item[1][0])[:_STATES]
            beam = dict(best)
        finals = []
        for cost, state, step in beam.values():
            prepared = self._prepared(self._loss, WHOLE, state)
            if prepared is not None:
                finals.append((cost + prepared[0], prepared[1], step))
        cost, conversions, last = min(finals, key=lambda each: each[0])
        decisions: list[Decision] = []
        placed: dict[str, TensorPlacement] = {}
        while last is not None:
            decisions.append(last.decision)
            placed.update(last.state)
            last = last.before
        return Derivation(
            operations=self._operations, decisions=tuple(reversed(decisions)), state=placed, loss=conversions
        )

    def _advance(
        self,
        number: int,
        operation: Operation,
        way: Way,
        cost: float,
        state: _State,
        step: _Step | None,
        after: dict[frozenset, tuple[float, _State, _Step | None]],
    ) -> None:
        """Add the state after running ``operation`` in ``way``, unless an equal one is cheaper."""
        new, conversions, chosen = dict(state), [], []
        for operand, need in zip(operation.call.operands, way.needs, strict=True):
            if operand.name in self._state_names and operand not in new:
                placement = self._state_for(operand, need)
                if placement is None:
                    return
                new[operand] = frozenset({placement})
                chosen.append((operand.name, placement))
                if placement == COPIED:
                    cost += self._sync * self._all_reduce(operand)
            prepared = self._prepared(operand, need, new)
            if prepared is None or (prepared[1] and need.split is not None and operand in operation.weights):
                return  # a rank that takes a slice of a whole weight would hold the whole weight
            cost += prepared[0]
            if prepared[1]:
                conversions += prepared[1]
                new[operand] = new.get(operand, frozenset({WHOLE})).union(each.target for each in prepared[1])
        for node in operation.call.result_nodes:
            given = way.gives[0] if node is operation.call.node else way.gives[int(node.args[1])]  # type: ignore[arg-type]
            new[node] = frozenset({given})
        for node in (*self._ending.get(number, ()), *operation.call.result_nodes):
            if self._last_use.get(node, -1) <= number:
                new.pop(node, None)
        key = frozenset(new.items())
        known = after.get(key)
        if known is None or cost < known[0]:
            after[key] = (cost, new, _Step(step, Decision(way, tuple(conversions)), tuple(chosen)))

    def _state_for(self, node: fx.Node, need: TensorPlacement) -> TensorPlacement | None:
        """The placement of state that is first needed as ``need``; None if it may not have a fitting one."""
        fixed = None if self._split is None else self._split.get(node.name)
        if fixed is not None:
            return need if need.split == fixed else None
        if need.split is not None and self._split is not None:
            return COPIED if has_gradient(node) else WHOLE  # each rank takes its slice of the whole
        return WHOLE if need.kind is Kind.PARTIAL else need

    def _prepared(
        self, node: fx.Node, need: TensorPlacement, state: _State
    ) -> tuple[float, tuple[Converted, ...]] | None:
        """The cheapest conversions after which ``node`` has the placement ``need``, with their cost."""
        available = state.get(node, frozenset({WHOLE}))
        if need in available:
            return 0.0, ()
        gradient = has_gradient(node)
        if not gradient and need == COPIED and WHOLE in available:
            return 0.0, ()
        found: list[tuple[float, tuple[Converted, ...]]] = []
        for source in available:
            if source.kind is Kind.SPLIT and node.name in self._state_names:
                continue
            for through in ((), (WHOLE,)):
                path = (source, *through, need)
                if len(set(path)) < len(path):
                    continue
                steps = [Converted(node, a, b) for a, b in pairwise(path)]
                costs = [self._conversion_cost(step, gradient) for step in steps]
                if None not in costs:
                    found.append((sum(cost for cost in costs if cost is not None), tuple(steps)))
        return min(found, key=lambda each: each[0], default=None)

    def _conversion_cost(self, step: Converted, gradient: bool) -> float | None:
        conversion = CONVERSION_BETWEEN.get((step.source.kind, step.target.kind))
        if conversion is None or (conversion.name == "reduce_scatter" and not self._allows_scatter(step.target)):
            return None
        if step.target.kind is Kind.PARTIAL and not gradient:
            return None
        return self._cost_of_conversion(conversion, step.node, gradient)

    def _allows_scatter(self, target: TensorPlacement) -> bool:
        return self._sequence_parallel and target.split is not None and target.split.dim == 1

    def _cost_of_conversion(self, conversion: Conversion, node: fx.Node, gradient: bool) -> float:
        whole = self._all_reduce(node)
        cost = 0.0
        for collective in (conversion.forward, conversion.backward if gradient else None):
            if collective is Collective.ALL_REDUCE:
                cost += whole + _LATENCY_BYTES
            elif collective is not None:  # half of an all-reduce; a sequence is split in spite of the latency
                cost += whole / 2 + _LATENCY_BYTES / (2 if self._sequence_parallel else 1)
        return cost

    def _all_reduce(self, node: fx.Node) -> float:
        """Bytes that each rank sends in an all-reduce of ``node``, by a ring."""
        return 2 * (self._shards - 1) / self._shards * float(node.meta["val"].nbytes)

    def _cost_of(self, operation: Operation, way: Way) -> float:
        call, whole_share = operation.call, 1 - 1 / self._shards
        cost = 0.0
        for node in call.result_nodes:
            given = way.gives[0] if node is call.node else way.gives[int(node.args[1])]  # type: ignore[arg-type]
            if given.kind is not Kind.SPLIT:
                cost += _WHOLE_BYTE * whole_share * node.meta["val"].nbytes
        if operation.rule.product:
            weights = [number for number, each in enumerate(call.operands) if each in operation.weights]
            is_split = any(need.split is not None for need in way.needs)
            if not is_split or any(way.needs[number].kind is not Kind.SPLIT for number in weights):
                flops = self._flops.get(call.node.name, 0)
                table = sum(float(call.operands[number].meta["val"].nbytes) for number in weights)
                cost += whole_share * (_WHOLE_FLOP * flops if flops else table)
        return cost

    def _impossible(self, operation: Operation) -> str:
        names = [operand.name for operand in operation.call.operands if operand.name in (self._split or {})]
        assert self._split is not None, "whole operands are always possible"
        split = self._split[names[0]]
        return (
            f"split: {names[0]} cannot be split along dimension {split.dim} in blocks {list(split.blocks)}, because "
            f"{operation.call.operator} needs it in another way; split it along another dimension, or not at all"
        )
