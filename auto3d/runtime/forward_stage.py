"""Runs one stage of an evaluation: forwards that keep nothing for a backward."""

from collections.abc import Mapping, Sequence

import torch

from auto3d.capture.loss_terms import TargetTerm
from auto3d.capture.model import CapturedModel
from auto3d.partition.segment import segments
from auto3d.partition.stage import Stage
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage_program import DerivedProgram, segment_program
from auto3d.runtime.target_counts import TargetCounts


class ForwardStage:
    """Runs ``stage`` of ``captured`` on ``state``, by name on ``device``, without gradients.

    ``kept`` names values that ``forward`` returns besides those to send: the loss and outputs. If ``captured`` is the
    program of a tensor-parallel rank, ``derived`` runs its collectives. ``targets`` counts the targets of ``terms``.
    """

    def __init__(
        self,
        stage: Stage,
        captured: CapturedModel,
        *,
        kept: set[str],
        randomness: Randomness,
        device: torch.device,
        derived: DerivedProgram | None,
        terms: Sequence[TargetTerm] = (),
    ) -> None:
        self.stage = stage
        self._kept = kept
        self._sent = {transfer.value.name for transfer in stage.sent}
        self._randomness = randomness
        self.targets = TargetCounts(terms)
        (segment,) = segments(captured.graph, stage, [(0, len(captured.graph.nodes))])
        self._gives = segment.gives
        self._module, self._state, self._takes = segment_program(
            segment,
            captured,
            randomness=randomness,
            device=device,
            deferred=None,
            derived=derived,
            targets=self.targets,
        )

    @torch.no_grad()
    def forward(
        self,
        micro_batch: int,
        state: Mapping[str, torch.Tensor],
        received: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Run ``micro_batch``; returns the values to send, contiguous, and those that are kept."""
        self._randomness.micro_batch = micro_batch
        values = {**inputs, **received}
        results = self._module(*(state[name] for name in self._state), *(values[name] for name in self._takes))
        made = dict(zip(self._gives, results, strict=True))
        sent = {name: value.contiguous() for name, value in {**inputs, **made}.items() if name in self._sent}
        return sent, {name: value for name, value in made.items() if name in self._kept}
