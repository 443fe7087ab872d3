"""From sums over weighted micro-batches to the mean over the targets of the global batch, and who cannot have it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isclose

from auto3d.capture.graph import BATCH_STATISTICS, Graph
from auto3d.capture.loss_terms import ACCEPTED, LossTerms
from auto3d.data.interface import IGNORED
from auto3d.errors import InputError
from auto3d.runtime.settings import LOSS_MEANS, LOSSES_OF_TRANSFORMERS, SUMMED_ITEMS, TrainingSettings
from auto3d.schedule.operation import Schedule


@dataclass(frozen=True, kw_only=True)
class BatchTargets:
    """What the sums of an iteration are divided by, so that each real target of the global batch counts equally."""

    terms: LossTerms = field(default_factory=LossTerms)
    micro_batches: int = 1  # micro-batches, or parts of them, in one global batch
    loss_mean: str = "targets"  # see TrainingSettings
    label_places: int = 1  # labels of a global batch, ignored or not, for losses that are sums over items
    vary: bool = False  # the fraction of the places that is filled may not be 1, so updates must wait until it is known

    @property
    def counts_items(self) -> bool:
        """Whether the loss is divided by the number of targets that the data says, instead of the targets of a term."""
        return self.loss_mean == SUMMED_ITEMS or (self.loss_mean == "items" and bool(self.terms.counted))

    def fraction(self, counts: Sequence[float], iteration: int, *, is_updated: bool, present: float = 1.0) -> float:
        """The fraction of the places for targets that the global batch of ``iteration``, from 1, fills.

        ``counts`` has the number of targets of each term, and then the number of items if they count. ``is_updated``
        says whether the update did not wait for it. The global batch has the fraction ``present`` of its micro-batches,
        or of its samples if items count. Only where items count in a model's loss, as in transformers, it may be 0.

        Raises InputError if the terms of the loss would need different fractions, so that no division of their sum is
        right, or if the update is wrong because it did not wait.
        """
        if self.loss_mean == "sum":
            return 1.0
        counted = self.terms.counted
        if self.counts_items:
            *_, items = counts
            counts = [items] * len(counted)
        fractions = {
            term.name: count / (term.places * self.micro_batches) for term, count in zip(counted, counts, strict=True)
        }
        fractions |= dict.fromkeys((*self.terms.constant, *self.terms.other), present)
        if self.loss_mean == SUMMED_ITEMS:
            fractions["labels"] = items / self.label_places  # such a loss has no terms
        if not fractions:
            return present
        fraction = next(iter(fractions.values()))
        described = ", ".join(f"{name} {value:.2%}" for name, value in fractions.items())
        if any(not isclose(value, fraction, rel_tol=1e-12) for value in fractions.values()):
            raise InputError(
                f"iteration {iteration}: the terms of the loss are means over different fractions of their targets "
                f"({described}), so their micro-batches cannot be weighted by the number of targets; ignore equally "
                "many targets of each, or none"
            )
        if not fraction > 0 and self.loss_mean == "items":
            return 0.0
        if not fraction > 0:
            raise InputError(
                f"iteration {iteration}: all targets of the global batch are ignored ({described}), so the loss is not "
                "defined; give each global batch a target"
            )
        if fraction != 1 and is_updated:
            raise InputError(
                f"iteration {iteration}: the data ignores targets ({described}), and its micro-batches have been "
                "trained on as if it did not; use a synchronous schedule with clip_norm above 0, whose updates wait, "
                "or data that says that it may ignore targets"
            )
        return fraction


def check_loss(
    terms: LossTerms,
    schedule: Schedule,
    settings: TrainingSettings,
    *,
    may_ignore: bool,
    parts: int = 1,
    fills: bool = False,
) -> None:
    """Raise InputError if training could not be exact.

    ``may_ignore`` says whether the data may have labels that the loss ignores, such as -100; ``fills`` whether it
    completes a global batch with samples of which all labels are ignored. A micro-batch is run in ``parts``.
    """
    if settings.loss_mean not in (*LOSS_MEANS, *LOSSES_OF_TRANSFORMERS):
        raise InputError(f"loss_mean: found {settings.loss_mean!r}; it takes {' or '.join(LOSS_MEANS)}")
    if settings.first_loss_scale is not None and not settings.first_loss_scale > 0:
        raise InputError(f"loss_scale: found {settings.first_loss_scale:g}; it takes a number above 0")
    if settings.first_loss_scale is not None and schedule.weight_version:
        raise InputError(
            f"loss_scale: schedule {schedule.name} updates each stage separately, so it cannot skip the update of all "
            "stages after an overflow; use a synchronous schedule, or float32 or bfloat16"
        )
    if settings.emulation is not None:
        return
    if fills:
        check_filled(terms, "the model's loss: last_batch=pad adds samples that must not count")
    if settings.loss_mean == SUMMED_ITEMS:
        if schedule.weight_version:
            raise InputError(
                f"schedule: found {schedule.name}; the loss is divided by the number of targets of a global batch, "
                "which is known only when all micro-batches have run; use a synchronous schedule"
            )
        return
    if not targets_vary(terms, may_ignore=may_ignore):
        return
    if settings.weighs_micro_batches_alike:
        if parts == 1:
            return
        raise InputError(
            f"loss_mean: found {settings.loss_mean}, and schedule {schedule.name} runs each micro-batch in {parts} "
            "parts, of which none knows how many real targets the others have; use loss_mean=targets, or a schedule "
            "that runs micro-batches whole"
        )
    weighted = next((term.name for term in terms.counted if term.has_class_weights), "")
    because = "the data may ignore labels" if may_ignore else f"{weighted} has class weights"
    because += ", so each micro-batch must count with the number of its real targets"
    if schedule.weight_version:
        raise InputError(
            f"schedule: found {schedule.name}; {because}, which is known only when all micro-batches have run; use a "
            "synchronous schedule"
        )
    if terms.counted and settings.loss_mean == "items":
        if terms.used:
            raise InputError(
                f"the model's loss: {', '.join(terms.used)} is added to it, and more of the model depends on it; take "
                "the mean of a value that only the loss depends on"
            )
        return
    by_hand = "or use loss_mean=micro-batches, the mean of the micro-batches' losses"
    if terms.other:
        raise InputError(
            f"the model's loss: {because}, and what {', '.join(terms.other)} counts cannot be told from the program; "
            f"it takes {ACCEPTED}; {by_hand}"
        )
    if terms.counted and terms.constant:
        raise InputError(
            f"the model's loss: {because}, and {', '.join(terms.constant)} has no targets to ignore, so no common "
            f"weight is right for it and {terms.counted[0].name}; it takes {ACCEPTED}, without other terms; {by_hand}"
        )


def check_filled(terms: LossTerms, because: str) -> None:
    """Raise InputError, which says ``because``, if a term of the loss counts samples all of whose labels are ignored.

    A mean over all places counts them: a mean of squared errors takes even -100 for a number.
    """
    if counts := [*terms.constant, *terms.other]:
        raise InputError(f"{because}, and {', '.join(counts)} of the loss would count them; it takes {ACCEPTED}")
    if counts := [term.name for term in terms.counted if term.counts_ignored]:
        raise InputError(
            f"{because}, and {', '.join(counts)} of the loss would count them, since labels of {IGNORED} do not reach "
            "it as its ignore_index; leave out the samples that remain"
        )


def check_statistics(graph: Graph, because: str, remedy: str) -> None:
    """Raise InputError if samples that fill a batch would change what the others give; it says why, and the remedy.

    Batch normalisation counts them in its means, and a buffer that the forward writes to keeps them.
    """
    for node in graph.nodes:
        buffer = next(iter(sorted(graph.written_buffers.intersection(node.state))), None)
        if buffer is not None or node.operator in BATCH_STATISTICS:
            what = f"the buffer {buffer}" if buffer is not None else f"the batch statistics of {node.module}"
            raise InputError(f"{because}, and {what} would count them; {remedy}")


def targets_vary(terms: LossTerms, *, may_ignore: bool) -> bool:
    """Whether micro-batches may differ in what the terms of the loss are means of."""
    return may_ignore or any(term.has_class_weights for term in terms.counted)
