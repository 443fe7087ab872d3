"""Runs one stage slice by slice of the sequence: a StageModule for each slice, on the same weights."""

from collections.abc import Callable, Mapping, Sequence

import torch

from auto3d.derived.model import Derived
from auto3d.partition.stage import Stage
from auto3d.runtime.earlier_slices import EarlierSlices, SliceOfStage
from auto3d.runtime.stage import StageModule
from auto3d.runtime.stage_program import DerivedProgram


class SlicedStage:
    """Runs one stage of ``model``, one slice of a micro-batch at a time.

    Operations number the slices of all micro-batches consecutively. The forwards of a micro-batch's slices must come in
    ascending order and their backwards in descending order. ``build`` makes the StageModule of a slice from its stage
    and its program.
    """

    def __init__(
        self,
        model: Derived,
        stages: Sequence[Stage],
        build: Callable[[Stage, SliceOfStage], StageModule],
        *,
        of_shard: DerivedProgram | None = None,
    ) -> None:
        """``stages`` has this stage in the program of each slice; ``of_shard`` is the field of SliceOfStage."""
        self.stage = stages[-1]
        self.losses: dict[int, torch.Tensor] = {}  # slice of a micro-batch -> its weighted loss, until it is taken
        self.counts: dict[int, dict[int, torch.Tensor]] = {}
        self._earlier = EarlierSlices()
        self._slices = [
            build(stage, SliceOfStage(model=model, number=number, slices=self._earlier, of_shard=of_shard))
            for number, stage in enumerate(stages)
        ]
        self.weights = self._slices[0].weights
        for each in self._slices:
            each.weights = self.weights

    def forward(
        self, micro_batch: int, received: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Run the slice ``micro_batch``; returns the values to send, contiguous and detached from autograd."""
        own, running = self._of(micro_batch)
        sent = running.forward(own, received, inputs)
        if own in running.losses:
            self.losses[micro_batch] = running.losses.pop(own)
        if own in running.counts:
            self.counts[micro_batch] = running.counts.pop(own)
        return sent

    def recompute(self, micro_batch: int) -> None:
        """Compute the activations again that the forward of the slice dropped."""
        own, running = self._of(micro_batch)
        running.recompute(own)

    def backward(self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Run the backward of the slice; arguments and result are those of ``StageModule.backward``."""
        own, running = self._of(micro_batch)
        sent_back = running.backward(own, gradients)
        self._end_after(running)
        return sent_back

    def backward_input(
        self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """As ``backward``, but without the weight gradients that a split backward defers."""
        own, running = self._of(micro_batch)
        sent_back = running.backward_input(own, gradients)
        self._end_after(running)
        return sent_back

    def backward_weight(self, micro_batch: int) -> None:
        """Compute the gradients that ``backward_input`` of the slice deferred."""
        own, running = self._of(micro_batch)
        running.backward_weight(own)

    def _end_after(self, running: StageModule) -> None:
        """Forget the keys and values of the micro-batch if the backward of its first slice has run."""
        if running is self._slices[0]:
            self._earlier.end()

    def _of(self, micro_batch: int) -> tuple[int, StageModule]:
        """The whole micro-batch, and what runs its slice ``micro_batch``."""
        own, number = divmod(micro_batch, len(self._slices))
        self._earlier.micro_batch = own
        return own, self._slices[number]
