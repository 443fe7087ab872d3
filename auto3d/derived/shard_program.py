"""The program that each rank of a tensor-parallel group runs: local operations, and the conversions between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from auto3d.capture.alike import DerivedCalls
from auto3d.capture.describe import is_random
from auto3d.capture.export import ExportedModel
from auto3d.conversions import CONVERSION_BETWEEN
from auto3d.plan import PlanError
from auto3d.tensor.collectives import operator_of
from auto3d.tensor.derivation import Converted, Decision, Derivation
from auto3d.tensor.rules.call import Inner
from auto3d.tensor.ways import OperationWays
from auto3d.tensor_placement import WHOLE, PlacementKind, TensorPlacement


@dataclass(frozen=True, kw_only=True)
class LocalProgram:
    """The program of one rank, and where it comes from."""

    exported: ExportedModel
    placements: Mapping[str, TensorPlacement]  # by name of the placeholder or of the value
    operation_of: Mapping[str, str]  # node -> name of the operation of the whole program that it belongs to
    drawn_per_shard: frozenset[str]


def local_program(exported: ExportedModel, derivation: Derivation, shards: int) -> LocalProgram:
    """The program that runs ``exported`` on ``shards`` ranks as ``derivation`` decides."""
    return _Builder(exported, derivation, shards).build()


def placed_state(exported: ExportedModel, derivation: Derivation) -> dict[str, TensorPlacement]:
    """The placement of each parameter and buffer that an operation uses, by its name.

    A tied parameter has several placeholders, of which the program may use only some.
    """
    names = {**exported.parameters, **exported.buffers}
    placed: dict[str, TensorPlacement] = {}
    for placeholder, placement in derivation.state.items():
        if placed.setdefault(names[placeholder], placement) != placement:
            raise PlanError(f"split: the uses of {names[placeholder]} need different placements; keep it whole")
    return placed


@dataclass
class _Builder:
    exported: ExportedModel
    derivation: Derivation
    shards: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    calls: DerivedCalls = field(init=False)
    local: dict[tuple[fx.Node, TensorPlacement], fx.Node] = field(default_factory=dict)  # (whole value, placement)
    placement: dict[fx.Node, TensorPlacement] = field(default_factory=dict)  # placement of each value when it is made
    placements: dict[str, TensorPlacement] = field(default_factory=dict)
    operation_of: dict[str, str] = field(default_factory=dict)
    drawn: set[str] = field(default_factory=set)
    copies: dict[str, list[fx.Node]] = field(default_factory=dict)  # placeholder of a parameter -> of its copies
    converted: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)  # (value, its conversion), in order

    def __post_init__(self) -> None:
        self.calls = DerivedCalls(self.graph)

    def build(self) -> LocalProgram:
        program = self.exported.program
        names = {**self.exported.parameters, **self.exported.buffers}
        state = placed_state(self.exported, self.derivation)
        for node in program.find_nodes(op="placeholder"):
            placed = state.get(names.get(node.name, ""), WHOLE)
            copy = self.graph.node_copy(node)
            copy.name = node.name
            copy.meta["val"] = self._local_value(node.meta["val"], placed)
            self._add(node, placed, copy)
            if node.name in self.exported.copies:
                self.copies.setdefault(self.exported.copies[node.name], []).append(node)
        early = self._early_conversions()
        for operation, decision in zip(self.derivation.operations, self.derivation.decisions, strict=True):
            name = operation.call.node.name
            for conversion in decision.conversions:
                self._convert(conversion, name)
            self._run(operation, decision)
            for conversion in early.get(operation.call.node, ()):
                self._convert(conversion, name)
        last = self.derivation.operations[-1].call.node.name
        for conversion in self.derivation.loss:
            self._convert(conversion, last)
        loss = next(node for node in program.nodes if node.name == self.exported.loss)
        nodes = {node.name: node for node in program.nodes}
        outputs = {name: self._made(nodes[node]) for name, node in self.exported.outputs.items()}
        output = self.graph.output((self._in(loss, WHOLE), *outputs.values()))
        output.meta["val"] = None
        for whole, local in reversed(self.converted):
            if whole.name in self.copies and not local.users:  # only the parameter itself, or only a copy, is used
                self.graph.erase_node(local)
        exported = replace(
            self.exported,
            program=self.graph,
            loss=self._in(loss, WHOLE).name,
            outputs={name: node.name for name, node in outputs.items()},
        )
        return LocalProgram(
            exported=exported,
            placements=self.placements,
            operation_of=self.operation_of,
            drawn_per_shard=frozenset(self.drawn),
        )

    def _early_conversions(self) -> dict[fx.Node, list[Converted]]:
        """Conversions of partial values, by the operation that makes the value.

        They come right behind it, so that a stage never sends a partial value.
        """
        maker = {
            node: operation.call.node
            for operation in self.derivation.operations
            for node in operation.call.result_nodes
        }
        early: dict[fx.Node, list[Converted]] = {}
        for conversions in (*(decision.conversions for decision in self.derivation.decisions), self.derivation.loss):
            for conversion in conversions:
                if conversion.source.kind is PlacementKind.PARTIAL and conversion.node in maker:
                    early.setdefault(maker[conversion.node], []).append(conversion)
        return early

    def _add(self, whole: fx.Node, placed: TensorPlacement, local: fx.Node) -> None:
        self.local[whole, placed] = local
        self.placement.setdefault(whole, placed)
        self.placements[local.name] = placed

    def _local_value(self, value: Any, placed: TensorPlacement) -> Any:
        if not isinstance(value, torch.Tensor) or placed.split is None:
            return value
        local = torch.empty(placed.local_shape(value.shape, self.shards), dtype=value.dtype, device="meta")
        return local.requires_grad_(value.requires_grad)

    def _in(self, node: fx.Node, placed: TensorPlacement) -> fx.Node:
        """The local node of the value ``node`` as ``placed``. What has no gradient is copied if it is whole."""
        return self.local.get((node, placed)) or self.local[node, WHOLE]

    def _made(self, node: fx.Node) -> fx.Node:
        """The local node of the value ``node`` as its operation makes it."""
        return self.local[node, self.placement[node]]

    def _convert(self, step: Converted, operation: str) -> None:
        for node in (step.node, *self.copies.get(step.node.name, ())):
            self._convert_one(node, step, operation)

    def _convert_one(self, node: fx.Node, step: Converted, operation: str) -> None:
        """Convert ``node``: the node of ``step``, or a copy of that parameter in low precision."""
        if (node, step.target) in self.local:
            return
        conversion = CONVERSION_BETWEEN[step.source.kind, step.target.kind]
        split = step.target.split or step.source.split
        source = self._in(node, step.source)
        place = (split.dim, list(split.blocks)) if split is not None else (0, [])
        name = f"{source.name}_{conversion.name}"
        local = self.calls.add(name, operator_of(conversion), (source, self.shards, *place), {}, node)
        self.operation_of[local.name] = operation
        self._add(node, step.target, local)
        self.converted.append((step.node, local))

    def _run(self, operation: OperationWays, decision: Decision) -> None:
        """Add the local operation, with its results."""
        call, way = operation.call, decision.way
        target, args, kwargs = call.node.target, call.node.args, call.node.kwargs
        if operation.rule.localise is not None and any(need.split is not None for need in (*way.needs, *way.gives)):
            target, args, kwargs = operation.rule.localise(call, way, self.shards)
        needs = iter(way.needs)
        operands = iter(call.operands)

        def localised(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                assert call.operand(argument) is next(operands), "arguments come in the order of the operands"
                return self._in(argument, next(needs))
            if isinstance(argument, Inner):
                name = f"{call.node.name}_{argument.name}"
                inner = self.calls.add(name, argument.target, localised(argument.args), {}, call.node)
                self.operation_of[inner.name] = call.node.name
                return inner
            if isinstance(argument, list | tuple):
                return type(argument)(localised(item) for item in argument)
            if isinstance(argument, dict):
                return {name: localised(item) for name, item in argument.items()}
            return argument

        args, kwargs = localised(tuple(args)), localised(dict(kwargs))
        local = self.calls.add(call.node.name, target, args, kwargs, call.node)
        self.operation_of[local.name] = call.node.name
        if is_random(call.node) and any(given.split is not None for given in way.gives):
            self.drawn.add(local.name)
        if call.result_nodes == (call.node,):
            self._add(call.node, way.gives[0], local)
            return
        for node in call.result_nodes:
            self._add(node, way.gives[call.number_of(node)], self.calls.take(node.name, local, node))
