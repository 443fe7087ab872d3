"""Runs one stage: forward, recomputation and backward of single micro-batches, in any order."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from auto3d.capture.graph import Graph
from auto3d.capture.loss_terms import ScaledTerm, TargetTerm
from auto3d.capture.model import CapturedModel
from auto3d.partition.segment import Segment, segments
from auto3d.partition.stage import Stage
from auto3d.runtime.loss_scale import LossScale
from auto3d.runtime.low_precision import copies_of, used_once
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage_program import DerivedProgram, segment_program
from auto3d.runtime.target_counts import TargetCounts
from auto3d.runtime.weight_gradients import DeferredGradients, add_gradient
from auto3d.runtime.weight_versions import WeightVersions, new_leaf


class RunnableStage(Protocol):
    """What an executor runs: a StageModule, or what stands in for one."""

    stage: Stage
    losses: dict[int, torch.Tensor]  # micro-batch -> its weighted loss, until it is taken
    counts: dict[int, dict[int, torch.Tensor]]  # micro-batch -> term of the loss -> its targets, until they are taken
    weights: WeightVersions

    def forward(
        self, micro_batch: int, received: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]: ...

    def recompute(self, micro_batch: int) -> None: ...

    def backward(
        self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor]: ...

    def backward_input(
        self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor]: ...

    def backward_weight(self, micro_batch: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of a tensor that several segments use. It has its own ``leaf``, whose gradient belongs to ``of``."""

    leaf: torch.Tensor
    of: torch.Tensor


@dataclass
class _InFlight:
    """What the backward of one micro-batch needs from its forward."""

    received: dict[str, torch.Tensor]  # received values, as leaves of this stage's autograd graph
    values: dict[str, torch.Tensor]  # everything that segments take: received values, inputs, leaves between segments
    old_buffers: list[dict[str, torch.Tensor]]  # per segment that runs again: copies of the buffers that it writes to
    outputs: list[list[torch.Tensor] | None]  # per segment; None where the forward kept nothing
    weights: dict[str, torch.Tensor]  # for each weight that several segments use, a leaf of this micro-batch only
    uses: dict[int, list[_Use]]  # per segment


