"""Computes micro-batches in two halves: the collectives of one run under the computation of the other.

Autograd runs the backward of operations in the opposite order of their forward. Turns change at other collectives in
the backward than in the forward (partition/turns.py), so the pieces of a stage are separate autograd graphs, which run
in an order of their own in each direction.
"""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx.graph import _BoxedCodeGen

from auto3d.capture.nodes import args_of
from auto3d.conversions import conversion_of
from auto3d.partition.segment import Segment
from auto3d.partition.turns import Handover, Turn, turns, values_with_gradient
from auto3d.runtime.messages.tensor_group import Action, Pending, TensorParallelRank, backward_action, forward_action
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.fast_calls import apply_of
from auto3d.runtime.stage.module import Gradients, Tensors
from auto3d.runtime.stage.program import ProgramOfStage
from auto3d.runtime.stage.saved_activations import no_saved_activations
from auto3d.runtime.stage.segment_computation import ProgramOf
from auto3d.runtime.stage.target_counts import TargetCounts
from auto3d.tensor.collectives import split_of


class _Values:
    """Values, or gradients, by name. One that a collective makes is awaited when it is first taken."""

    def __init__(self, values: Tensors) -> None:
        self._values: dict[str, torch.Tensor | Pending] = dict(values)

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self._values[name]
        if not isinstance(value, torch.Tensor):
            value = self._values[name] = value().detach()
        return value

    def __setitem__(self, name: str, value: torch.Tensor | Pending) -> None:
        self._values[name] = value

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._values.pop(name, None)


class _Gradients:
    """Gradients by name, each the sum of what the users of the value gave, in their order."""

    def __init__(self) -> None:
        self._given: dict[str, list[torch.Tensor | Pending]] = {}

    def add(self, name: str, gradient: torch.Tensor | Pending) -> None:
        self._given.setdefault(name, []).append(gradient)

    def take(self, name: str) -> torch.Tensor | None:
        """The gradient of the value ``name``, which is then forgotten; None if it has none."""
        given = [
            gradient if isinstance(gradient, torch.Tensor) else gradient() for gradient in self._given.pop(name, ())
        ]
        return sum(given[1:], start=given[0]) if given else None


