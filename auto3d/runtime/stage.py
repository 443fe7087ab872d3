"""One stage as it runs: forward, recomputation and backward of single micro-batches, in any order."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from auto3d.capture.graph import Graph
from auto3d.capture.model import CapturedModel
from auto3d.partition.segment import Segment, segments
from auto3d.partition.stage import Stage
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage_program import segment_program
from auto3d.runtime.weight_gradients import PutOff, add_gradient
from auto3d.runtime.weight_versions import WeightVersions, new_leaf


@dataclass
class _InFlight:
    """What a micro-batch's backward needs from its forward."""

    received: dict[str, torch.Tensor]  # leaves of the stage's autograd graph, of this stage alone
    values: dict[str, torch.Tensor]  # all that segments take: the received, the inputs, and leaves between segments
    found: list[dict[str, torch.Tensor]]  # per segment the buffers that it writes to as it found them, if it runs again
    outputs: list[list[torch.Tensor] | None]  # per segment; None where the forward kept nothing
    apart: dict[int, list[tuple[str, torch.Tensor]]]  # per segment: leaves for weights that other segments use too


class _Segment:
    """One segment as it runs."""

    def __init__(
        self, segment: Segment, module: nn.Module, state: Sequence[str], captured: CapturedModel, apart: Collection[str]
    ) -> None:
        self.kept, self.takes, self.gives = segment.kept, segment.takes, segment.gives
        self._state = state
        self._apart = apart
        self._written = captured.graph.written_buffers.intersection(segment.state)
        self._module = module

    def found(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the buffers that it writes to."""
        return {name: state[name].clone() for name in self._written}

    def run(
        self, state: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[tuple[str, torch.Tensor]]]:
        """What it gives, and the leaf that each use of a weight that is apart has in its autograd graph."""
        taken = [(name, new_leaf(state[name]) if name in self._apart else state[name]) for name in self._state]
        outputs = self._module(*(tensor for _, tensor in taken), *(values[name] for name in self.takes))
        return outputs, [(name, leaf) for name, leaf in taken if name in self._apart]


class StageModule:
    """Runs one stage, one micro-batch at a time.

    ``tensors`` holds at least the stage's state, by name, on ``device``; parameters among them collect gradients in
    their ``.grad``. With ``old_weights`` each micro-batch sees the version of them that ``weights`` has for it, and all
    gradients are added to the ``.grad`` that was there when this was made. A micro-batch's loss
    counts ``loss_weight``, so that the sum over the micro-batches of an update, and over replicas, is the mean.
    A stage that recomputes keeps no more of its forward than the activations of the operations ``kept`` (ranges of
    their positions), what it was given, and what passes between the two; one that splits its backward leaves the
    gradients of its weights to ``backward_weight``.
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
    ) -> None:
        self.stage = stage
        self.sent = list(dict.fromkeys(transfer.value.name for transfer in stage.sent))
        self.losses: dict[int, torch.Tensor] = {}  # micro-batch -> its weighted loss, until it is taken
        self._loss_name = captured.graph.loss if stage.has_loss else None
        self._put_off = PutOff() if split_backward else None
        self.weights = WeightVersions({name: tensors[name] for name in stage.state}, several=old_weights)
        if not recompute:
            kept = [(0, len(captured.graph.nodes))]
        divided = segments(captured.graph, stage, kept)
        users = Counter(name for segment in divided for name in segment.state)
        # Autograd adds up all uses of a weight before it adds them to those of other micro-batches. So must we, or
        # rounding would differ from that without recomputation.
        apart = {name for name, count in users.items() if count > 1 and name in captured.graph.trained}
        self._segments = [
            _Segment(
                segment,
                *segment_program(
                    segment, captured, randomness=randomness, device=device, put_off=self._put_off, apart=apart
                ),
                captured,
                apart,
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
        """Run ``micro_batch``; returns the values to send, contiguous and free of autograd."""
        leaves = {
            transfer.value.name: received[transfer.value.name].detach().requires_grad_(transfer.value.differentiable)
            for transfer in self.stage.received
        }
        in_flight = _InFlight(leaves, {**inputs, **leaves}, [], [], {})
        self._in_flight[micro_batch] = in_flight
        self._randomness.micro_batch = micro_batch
        state = self.weights.of(micro_batch)
        made: dict[str, torch.Tensor] = {}
        for number, segment in enumerate(self._segments):
            in_flight.found.append({} if segment.kept else segment.found(state))
            with nullcontext() if segment.kept else _keeping_nothing():
                outputs, in_flight.apart[number] = segment.run(state, in_flight.values)
            in_flight.outputs.append(outputs if segment.kept else None)
            for name, output in zip(segment.gives, outputs, strict=True):
                made[name] = output.detach()
                if name in self._between:
                    in_flight.values[name] = output.detach().requires_grad_(self._between[name])
        if self.stage.has_loss:
            self.losses[micro_batch] = made[self._loss_name] * self._loss_weight
        return {name: made[name].contiguous() for name in self.sent}

    def recompute(self, micro_batch: int) -> None:
        """Make again what the forward of ``micro_batch`` dropped."""
        for number, segment in enumerate(self._segments):
            if not segment.kept:
                self._run_again(number, micro_batch)

    def backward(self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Run the backward of ``micro_batch``, given each sent value's gradients from the stages that used it.

        Returns the gradient of every received differentiable value, contiguous; of one that has no influence on the
        loss, zeros.
        """
        sent_back = self.backward_input(micro_batch, gradients)
        self.backward_weight(micro_batch)
        return sent_back

    def backward_input(
        self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """As ``backward``, without what a split backward puts off.

        From the last segment to the first: where there was no ``recompute``, each is run again only when the
        activations of those after it are gone.
        """
        in_flight = self._in_flight[micro_batch]
        of_apart: dict[str, torch.Tensor] = {}
        for number in reversed(range(len(self._segments))):
            if in_flight.outputs[number] is None:
                self._run_again(number, micro_batch)
            self._backward_of(number, in_flight, gradients)
            for name, leaf in reversed(in_flight.apart[number]):  # autograd's own order
                if leaf.grad is not None:
                    of_apart[name] = of_apart[name].add_(leaf.grad) if name in of_apart else leaf.grad
        del self._in_flight[micro_batch]
        for name, gradient in of_apart.items():
            add_gradient(gradient, self.weights.of(micro_batch)[name])
        if self._put_off is not None:
            self._weight_work[micro_batch] = self._put_off.take()
        return {
            name: leaf.grad.contiguous() if leaf.grad is not None else torch.zeros_like(leaf)
            for name, leaf in in_flight.received.items()
            if leaf.requires_grad
        }

    @torch.no_grad()
    def backward_weight(self, micro_batch: int) -> None:
        """The gradients that ``backward_input`` of ``micro_batch`` put off; this ends it."""
        for work in self._weight_work.pop(micro_batch, []):
            work()
        self.weights.end(micro_batch)

    def _run_again(self, number: int, micro_batch: int) -> None:
        """Run one segment on the buffers as it found them the first time: the stage's own are not written twice."""
        in_flight = self._in_flight[micro_batch]
        self._randomness.micro_batch = micro_batch
        in_flight.outputs[number], in_flight.apart[number] = self._segments[number].run(
            {**self.weights.of(micro_batch), **in_flight.found[number]}, in_flight.values
        )

    def _backward_of(self, number: int, in_flight: _InFlight, gradients: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Backward through one segment, whose activations are given back."""
        outputs, in_flight.outputs[number] = in_flight.outputs[number], []
        used, output_gradients = [], []
        for name, output in zip(self._segments[number].gives, outputs, strict=True):
            arrived = list(gradients.get(name, ()))
            if name == self._loss_name:
                arrived.append(torch.full_like(output, self._loss_weight))
            if name in self._between and in_flight.values[name].grad is not None:
                arrived.append(in_flight.values[name].grad)
            if arrived and output.requires_grad:
                used.append(output)
                output_gradients.append(sum(arrived[1:], start=arrived[0]))
        if used:
            torch.autograd.backward(used, output_gradients)


def _keeping_nothing() -> AbstractContextManager:
    """Autograd keeps no activations. Yet it is on: without it attention takes another kernel, and rounds otherwise."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: None)


def _has_gradient(graph: Graph, name: str) -> bool:
    return graph.value(name).differentiable and not graph.nodes[graph.producer[name]].from_inputs
