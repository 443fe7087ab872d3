"""The operations of a captured program, with all that holds at every degree of tensor parallelism.

Layers repeat, so most operations are like an earlier operation. Operations that are alike have equal numbers, by which
their rules, their ways to run and the steps of the search for placements are found again.
"""

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx

from auto3d.capture.in_place import is_mutable
from auto3d.capture.model import CapturedModel
from auto3d.capture.nodes import args_of, target_of
from auto3d.tensor.rules import rule_of
from auto3d.tensor.rules.call import Call, Rule


class Numbers(dict[Hashable, int]):
    """Numbers values in the order in which they are first asked for; numbers are quicker to hash."""

    def __missing__(self, value: Hashable) -> int:
        self[value] = number = len(self)
        return number


@dataclass(frozen=True, kw_only=True)
class ProgramOperation:
    """One operation of the program, and the values that are live around it: made or used before, and used later."""

    call: Call
    rule: Rule
    weights: frozenset[fx.Node]
    """Operands of a product, or of a view, that are real state of two dimensions or more, or views of such."""
    operands: tuple[fx.Node, ...]  # without repetitions
    results: tuple[tuple[int, fx.Node], ...]  # used results, with their numbers
    kind: int  # equal for operations that have the same ways if their operands have the same splits
    entering: tuple[bool, ...]  # for each operand that is used the first time, whether it is state
    places: tuple[int, ...]  # places of the operands among the values that are live before, then of entering operands
    others: tuple[int, ...]  # places of the values there that are no operands
    staying: tuple[int, ...]  # numbers of the operands that are used again
    needed: tuple[tuple[int, fx.Node], ...]  # the ``results`` that a later operation uses, or that are the loss
    use: int  # equal for operations of one kind whose operands and results are used again alike
    step: int  # equal for operations of one use at which the same places of live values change
    live: tuple[fx.Node, ...]  # the values that are live after it: others, operands that stay, results


@dataclass(frozen=True, kw_only=True)
class AnalysedProgram:
    """A program by its operations, in order."""

    operations: tuple[ProgramOperation, ...]
    state: Set[str]  # names of the placeholders of parameters and buffers
    from_state: Set[fx.Node]  # state, and what is computed from one tensor of it alone
    tables: Set[fx.Node]  # real state of two dimensions or more, and its views
    of_samples: Set[fx.Node]  # the inputs, and all that depends on them
    weights: Set[fx.Node]  # the weights that any operation has


def analysed(captured: CapturedModel) -> AnalysedProgram:
    """The operations of ``captured``, which keeps the result: each degree needs it."""
    if analysed not in captured.derived:
        exported = captured.exported
        captured.derived[analysed] = analysed_calls(
            calls_of(exported.program, exported.copies),
            state=exported.parameters.keys() | exported.buffers.keys(),
            written={name for name, buffer in exported.buffers.items() if buffer in exported.written_buffers},
            flops={node.name: node.flops for node in captured.graph.nodes},
            loss=exported.loss,
        )
    return captured.derived[analysed]