class _Segment:
    """Runs one segment by its ``program``; each use of a tensor in ``per_use`` gets its own leaf."""

    def __init__(
        self,
        segment: Segment,
        captured: CapturedModel,
        per_use: Collection[str],
        program: tuple[nn.Module, Sequence[str], Sequence[str]],
    ) -> None:
        self.kept, self.takes, self.gives = segment.kept, segment.takes, segment.gives
        self._written = captured.graph.written_buffers.intersection(segment.state)
        self._per_use = per_use
        self._module, self._state, self._values = program

    def copy_buffers(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the buffers that the segment writes to."""
        return {name: state[name].clone() for name in self._written}

    def run(
        self, state: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[_Use]]:
        """The values that it gives, and its uses of the tensors that get a leaf per use, in order."""
        uses: list[_Use] = []

        def argument(tensor: torch.Tensor, name: str) -> torch.Tensor:
            if name not in self._per_use or not tensor.requires_grad:
                return tensor
            uses.append(_Use(leaf=new_leaf(tensor), of=tensor))
            return uses[-1].leaf

        from_state = [argument(state[name], name) for name in self._state]
        return self._module(*from_state, *(argument(values[name], name) for name in self._values)), uses


class StageModule:
    """Runs one stage, one micro-batch at a time.

    ``tensors`` contains the stage's state by name, on ``device``; the parameters collect gradients in their ``.grad``.
    With ``old_weights`` each micro-batch sees the version of the parameters that ``weights`` has for it, and all
    gradients are added to the ``.grad`` that existed when the StageModule was made. A micro-batch's loss is multiplied
    by ``loss_weight``, so that its sum over the micro-batches of an update and over replicas is the mean. Those of the
    ``terms`` of the loss that the stage computes are weighted by their number of targets, which ``counts`` has. The
    backward begins with the loss times ``loss_scale``.

    A stage with ``recompute`` keeps only the activations of the operations in ``kept`` (ranges of positions), its
    inputs and received values, and the values that pass between kept and dropped operations. With ``split_backward``
    the gradients of weights are left to ``backward_weight``. If ``captured`` is the program of a tensor-parallel rank
    or of a slice of the sequence, ``derived`` runs its further operators.
    """

    def __init__(
        self,
        stage: Stage,
        captured: CapturedModel,
        tensors: Mapping[str, torch.Tensor],
        *,
        loss_weight: float,
        randomness: Randomness,
        device: torch.device,
        recompute: bool = False,
        kept: Sequence[tuple[int, int]] = (),
        split_backward: bool = False,
        old_weights: bool = False,
        derived: DerivedProgram | None = None,
        terms: Sequence[TargetTerm | ScaledTerm] = (),
        loss_scale: LossScale | None = None,
        compile: bool = False,
    ) -> None:
        self.stage = stage
        self._graph = captured.graph
        self.sent = list(dict.fromkeys(transfer.value.name for transfer in stage.sent))
        self._read_for_others = [name for name in self.sent if name in stage.inputs]
        self.losses: dict[int, torch.Tensor] = {}  # micro-batch -> its weighted loss, until it is taken
        self.counts: dict[int, dict[int, torch.Tensor]] = {}
        self._targets = TargetCounts(terms)
        self._loss_scale = loss_scale or LossScale()
        self._loss_name = captured.graph.loss if stage.has_loss else None
        self._deferred = DeferredGradients() if split_backward else None
        leaf_copies = set() if split_backward else used_once(captured, frozenset(stage.nodes))
        self.weights = WeightVersions(
            {name: tensors[name] for name in stage.state},
            several=old_weights,
            copies=copies_of(captured, frozenset(stage.nodes)),
            leaf_copies=leaf_copies,
        )
        if not recompute:
            kept = [(0, len(captured.graph.nodes))]
        divided = segments(captured.graph, stage, kept)
        users = Counter(name for segment in divided for name in {*segment.state, *segment.takes})
        self._common_weights = [n for n, count in users.items() if count > 1 and n in captured.graph.trained]
        # Without segments, autograd adds the gradients of all uses of a tensor in one fixed order. Gradients of uses in
        # several segments are therefore added one by one in that order; otherwise recomputation would change rounding.
        per_use = {*self._common_weights, *(name for segment in divided for name in segment.takes)}
        if len(divided) == 1:
            per_use = set()
        self._segments = [
            _Segment(
                segment,
                captured,
                per_use,
                segment_program(
                    segment,
                    captured,
                    randomness=randomness,
                    device=device,
                    deferred=self._deferred,
                    per_user=per_use,
                    derived=derived,
                    targets=self._targets,
                    compile=compile,
                    leaf_copies=leaf_copies,
                ),
            )
            for segment in divided
        ]
        between = {name for segment in self._segments for name in segment.gives}
        self._between = {  # value that passes between segments -> whether it has a gradient
            name: _has_gradient(captured.graph, name)
            for segment in self._segments
            for name in segment.takes
            if name in between
        }
        self._loss_weight = loss_weight
        self._randomness = randomness
        self._in_flight: dict[int, _InFlight] = {}
        self._weight_work: dict[int, list[Callable[[], None]]] = {}

    def forward(
        self, micro_batch: int, received: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Run ``micro_batch``; returns the values to send, contiguous and detached from autograd."""
        leaves = {
            transfer.value.name: received[transfer.value.name].detach().requires_grad_(transfer.value.differentiable)
            for transfer in self.stage.received
        }
        state = self.weights.of(micro_batch)
        weights = {name: new_leaf(state[name]) for name in self._common_weights}
        in_flight = _InFlight(leaves, {**inputs, **leaves}, [], [], weights, {})
        self._in_flight[micro_batch] = in_flight
        self._randomness.micro_batch = micro_batch
        made: dict[str, torch.Tensor] = {}
        for number, segment in enumerate(self._segments):
            in_flight.old_buffers.append({} if segment.kept else segment.copy_buffers(state))
            with nullcontext() if segment.kept else no_saved_activations():
                outputs, in_flight.uses[number] = segment.run({**state, **weights}, in_flight.values)
            in_flight.outputs.append(outputs if segment.kept else None)
            for name, output in zip(segment.gives, outputs, strict=True):
                made[name] = output.detach()
                if name in self._between:
                    in_flight.values[name] = output.detach().requires_grad_(self._between[name])
        if self._loss_name is not None:
            self.losses[micro_batch] = made[self._loss_name] * self._loss_weight
        if counts := self._targets.take():
            self.counts[micro_batch] = counts
        for name in self._read_for_others:
            made[name] = inputs[name]
        return {name: made[name].contiguous() for name in self.sent}

    def warm_up(self, device: torch.device) -> None:
        """Run a micro-batch of zeros on copies of the state, so that all code is compiled. Changes nothing."""

        def zeros(name: str) -> torch.Tensor:
            value = self._graph.inputs[name] if name in self._graph.inputs else self._graph.value(name)
            return torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=device)

        weights, self.weights = self.weights, self.weights.duplicate()
        received = {transfer.value.name: zeros(transfer.value.name) for transfer in self.stage.received}
        sent = self.forward(0, received, {name: zeros(name) for name in self.stage.inputs})
        differentiable = {transfer.value.name for transfer in self.stage.sent if transfer.value.differentiable}
        self.backward(0, {name: [torch.zeros_like(sent[name])] for name in differentiable})
        self.losses.clear()
        self.counts.clear()
        self.weights = weights

    def recompute(self, micro_batch: int) -> None:
        """Compute the activations again that the forward of ``micro_batch`` dropped."""
        for number, segment in enumerate(self._segments):
            if not segment.kept:
                self._run_again(number, micro_batch)

    def backward(self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Run the backward of ``micro_batch``; ``gradients`` has those of each sent value from all stages that used it.

        Returns the gradient of every received differentiable value, contiguous: zeros if the value does not influence
        the loss.
        """
        sent_back = self.backward_input(micro_batch, gradients)
        self.backward_weight(micro_batch)
        return sent_back

    def backward_input(
        self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """As ``backward``, but without the weight gradients that a split backward defers.

        It goes from the last segment to the first. If ``recompute`` was not called before, it recomputes each segment
        only when the activations of the later ones have been freed.
        """
        in_flight = self._in_flight[micro_batch]
        for name in self._between:
            if gradients.get(name):  # gradients from other stages come before those of this stage's own uses
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
                add_gradient(leaf.grad, self.weights.of(micro_batch)[name])
        if self._deferred is not None:
            self._weight_work[micro_batch] = self._deferred.take()
        return {
            name: leaf.grad.contiguous() if leaf.grad is not None else torch.zeros_like(leaf)
            for name, leaf in in_flight.received.items()
            if leaf.requires_grad
        }

    @torch.no_grad()
    def backward_weight(self, micro_batch: int) -> None:
        """Compute the gradients that ``backward_input`` of ``micro_batch`` deferred; then the micro-batch is done."""
        for work in self._weight_work.pop(micro_batch, []):
            work()
        self.weights.end(micro_batch)

    def _run_again(self, number: int, micro_batch: int) -> None:
        """Run one segment again, on copies of the buffers from before its first run, so none is written twice."""
        in_flight = self._in_flight[micro_batch]
        self._randomness.micro_batch = micro_batch
        state = {**self.weights.of(micro_batch), **in_flight.weights, **in_flight.old_buffers[number]}
        in_flight.outputs[number], in_flight.uses[number] = self._segments[number].run(state, in_flight.values)

    def _backward_of(self, number: int, in_flight: _InFlight, gradients: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Run the backward of one segment and free its activations."""
        outputs, in_flight.outputs[number] = in_flight.outputs[number], []
        assert outputs is not None  # the forward kept them, or the segment has been run again
        used, output_gradients = [], []
        for name, output in zip(self._segments[number].gives, outputs, strict=True):
            if name in self._between:
                gradient = in_flight.values[name].grad  # this already includes gradients from other stages
                arrived = [] if gradient is None else [gradient]
            else:
                arrived = list(gradients.get(name, ()))
            if name == self._loss_name:
                arrived.append(torch.full_like(output, self._loss_weight * self._loss_scale.value))
            if arrived and output.requires_grad:
                used.append(output)
                output_gradients.append(sum(arrived[1:], start=arrived[0]))
        if used:
            torch.autograd.backward(used, output_gradients)


def no_saved_activations() -> AbstractContextManager:
    """Autograd is on but saves no activations.

    It is on because attention would take another kernel without it, and round differently.
    """
    return torch.autograd.graph.saved_tensors_hooks(_drop, _drop)


def _drop(tensor: Any) -> Any:
    """None, in the place of ``tensor``."""
    return None


def _has_gradient(graph: Graph, name: str) -> bool:
    return graph.value(name).differentiable and not graph.nodes[graph.producer[name]].from_inputs
