"""Computes the passes of one stage segment by segment: those that keep their activations, and those that run again."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from auto3d.capture.graph import Graph
from auto3d.partition.segment import Segment
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.module import Gradients, Tensors
from auto3d.runtime.stage.out_of_range import out_of_range
from auto3d.runtime.stage.program import ProgramOfStage
from auto3d.runtime.stage.saved_activations import no_saved_activations
from auto3d.runtime.stage.target_counts import TargetCounts
from auto3d.runtime.weights.gradients import add_gradient
from auto3d.runtime.weights.versions import new_leaf

ProgramOf = Callable[..., tuple[fx.GraphModule, list[str], list[str]]]
"""``segment_program`` of a stage, but for the segment and ``per_user``."""


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of a tensor that several segments use. It has its own ``leaf``, whose gradient belongs to ``of``."""

    leaf: torch.Tensor
    of: torch.Tensor


@dataclass
class _InFlight:
    """What the backward of one micro-batch needs from its forward."""

    state: Tensors
    received: dict[str, torch.Tensor]  # received values, as leaves of this stage's autograd graph
    values: dict[str, torch.Tensor]  # everything that segments take: received values, inputs, leaves between segments
    old_buffers: list[dict[str, torch.Tensor]]  # per segment that runs again: copies of the buffers that it writes to
    outputs: list[list[torch.Tensor] | None]  # per segment; None where the forward kept nothing
    weights: dict[str, torch.Tensor]  # for each weight that several segments use, a leaf of this micro-batch only
    uses: dict[int, list[_Use]]  # per segment


class _Segment:
    """Runs one segment by its ``program``; each use of a tensor in ``per_use`` gets its own leaf."""

    def __init__(
        self, segment: Segment, written: Collection[str], per_use: Collection[str], program: Any, whole: fx.Graph
    ) -> None:
        self.kept, self.takes, self.gives = segment.kept, segment.takes, segment.gives
        self._written = [name for name in segment.state if name in written]
        self._per_use = per_use
        self._module, self._state, self._values = program
        self._whole = whole

    def copy_buffers(self, state: Tensors) -> dict[str, torch.Tensor]:
        """Copies of the buffers that the segment writes to."""
        return {name: state[name].clone() for name in self._written}

    def run(self, state: Tensors, values: Tensors) -> tuple[list[torch.Tensor], list[_Use]]:
        """The values that it gives, and its uses of the tensors that get a leaf per use, in order.

        Raises InputError for whole numbers that an operation cannot take, on a CPU: a GPU says so later.
        """
        try:
            if self._per_use:
                return self._run_with_leaves(state, values)
            run = self._module.forward  # a call of the module itself would look for hooks, which it has none of
            return run(*map(state.__getitem__, self._state), *map(values.__getitem__, self._values)), []
        except IndexError as error:
            arguments = [*map(state.__getitem__, self._state), *map(values.__getitem__, self._values)]
            why = out_of_range(self._module, arguments, [*self._state, *self._values], self._whole)
            if why is None:
                raise
            raise why from error

    def _run_with_leaves(self, state: Tensors, values: Tensors) -> tuple[list[torch.Tensor], list[_Use]]:
        uses: list[_Use] = []

        def argument(tensor: torch.Tensor, name: str) -> torch.Tensor:
            if name not in self._per_use or not tensor.requires_grad:
                return tensor
            uses.append(_Use(leaf=new_leaf(tensor), of=tensor))
            return uses[-1].leaf

        from_state = [argument(state[name], name) for name in self._state]
        from_values = (argument(values[name], name) for name in self._values)
        return self._module.forward(*from_state, *from_values), uses


