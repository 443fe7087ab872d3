"""Runs one stage: forward, recomputation and backward of single micro-batches, in any order."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from auto3d.capture.graph import Graph, Value
from auto3d.partition.stage import Stage
from auto3d.runtime.loss_scale import LossScale
from auto3d.runtime.stage.earlier_slices import EarlierSlices
from auto3d.runtime.stage.target_counts import TargetCounts
from auto3d.runtime.weights.gradients import DeferredGradients
from auto3d.runtime.weights.versions import WeightVersions

Tensors = Mapping[str, torch.Tensor]
Gradients = Mapping[str, Sequence[torch.Tensor]]
"""Of each value, the gradients from all stages that used it."""


class Computation(Protocol):
    """What the passes of a stage compute: of whole micro-batches, or of one slice of their sequence."""

    @property
    def targets(self) -> TargetCounts:
        """The targets that the forward has counted."""

    def forward(self, micro_batch: int, state: Tensors, taken: Tensors) -> Tensors:
        """Run ``micro_batch`` on the parameters and buffers ``state``, which the backward needs too.

        ``taken`` has received values and inputs. Returns what it makes, detached from autograd: at least the values
        that the stage sends, the loss and outputs.
        """

    def recompute(self, micro_batch: int) -> None:
        """Compute the activations again that the forward of ``micro_batch`` dropped."""

    def backward(self, micro_batch: int, gradients: Gradients, *, defer_weights: bool) -> dict[str, torch.Tensor]:
        """Run the backward of ``micro_batch``; arguments and result are as in ``StageModule.backward``.

        ``gradients`` has the loss's, too. Work for ``StageModule.backward_weight`` goes to the stage's ``deferred``.
        """


class StageModule:
    """Runs one stage, one micro-batch at a time, by its ``computations``: as many as slices of the sequence.

    Each micro-batch sees the version of the parameters that ``weights`` has for it. It has a ``loss`` if the stage
    computes that: its value times ``loss_weight``, so that the sum over the micro-batches of an update and over
    replicas is the mean. The backward begins with that times ``loss_scale``.

    Operations number the slices of all micro-batches consecutively. The forwards of a micro-batch's slices must come in
    ascending order and their backwards in descending order, after which ``earlier`` forgets it.
    """

    def __init__(
        self,
        stage: Stage,
        computations: Sequence[Computation],
        weights: WeightVersions,
        *,
        loss: str | None = None,
        loss_weight: float = 1.0,
        loss_scale: LossScale | None = None,
        deferred: DeferredGradients | None = None,
        earlier: EarlierSlices | None = None,
    ) -> None:
        self.stage = stage
        self.weights = weights
        self.sent = list(dict.fromkeys(transfer.value.name for transfer in stage.sent))
        self.losses: dict[int, torch.Tensor] = {}  # micro-batch -> its weighted loss, until it is taken
        self.counts: dict[int, dict[int, torch.Tensor]] = {}
        """Micro-batch -> term of the loss -> its number of targets, until they are taken."""
        self._computations = computations
        self._slices = len(computations)
        self._loss = loss
        self._last_loss = torch.tensor(0.0)  # loss of the last forward, like which its gradient is made
        self._loss_weight = loss_weight
        self._loss_scale = loss_scale or LossScale()
        self._deferred = deferred
        self._earlier = earlier or EarlierSlices()
        self._weight_work: dict[int, list[Callable[[], None]]] = {}

    def forward(self, micro_batch: int, received: Tensors, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Run ``micro_batch``; returns the values to send, contiguous and detached from autograd."""
        whole, computation = self._at(micro_batch)
        made = computation.forward(whole, self.weights.of(whole), {**inputs, **received})
        if self._loss is not None:
            self._last_loss = made[self._loss]
            self.losses[micro_batch] = self._last_loss * self._loss_weight
        if counts := computation.targets.take():
            self.counts[micro_batch] = counts
        return {name: (made if name in made else inputs)[name].contiguous() for name in self.sent}

    def set_present(self, fraction: float) -> None:
        """From now on a global batch has this fraction of its samples."""
        for computation in self._computations:
            computation.targets.set_present(fraction)

    def recompute(self, micro_batch: int) -> None:
        """Compute the activations again that the forward of ``micro_batch`` dropped."""
        whole, computation = self._at(micro_batch)
        computation.recompute(whole)

    def backward(
        self, micro_batch: int, gradients: Gradients, *, defer_weights: bool = False
    ) -> dict[str, torch.Tensor]:
        """Run the backward of ``micro_batch``, given the ``gradients`` of the values that it sent.

        Returns the gradient of every received differentiable value, contiguous: zeros if the value does not influence
        the loss. With ``defer_weights``, gradients of weights that can wait are left to ``backward_weight``.
        """
        whole, computation = self._at(micro_batch)
        if self._loss is not None:
            of_loss = torch.full_like(self._last_loss, self._loss_weight * self._loss_scale.value)
            gradients = {**gradients, self._loss: [*gradients.get(self._loss, ()), of_loss]}
        sent_back = computation.backward(whole, gradients, defer_weights=defer_weights)
        if self._deferred is not None:
            self._weight_work[micro_batch] = self._deferred.take()
        if self._slices > 1 and computation is self._computations[0]:
            self._earlier.end()
        if not defer_weights:
            self.backward_weight(micro_batch)
        return sent_back

    def backward_weight(self, micro_batch: int) -> None:
        """Compute the gradients that the backward of ``micro_batch`` deferred; then the micro-batch is done."""
        if work := self._weight_work.pop(micro_batch, None):
            with torch.no_grad():
                for compute in work:
                    compute()
        self.weights.end(micro_batch // self._slices)

    def _at(self, micro_batch: int) -> tuple[int, Computation]:
        """The whole micro-batch of slice ``micro_batch``, and what computes the slice."""
        self._earlier.micro_batch = whole = micro_batch // self._slices
        return whole, self._computations[micro_batch % self._slices]

    def warm_up(self, graph: Graph, device: torch.device) -> None:
        """Run zeros as a micro-batch of ``graph`` on copies of the state, to compile all code. Changes nothing."""

        def zeros(value: Value) -> torch.Tensor:
            return torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=device)

        weights, self.weights = self.weights, self.weights.duplicate()
        received = {transfer.value.name: zeros(transfer.value) for transfer in self.stage.received}
        sent = self.forward(0, received, {name: zeros(graph.inputs[name]) for name in self.stage.inputs})
        differentiable = {transfer.value.name for transfer in self.stage.sent if transfer.value.differentiable}
        self.backward(0, {name: [torch.zeros_like(sent[name])] for name in differentiable})
        self.losses.clear()
        self.counts.clear()
        self.weights = weights
