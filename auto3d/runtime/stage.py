"""One stage as it runs: forward, recomputation and backward of single micro-batches, in any order."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from auto3d.capture.specialize import CapturedModel
from auto3d.partition.stage import Stage
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage_program import stage_program
from auto3d.runtime.weight_gradients import PutOff


@dataclass
class _InFlight:
    """What a micro-batch's backward needs from its forward."""

    received: list[torch.Tensor]  # leaves of the stage's autograd graph, of this stage alone
    inputs: list[torch.Tensor]
    written: list[torch.Tensor]  # the buffers that it writes to as it found them, where it must be run again
    outputs: list[torch.Tensor] | None  # None where the forward kept nothing and must be run again


class StageModule:
    """Runs one stage, one micro-batch at a time.

    ``tensors`` holds at least the stage's state, by name, on ``device``; parameters among them collect gradients in
    ``.grad``. A micro-batch's loss counts ``loss_weight``, so that the sum over micro-batches and replicas is the mean.
    A stage that recomputes keeps no more of its forward than what it was given; one that splits its backward leaves
    the gradients of its weights to ``backward_weight``.
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
        split_backward: bool = False,
    ) -> None:
        self.stage = stage
        self.sent = list(dict.fromkeys(transfer.value.name for transfer in stage.sent))
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # weighted sum over an iteration
        self._loss_name = captured.graph.loss if stage.has_loss else None
        self._outputs = list(dict.fromkeys([*self.sent, *([self._loss_name] if stage.has_loss else [])]))
        self._put_off = PutOff() if split_backward else None
        self._module = stage_program(
            stage, captured, self._outputs, randomness=randomness, device=device, put_off=self._put_off
        )
        self._state = [tensors[name] for name in stage.state]
        self._written = [place for place, name in enumerate(stage.state) if name in captured.graph.written_buffers]
        self._loss_weight = loss_weight
        self._randomness = randomness
        self._recompute = recompute
        self._in_flight: dict[int, _InFlight] = {}
        self._weight_work: dict[int, list[Callable[[], None]]] = {}

    def forward(
        self, micro_batch: int, received: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Run ``micro_batch``; returns the values to send, contiguous and free of autograd."""
        in_flight = _InFlight(
            received=[
                received[transfer.value.name].detach().requires_grad_(transfer.value.differentiable)
                for transfer in self.stage.received
            ],
            inputs=[inputs[name] for name in self.stage.inputs],
            written=[self._state[place].clone() for place in self._written] if self._recompute else [],
            outputs=None,
        )
        self._in_flight[micro_batch] = in_flight
        with _keeping_nothing() if self._recompute else nullcontext():
            outputs = self._run(micro_batch, in_flight, self._state)
        if not self._recompute:
            in_flight.outputs = outputs
        if self.stage.has_loss:
            self.loss += outputs[self._outputs.index(self._loss_name)].detach() * self._loss_weight
        return {name: output.detach().contiguous() for name, output in zip(self.sent, outputs, strict=False)}

    def recompute(self, micro_batch: int) -> None:
        """Make again what the forward of ``micro_batch`` dropped, on copies of the buffers that it found."""
        in_flight = self._in_flight[micro_batch]
        state = list(self._state)
        for place, found in zip(self._written, in_flight.written, strict=True):
            state[place] = found
        in_flight.outputs = self._run(micro_batch, in_flight, state)

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
        """As ``backward``, without what a split backward puts off."""
        if self._in_flight[micro_batch].outputs is None:
            self.recompute(micro_batch)
        in_flight = self._in_flight.pop(micro_batch)
        outputs, output_gradients = [], []
        for name, output in zip(self._outputs, in_flight.outputs, strict=True):
            arrived = list(gradients.get(name, ()))
            if name == self._loss_name:
                arrived.append(torch.full_like(output, self._loss_weight))
            if arrived and output.requires_grad:
                outputs.append(output)
                output_gradients.append(sum(arrived[1:], start=arrived[0]))
        if outputs:
            torch.autograd.backward(outputs, output_gradients)
        if self._put_off is not None:
            self._weight_work[micro_batch] = self._put_off.take()
        return {
            transfer.value.name: leaf.grad.contiguous() if leaf.grad is not None else torch.zeros_like(leaf)
            for transfer, leaf in zip(self.stage.received, in_flight.received, strict=True)
            if leaf.requires_grad
        }

    @torch.no_grad()
    def backward_weight(self, micro_batch: int) -> None:
        """The gradients that ``backward_input`` of ``micro_batch`` put off."""
        for work in self._weight_work.pop(micro_batch, []):
            work()

    def _run(self, micro_batch: int, in_flight: _InFlight, state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._randomness.micro_batch = micro_batch
        return self._module(*state, *in_flight.received, *in_flight.inputs)


def _keeping_nothing() -> AbstractContextManager:
    """Autograd keeps no activations. Yet it is on: without it attention takes another kernel, and rounds otherwise."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: None)
