"""A global batch that lacks samples, as the last of an epoch may: it runs as it is, like one process runs it.

Its last micro-batch may have fewer samples than the others, and then runs by stages of that size (sizes.py). The
micro-batches that it does not have are left out of the program, on all ranks of a pipeline alike.
"""

from dataclasses import dataclass

from auto3d.capture.model import CapturedModel
from auto3d.data.interface import Incomplete
from auto3d.plan import Plan
from auto3d.runtime.samples.sizes import SizedStages, why_not_sized
from auto3d.runtime.settings import TrainingSettings


@dataclass(frozen=True)
class IncompleteBatch:
    """What a rank runs of a global batch that lacks samples."""

    absent: frozenset[int]  # micro-batches of its pipeline that the global batch does not have
    short: int | None  # the micro-batch with fewer samples; None: its pipeline has no such micro-batch
    present: float  # fraction of the micro-batches of a complete global batch that this batch has
    samples: float  # fraction of the samples


@dataclass(frozen=True, kw_only=True)
class IncompleteBatches:
    """What a rank needs to run incomplete global batches."""

    data: Incomplete
    plan: Plan
    first_micro_batch: int  # the pipeline's first in the global batch
    sized: SizedStages  # for the short micro-batch

    def of(self, iteration: int) -> IncompleteBatch | None:
        """That of ``iteration``; None if its global batch is complete."""
        samples, size, count = self.data.samples(iteration), self.plan.micro_batch_size, self.plan.micro_batches
        if samples == self.plan.global_batch:
            return None
        present = -(-samples // size)
        last = present - 1 - self.first_micro_batch
        return IncompleteBatch(
            absent=frozenset(range(max(0, last + 1), count)),
            short=last if samples % size and 0 <= last < count else None,
            present=present / (self.plan.dp * count),
            samples=samples / self.plan.global_batch,
        )


def why_not(captured: CapturedModel, plan: Plan, settings: TrainingSettings, short: int) -> str:
    """Why batches whose last micro-batch has ``short`` samples cannot run as they are; empty if they can."""
    if not settings.weighs_micro_batches_alike and settings.loss_mean != "items":
        return f"loss_mean is {settings.loss_mean}, which does not weigh micro-batches alike"
    return why_not_sized(captured, lambda: captured.at(short), plan, settings, f"{short} samples")