def analysed_calls(
    calls: Sequence[Call],
    *,
    state: Set[str] = frozenset(),
    written: Set[str] = frozenset(),
    flops: Mapping[str, int] | None = None,
    loss: str = "",
) -> AnalysedProgram:
    """The operations of a program whose ``calls`` these are.

    ``state`` has the placeholders of parameters and buffers, of which operations write to the buffers in ``written``.
    """
    program = calls[0].node.graph
    ruled = ruled_calls(calls)
    kinds, uses, steps = Numbers(), Numbers(), Numbers()
    tables = {node for node in program.find_nodes(op="placeholder") if node.name in state and _is_table(node)}
    from_state: set[fx.Node] = set()
    weights = []
    for ruled_call in ruled:
        call, is_product = ruled_call.call, ruled_call.rule.product
        from_state.update(operand for operand in call.operands if operand.name in state)
        if len(call.operands) == 1 and call.operands[0] in from_state and not is_product:
            from_state.update(call.result_nodes)
        own = tables.intersection(call.operands)
        is_view = len(own) == len(call.operands) == 1 and not is_product
        if is_view:
            tables.update(call.result_nodes)
        weights.append(frozenset(own) if is_view or is_product else frozenset())
    all_weights = frozenset().union(*weights)
    of_samples = made_from_inputs(program, state)
    about: dict[fx.Node, Hashable] = {}

    def value(node: fx.Node) -> Hashable:
        """All about a value that its placements and their costs depend on."""
        if node not in about:
            tensor = node.meta["val"]
            names = node.name in state, node.name in written
            sets = node in from_state, node in tables, node in of_samples, node in all_weights
            about[node] = tensor.shape, tensor.dtype, tensor.requires_grad, *names, *sets
        return about[node]

    last_use: dict[fx.Node, int] = {}
    for number, call in enumerate(calls):
        last_use.update(dict.fromkeys(call.operands, number))
    last_use.update({node: len(calls) for node in program.nodes if node.name == loss})
    live: tuple[fx.Node, ...] = ()
    operations = []
    for number, call in enumerate(calls):
        operands = tuple(dict.fromkeys(call.operands))
        results = tuple([(call.number_of(node), node) for node in call.result_nodes])
        first_used = tuple([node for node in operands if node not in live])
        before = live + first_used
        entering = tuple([node.name in state for node in first_used])
        places = tuple([before.index(node) for node in operands])
        others = tuple([place for place in range(len(before)) if place not in places])
        staying = tuple([place for place, node in enumerate(operands) if last_use[node] > number])
        needed = tuple([(n, node) for n, node in results if last_use.get(node, -1) > number])
        live = (
            *[before[place] for place in others],
            *[operands[place] for place in staying],
            *[node for _, node in needed],
        )
        operand_values = tuple([(value(node), node in weights[number]) for node in operands])
        written_to = is_mutable(call.node) and call.operands[0]
        kind = kinds[
            ruled[number].number,
            (flops or {}).get(call.node.name, 0),
            call.node in of_samples,
            operand_values,
            operands.index(written_to) if written_to else -1,
        ]
        use = uses[kind, staying, tuple([(n, value(node)) for n, node in needed])]
        operations.append(
            ProgramOperation(
                call=call,
                rule=ruled[number].rule,
                weights=weights[number],
                operands=operands,
                results=results,
                kind=kind,
                entering=entering,
                places=places,
                others=others,
                staying=staying,
                needed=needed,
                use=use,
                step=steps[use, entering, places, others],
                live=live,
            )
        )
    return AnalysedProgram(
        operations=tuple(operations),
        state=state,
        from_state=from_state,
        tables=tables,
        of_samples=of_samples,
        weights=all_weights,
    )


@dataclass(frozen=True, kw_only=True)
class RuledCall:
    """A call, its rule, and a number that is equal for calls that are alike."""

    call: Call
    rule: Rule
    number: int


def ruled_calls(calls: Sequence[Call]) -> list[RuledCall]:
    """``calls`` with their rules; a rule is asked once for calls that are alike."""
    numbers = Numbers()
    rules: list[Rule] = []
    ruled = []
    for call in calls:
        number = numbers[call.alike]
        if number == len(rules):
            rules.append(rule_of(call))
        ruled.append(RuledCall(call=call, rule=rules[number], number=number))
    return ruled


def calls_of(program: fx.Graph, copies: Mapping[str, str] | None = None) -> list[Call]:
    """The operations of ``program`` in order; nodes that take one result out of several are none.

    ``copies`` is the field of an ExportedModel; without it, copies are operands like any others.
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
    dependent: set[fx.Node] = set()
    for node in program.nodes:
        if (node.op == "placeholder" and node.name not in state) or not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return dependent


def _is_table(node: fx.Node) -> bool:
    value = node.meta["val"]
    return value.dim() > 1 and value.is_floating_point()
