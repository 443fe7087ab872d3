"""The loss of an evaluation: the mean over the targets, or over the samples, of all its micro-batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isclose

import torch
import torch.distributed as dist
from torch import fx

from auto3d.capture.export import ExportedModel
from auto3d.errors import InputError
from auto3d.runtime.layout import RankLayout
from auto3d.runtime.settings import SUMMED_ITEMS
from auto3d.runtime.waiting import waiting_for


@dataclass(frozen=True, kw_only=True)
class ForwardLoss:
    """What the last stage has of one micro-batch."""

    loss: torch.Tensor  # each term that counts targets times the fraction of its places that they fill
    counts: Mapping[int, torch.Tensor]  # number of such a term -> number of its targets
    padding_counts: torch.Tensor | None  # whether a target of a sample beyond the evaluation's last sample counts


class EvaluationLoss:
    """Sums the losses of micro-batches, each weighted by the fraction of its places that have a target.

    ``model`` is the whole model's program, ``layout`` the rank's.
    """

    def __init__(self, model: ExportedModel, layout: RankLayout) -> None:
        self._layout = layout
        self._terms = layout.terms
        nodes = {node.name: node for node in model.program.nodes}
        self._labels = [_inputs_behind(nodes[term.name].args[1], model) for term in self._terms.counted]

    def check_samples(self, samples: int) -> None:
        """Raise InputError if the last micro-batch counts in part, and the loss cannot."""
        at_once = self._layout.samples
        unweighted = [*self._terms.constant, *self._terms.other]
        if samples % at_once and (unweighted or not self._terms.counted):
            raise InputError(
                f"evaluation: found {samples} samples, of which {samples % at_once} are in a micro-batch of {at_once} "
                f"by themselves; {', '.join(unweighted)} of the loss has no targets to ignore, so it takes a multiple "
                f"of {at_once}"
            )

    def padding_counts(self, inputs: Mapping[str, torch.Tensor], micro_batch: int, samples: int) -> torch.Tensor | None:
        """Whether a target after the first ``samples`` of the global batch may count; None if none is in question.

        ``inputs`` belong to ``micro_batch``. A micro-batch whose samples are all later does not count as a whole.
        """
        layout = self._layout
        first, here = (layout.first_micro_batch + micro_batch) * layout.samples, layout.samples // layout.replicas
        rows = max(0, samples - first - layout.replica * here)
        if rows >= here or samples <= first:
            return None
        ignored = [
            torch.stack([(inputs[name][rows:] == term.ignore_index).all() for name in sorted(names & inputs.keys())])
            for term, names in zip(self._terms.counted, self._labels, strict=True)
            if names & inputs.keys()
        ]
        if len(ignored) < len(self._labels):
            return torch.ones((), dtype=torch.bool)
        return ~torch.stack([mask.any() for mask in ignored]).all()

    def of_all_ranks(self, made: Mapping[int, ForwardLoss]) -> torch.Tensor:
        """[micro-batches of the global batch, 2 + terms]: weighted loss, samples wrongly counted, fraction per term."""
        layout = self._layout
        rows = torch.zeros(layout.plan.dp * layout.micro_batches, 2 + len(self._terms.counted), dtype=torch.float64)
        if layout.shard == 0:  # the others have computed the same
            for micro_batch, forward_loss in made.items():
                row = rows[layout.first_micro_batch + micro_batch]
                row[0] = forward_loss.loss.item() / (
                    1 if layout.settings.loss_mean == SUMMED_ITEMS else layout.replicas
                )
                row[1] = 0 if forward_loss.padding_counts is None else forward_loss.padding_counts.item()
                for number, term in enumerate(layout.target_terms):
                    row[2 + number] = forward_loss.counts[number].item() / term.places / layout.replicas
        with waiting_for("the losses of all ranks"):
            dist.all_reduce(rows)
        return rows

    def total(self, rows: torch.Tensor, samples: int) -> tuple[float, tuple[float, ...]]:
        """(loss over the first ``samples``, loss of each micro-batch), given the rows of all global batches."""
        at_once = self._layout.samples
        rows = rows[: -(-samples // at_once)]
        losses = rows[:, 0]
        if not self._terms.counted:
            return float(losses.mean()), tuple(losses.tolist())
        if rows[:, 1].any():
            raise InputError(
                f"evaluation: found {samples} samples and labels of later ones in their last micro-batch; ignore "
                f"those labels, or take a multiple of {at_once} samples"
            )
        fractions = rows[:, 2:]
        unweighted = [1.0] * len([*self._terms.constant, *self._terms.other])
        means = [*fractions.mean(0).tolist(), *unweighted]
        if any(not isclose(mean, means[0], rel_tol=1e-12) for mean in means):
            raise InputError(
                "evaluation: the terms of the loss are means over different fractions of their targets "
                f"({', '.join(f'{mean:.2%}' for mean in means)}); ignore equally many targets of each, or none"
            )
        if not means[0] > 0:
            raise InputError("evaluation: all targets are ignored, so the loss is not defined")
        of_one = torch.where((fractions == fractions[:, :1]).all(1), losses / fractions[:, 0], torch.nan)
        return float(losses.mean() / means[0]), tuple(of_one.tolist())

    def targets(self, rows: torch.Tensor, samples: int) -> tuple[float, ...]:
        """How many targets of the first term, or else samples, each micro-batch has of the first ``samples``."""
        at_once, terms = self._layout.samples, self._terms.counted
        if not terms:
            return tuple(float(min(at_once, samples - first)) for first in range(0, samples, at_once))
        return tuple((rows[: -(-samples // at_once), 2] * terms[0].places).tolist())


def _inputs_behind(node: object, model: ExportedModel) -> set[str]:
    """Names of the model's inputs from which ``node`` is computed."""
    seen: set[object] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if isinstance(current, fx.Node) and current not in seen:
            seen.add(current)
            pending.extend(current.all_input_nodes)
    return {seen_node.name for seen_node in seen if isinstance(seen_node, fx.Node)} & model.inputs.keys()