class SegmentComputation:
    """The Computation of a stage that is ``divided`` into segments, whose modules ``program_of`` makes.

    A segment that is not kept keeps only what it takes, and runs again for the backward. Under ``torch.no_grad`` a
    forward keeps nothing, for no backward follows.
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
        stage, graph, whole = program.stage, program.captured.graph, program.captured.exported.program
        self._received = [(transfer.value.name, transfer.value.differentiable) for transfer in stage.received]
        users = Counter(name for segment in divided for name in {*segment.state, *segment.takes})
        self._common_weights = [n for n, count in users.items() if count > 1 and n in graph.trained]
        # Without segments, autograd adds the gradients of all uses of a tensor in one fixed order. Gradients of uses in
        # several segments are therefore added in that order; otherwise recomputation would change rounding.
        per_use = {*self._common_weights, *(name for segment in divided for name in segment.takes)}
        if len(divided) == 1:
            per_use = set()
        self._segments = [
            _Segment(segment, graph.written_buffers, per_use, program_of(segment, per_user=per_use), whole)
            for segment in divided
        ]
        self._taken = {name for segment in divided for name in segment.takes}  # other inputs it only sends onward
        between = {name for segment in divided for name in segment.gives}
        self._between = {  # value that passes between segments -> whether it has a gradient
            name: _has_gradient(graph, name) for segment in divided for name in segment.takes if name in between
        }
        self._randomness = randomness
        self._in_flight: dict[int, _InFlight] = {}

    def forward(self, micro_batch: int, state: Tensors, taken: Tensors) -> Tensors:
        leaves = {name: taken[name].detach().requires_grad_(follows) for name, follows in self._received}
        weights = {name: new_leaf(state[name]) for name in self._common_weights}
        values = {name: tensor for name, tensor in {**taken, **leaves}.items() if name in self._taken}
        in_flight = _InFlight(state, leaves, values, [], [], weights, {})
        if torch.is_grad_enabled():
            self._in_flight[micro_batch] = in_flight
        self._randomness.micro_batch = micro_batch
        made: dict[str, torch.Tensor] = {}
        for number, segment in enumerate(self._segments):
            in_flight.old_buffers.append({} if segment.kept else segment.copy_buffers(state))
            own = {**state, **weights} if weights else state
            with nullcontext() if segment.kept else no_saved_activations():
                outputs, in_flight.uses[number] = segment.run(own, in_flight.values)
            in_flight.outputs.append(outputs if segment.kept else None)
            for name, output in zip(segment.gives, outputs, strict=True):
                made[name] = output.detach()
                if name in self._between:
                    in_flight.values[name] = output.detach().requires_grad_(self._between[name])
        return made

    def recompute(self, micro_batch: int) -> None:
        for number, segment in enumerate(self._segments):
            if not segment.kept:
                self._run_again(number, micro_batch)

    def backward(self, micro_batch: int, gradients: Gradients, *, defer_weights: bool) -> dict[str, torch.Tensor]:
        """It goes from the last segment to the first. If ``recompute`` was not called before, it recomputes each
        segment only when the activations of the later segments have been freed.
        """
        in_flight = self._in_flight[micro_batch]
        for name in self._between:
            if gradients.get(name):  # gradients from other stages come before gradients of this stage's own uses
                in_flight.values[name].grad = sum(gradients[name][1:], start=gradients[name][0])
        for number in reversed(range(len(self._segments))):
            if in_flight.outputs[number] is None:
                self._run_again(number, micro_batch)
            self._backward_of(number, in_flight, gradients)
            for use in reversed(in_flight.uses.pop(number)):
                if use.leaf.grad is not None:
                    add_gradient(use.leaf.grad, use.of)
        del self._in_flight[micro_batch]
        for name, leaf in in_flight.weights.items():
            if leaf.grad is not None:
                add_gradient(leaf.grad, in_flight.state[name])
        return {
            name: leaf.grad.contiguous() if leaf.grad is not None else torch.zeros_like(leaf)
            for name, leaf in in_flight.received.items()
            if leaf.requires_grad
        }

    def _run_again(self, number: int, micro_batch: int) -> None:
        """Run one segment again, on copies of the buffers from before its first run, so none is written twice."""
        in_flight = self._in_flight[micro_batch]
        self._randomness.micro_batch = micro_batch
        state = {**in_flight.state, **in_flight.weights, **in_flight.old_buffers[number]}
        in_flight.outputs[number], in_flight.uses[number] = self._segments[number].run(state, in_flight.values)

    def _backward_of(self, number: int, in_flight: _InFlight, gradients: Gradients) -> None:
        """Run the backward of one segment and free its activations."""
        outputs, in_flight.outputs[number] = in_flight.outputs[number], []
        assert outputs is not None  # the forward kept them, or the segment has been run again
        used, output_gradients = [], []
        for name, output in zip(self._segments[number].gives, outputs, strict=True):
            if name in self._between:
                gradient = in_flight.values[name].grad  # this already includes gradients from other stages
                arrived: Sequence[torch.Tensor] = () if gradient is None else (gradient,)
            else:
                arrived = gradients.get(name, ())
            if arrived and output.requires_grad:
                used.append(output)
                output_gradients.append(sum(arrived[1:], start=arrived[0]))
        if used:
            torch.autograd.backward(used, output_gradients)


def _has_gradient(graph: Graph, name: str) -> bool:
    return graph.value(name).differentiable and not graph.nodes[graph.producer[name]].from_inputs