class _Enter(torch.autograd.Function):
    """A value on its way into a piece. In the backward its gradient leaves the piece here.

    A leaf in its place would keep the value in memory until the backward, even where no operation needs it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, name: str, gradients: _Gradients) -> torch.Tensor:
        ctx.name, ctx.gradients = name, gradients
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        ctx.gradients.add(ctx.name, gradient)
        return None, None, None, None


_enter = apply_of(_Enter)


@dataclass(frozen=True, kw_only=True)
class _RunnablePiece:
    """A piece with its module, which takes a list of ``state`` and then ``takes``, and empties it.

    So a value is freed at its last use in the module, as in the program of a whole micro-batch.
    """

    module: nn.Module
    state: Sequence[str]
    takes: Sequence[str]
    gives: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class _RunnableHandover:
    """A conversion; ``forward`` and ``backward`` begin its collectives."""

    forward: Action
    backward: Action
    takes: Sequence[str]
    gives: Sequence[str]


_RunnableTurn = _RunnablePiece | _RunnableHandover


@dataclass(frozen=True, kw_only=True)
class _RunnableSegment:
    """The turns of one segment in both directions, and the values that nothing uses after each turn of the forward."""

    kept: bool
    takes: Sequence[str]
    forward: Sequence[_RunnableTurn]
    backward: Sequence[_RunnableTurn]
    unused: Sequence[Sequence[str]]
    unused_again: Sequence[Sequence[str]]  # the same for a recomputation, after which nothing uses what it gives


@dataclass
class _HalvesInFlight:
    """What the backward of one micro-batch needs from its forward."""

    state: Tensors
    gradients: _Gradients = field(default_factory=_Gradients)
    taken: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # per segment that runs again: its inputs
    made: dict[int, list[tuple[str, GradientEdge]]] = field(default_factory=dict)  # per piece, by its id


class HalvesComputation:
    """The Computation of a stage of the program of a tensor-parallel rank in halves.

    Each half runs in turns with the other, in the forward, the backward and recomputation. A collective begins when its
    value is complete, and is awaited when its result is first needed. ``program_of`` makes the modules of the pieces of
    the segments ``divided``.
    """

    def __init__(
        self,
        program: ProgramOfStage,
        divided: Sequence[Segment],
        program_of: ProgramOf,
        *,
        randomness: Randomness,
        targets: TargetCounts,
    ) -> None:
        self.targets = targets
        stage, captured, rank = program.stage, program.captured, program.derived
        assert isinstance(rank, TensorParallelRank)
        self._received = [transfer.value.name for transfer in stage.received if transfer.value.differentiable]
        self._randomness = randomness
        nodes = {node.name: node for node in captured.exported.program.nodes}
        self._with_gradient = values_with_gradient(captured.exported.program)
        self._value_of = {name: node.meta.get("val") for name, node in nodes.items()}
        self._anchor = torch.zeros((), requires_grad=True)
        self._in_flight: dict[int, _HalvesInFlight] = {}

        def runnable(turn: Turn) -> _RunnableTurn:
            if isinstance(turn, Handover):
                node = nodes[turn.node]
                conversion = conversion_of(node.target)
                assert conversion is not None
                how = (conversion, split_of(args_of(node)), rank.group)
                return _RunnableHandover(
                    forward=forward_action(*how, turn.node),
                    backward=backward_action(*how, f"the gradient of {turn.node}"),
                    takes=[turn.takes],
                    gives=[turn.node],
                )
            module, state, takes = program_of(turn.segment)
            module.graph.set_codegen(_BoxedCodeGen())
            module.recompile()
            return _RunnablePiece(module=module, state=state, takes=takes, gives=turn.segment.gives)

        all_turns = turns(captured, divided, rank.model.half_of)
        made = [{id(turn): runnable(turn) for turn in segment_turns.forward} for segment_turns in all_turns]
        forward = [list(runnables.values()) for runnables in made]
        sent = (transfer.value.name for transfer in stage.sent)
        self._gives = list(dict.fromkeys([*([captured.graph.loss] if stage.has_loss else []), *sent]))
        held = set(self._gives)
        held.update(
            name
            for segment_turns in all_turns
            if not segment_turns.segment.kept
            for name in segment_turns.segment.takes
        )
        unused = _unused([turn for segment_forward in forward for turn in segment_forward], held)
        self._segments = []
        for segment_turns, runnables, turns_forward in zip(all_turns, made, forward, strict=True):
            count = len(turns_forward)
            self._segments.append(
                _RunnableSegment(
                    kept=segment_turns.segment.kept,
                    takes=segment_turns.segment.takes,
                    forward=turns_forward,
                    backward=[runnables[id(turn)] for turn in segment_turns.backward],
                    unused=unused[:count],
                    unused_again=_unused(turns_forward, set()),
                )
            )
            unused = unused[count:]

    def forward(self, micro_batch: int, state: Tensors, taken: Tensors) -> Tensors:
        in_flight = self._in_flight[micro_batch] = _HalvesInFlight(state)
        self._randomness.micro_batch = micro_batch
        values = _Values(taken)
        for number, segment in enumerate(self._segments):
            with nullcontext() if segment.kept else no_saved_activations():
                self._run(segment, in_flight, values, segment.unused, keep=segment.kept)
            if not segment.kept:
                in_flight.taken[number] = {name: values[name] for name in segment.takes}
        return {name: values[name] for name in self._gives}

    def recompute(self, micro_batch: int) -> None:
        for number in range(len(self._segments)):
            self._run_again(number, micro_batch)

    def backward(self, micro_batch: int, gradients: Gradients, *, defer_weights: bool) -> dict[str, torch.Tensor]:
        """It goes from the last segment to the first. If ``recompute`` was not called before, it recomputes each
        segment only when the activations of the later segments have been freed.
        """
        in_flight = self._in_flight[micro_batch]
        given = in_flight.gradients
        for name, arrived in gradients.items():
            for gradient in arrived:
                given.add(name, gradient)
        for number in reversed(range(len(self._segments))):
            self._run_again(number, micro_batch)
            for turn in self._segments[number].backward:
                if isinstance(turn, _RunnablePiece):
                    _backward_of(in_flight.made.pop(id(turn)), given)
                elif (of_result := given.take(turn.gives[0])) is not None:
                    given.add(turn.takes[0], turn.backward(of_result))
        del self._in_flight[micro_batch]
        sent_back = {}
        for name in self._received:
            of_value, like = given.take(name), self._value_of[name]
            if of_value is None:
                of_value = torch.zeros(like.shape, dtype=like.dtype, device=self._randomness.device)
            sent_back[name] = of_value.contiguous()
        return sent_back

    def _run_again(self, number: int, micro_batch: int) -> None:
        """Run a segment again unless its activations are here."""
        segment, in_flight = self._segments[number], self._in_flight[micro_batch]
        if not segment.kept and number in in_flight.taken:
            self._randomness.micro_batch = micro_batch
            values = _Values(in_flight.taken.pop(number))
            self._run(segment, in_flight, values, segment.unused_again, keep=True)

    def _run(
        self,
        segment: _RunnableSegment,
        in_flight: _HalvesInFlight,
        values: _Values,
        unused: Sequence[Sequence[str]],
        *,
        keep: bool,
    ) -> None:
        """Run the forward of ``segment`` on ``values``, which get those that it gives."""

        def entering(name: str) -> torch.Tensor:
            if name not in self._with_gradient:
                return values[name]
            return _enter(self._anchor, values[name], name, in_flight.gradients)

        for turn, names in zip(segment.forward, unused, strict=True):
            if isinstance(turn, _RunnableHandover):
                values[turn.gives[0]] = turn.forward(values[turn.takes[0]])
            else:
                arguments = [*(in_flight.state[name] for name in turn.state), *map(entering, turn.takes)]
                values.drop([name for name in names if name in turn.takes])
                outputs = turn.module(arguments)
                if keep:
                    in_flight.made[id(turn)] = [
                        (name, get_gradient_edge(output))
                        for name, output in zip(turn.gives, outputs, strict=True)
                        if output.requires_grad
                    ]
                for name in reversed(turn.gives):
                    values[name] = outputs.pop().detach()
            values.drop(names)


def _backward_of(made: Sequence[tuple[str, GradientEdge]], gradients: _Gradients) -> None:
    """Run the backward of a piece, which frees its activations."""
    edges, given = [], []
    for name, edge in made:
        gradient = gradients.take(name)
        if gradient is not None:
            edges.append(edge)
            given.append(gradient)
    if edges:
        torch.autograd.backward(edges, given)


def _unused(forward: Sequence[_RunnableTurn], held: Collection[str]) -> list[list[str]]:
    """For each of the turns ``forward``, the values that no later turn takes; those in ``held`` stay."""
    last = {name: number for number, turn in enumerate(forward) for name in (*turn.gives, *turn.takes)}
    unused: list[list[str]] = [[] for _ in forward]
    for name, number in last.items():
        if name not in held:
            unused[number].append(name)
    return unused
