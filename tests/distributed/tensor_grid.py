"""The grid of tensor parallelism: models, degrees, schedules, recomputation, with and without sequence parallelism."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from random import Random

from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan
from auto3d.schedule import SCHEDULES
from tests.distributed.grid import kept_fractions_of
from tests.distributed.parity import make_plan
from tests.models import captured
from tests.pairwise import pairwise_cover

SAMPLES = 2  # samples that one operation runs
MICRO_BATCHES = 4
MODELS = {
    "GPT-2": "gpt2-4-heads",
    "BERT": "bert-4-heads",
    "T5": "t5-4-heads",
    "ViT": "vit-4-heads",
    "Swin": "swin-4-heads",
    "LLaMA, grouped queries": "llama-grouped-query",
}
# With sequence parallelism these drop elements of split activations, which one process does not do alike.
WITH_DROPOUT = ("gpt2-4-heads-dropout", "bert-4-heads-dropout", "vit-4-heads-dropout")
OF_THREE_DIMENSIONS = ("gpt2-4-heads", "t5-4-heads")  # models that the grid runs with dp, tp and pp of 2
SCHEDULES_OF_TWO = ("1f1b", "shifted-critical-path", "chimera", "zb-h1")
RECOMPUTE = ("none", "full", 0.5)  # a number is the kept fraction of the first stage


@dataclass(frozen=True, kw_only=True)
class TensorCell:
    """One run. How the two halves of a micro-batch overlap, and where the split comes from, are axes to be added."""

    model: str
    dp: int
    tp: int
    pp: int
    sequence_parallel: bool
    schedule: str
    recompute: str | float  # one of RECOMPUTE

    @property
    def axes(self) -> dict[str, str | int]:
        """The axes that the pairwise cover combines."""
        degrees = f"dp{self.dp}-tp{self.tp}-pp{self.pp}"
        sequence = "sequence" if self.sequence_parallel else "plain"
        recompute = f"recompute-{self.recompute}"
        return {
            "model": self.model, "degrees": degrees, "sequence": sequence,
            "schedule": self.schedule, "recompute": recompute,
        }  # fmt: skip

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return "-".join(map(str, self.axes.values()))


def plan_of(cell: TensorCell) -> Plan:
    """The Plan of ``cell``, split as the graph alone suggests."""
    word = "none" if cell.recompute == "none" else "full"
    options = {"recompute": word} if "recompute" in SCHEDULES[cell.schedule].options else {}
    plan = make_plan(
        cell.model,
        dp=cell.dp,
        tp=cell.tp,
        pp=cell.pp,
        sequence_parallel=cell.sequence_parallel,
        micro_batch_size=SAMPLES,
        micro_batches=MICRO_BATCHES,
        schedule=cell.schedule,
        options=options,
        stages=uniform(captured(cell.model, SAMPLES).graph, cell.pp),
    )
    if isinstance(cell.recompute, float):
        return kept_fractions_of(captured(cell.model, SAMPLES).graph, plan).plan(cell.recompute)
    return plan


@lru_cache
def cells() -> tuple[TensorCell, ...]:
    """All possible cells."""
    return tuple(_cells())


def _cells() -> Iterator[TensorCell]:
    models = (*MODELS.values(), *WITH_DROPOUT)
    degrees = [(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)]
    for model, (dp, tp, pp), sequence in product(models, degrees, (False, True)):
        if dp * tp * pp == 8 and model not in OF_THREE_DIMENSIONS:
            continue
        if sequence and model in WITH_DROPOUT:
            continue
        for schedule in SCHEDULES_OF_TWO if pp > 1 else ("1f1b",):
            recompute = RECOMPUTE if "recompute" in SCHEDULES[schedule].options else RECOMPUTE[:1]
            for value in recompute:
                yield TensorCell(
                    model=model, dp=dp, tp=tp, pp=pp, sequence_parallel=sequence, schedule=schedule, recompute=value
                )


def pairwise() -> list[TensorCell]:
    """A few cells that contain every possible pair of values."""
    mixed = Random(1).sample(cells(), len(cells()))  # the cover takes the first of equally good cells
    return [mixed[position] for position in pairwise_cover([cell.axes for cell in mixed])]
