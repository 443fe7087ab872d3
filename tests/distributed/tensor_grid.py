"""The grid of tensor parallelism: models, degrees, splits, schedules, recomputation, sequences, overlap."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from random import Random

from auto3d.capture.skeleton import skeleton
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import NO_OVERLAP, SUB_PIPELINED, Plan
from auto3d.runtime.replicas import capture_slices
from auto3d.schedule import SCHEDULES
from auto3d.tensor.weight_rules import known_rules, weight_splits
from tests.distributed.grid import kept_fractions_of
from tests.distributed.parity import make_plan
from tests.models import captured
from tests.pairwise import pairwise_cover, sample_of

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
OVERLAPS = (NO_OVERLAP, SUB_PIPELINED)
DERIVED, KNOWN = "derived", "known-rules"  # sources of the split: the graph alone, or rules of transformers or auto3d
RULES = (DERIVED, KNOWN)
SLICED = "seq1f1b"  # it takes causal models
CAUSAL = ("gpt2-4-heads", "gpt2-4-heads-dropout", "llama-grouped-query")
RECOMPUTE = ("none", "full", 0.5)  # a number is the kept fraction of the first stage


@dataclass(frozen=True, kw_only=True)
class TensorCell:
    model: str
    dp: int
    tp: int
    pp: int
    schedule: str = "1f1b"
    recompute: str | float = "none"  # one of RECOMPUTE
    sequence_parallel: bool = False
    overlap: str = NO_OVERLAP  # one of OVERLAPS
    rules: str = DERIVED  # one of RULES

    @property
    def axes(self) -> dict[str, str | int]:
        """The axes that the pairwise cover combines. Dropout is an axis of its own: a model has it or not."""
        return {
            "model": self.model.removesuffix("-dropout"),
            "dropout": "dropout" if self.model in WITH_DROPOUT else "no-dropout",
            "degrees": f"dp{self.dp}-tp{self.tp}-pp{self.pp}",
            "sequence": "sequence-split" if self.sequence_parallel else "sequence-whole",
            "schedule": self.schedule,
            "recompute": f"recompute-{self.recompute}",
            "overlap": self.overlap,
            "rules": self.rules,
        }

    def __str__(self) -> str:
        return "-".join(map(str, self.axes.values()))


def plan_of(cell: TensorCell) -> Plan:
    """The Plan of ``cell``, whose program this process then has."""
    whole = captured(cell.model, SAMPLES)
    word = "none" if cell.recompute == "none" else "full"
    options = {"recompute": word} if "recompute" in SCHEDULES[cell.schedule].options else {}
    options |= {"slices": 2} if cell.schedule == SLICED else {}
    split = None
    if cell.rules == KNOWN:
        known = known_rules(skeleton(whole.exported.build).model)
        assert known is not None, f"{cell.model} has no known rules"
        split = dict(weight_splits(whole, cell.tp, rules={}, known=known).splits)
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
        stages=uniform(whole.graph, cell.pp),
        split=split,
        tensor_overlap=cell.overlap,
    )
    if isinstance(cell.recompute, float):
        plan = kept_fractions_of(whole.graph, plan).plan(cell.recompute)
    capture_slices(whole, plan)
    return plan


@cache
def plans_of(model: str, selected: tuple[TensorCell, ...]) -> dict[TensorCell, Plan]:
    """The Plans of those ``selected`` cells that train ``model``; ranks forked later inherit their programs."""
    return {cell: plan_of(cell) for cell in selected if cell.model == model}


@cache
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
        sliced = (SLICED,) if model in CAUSAL and not sequence else ()
        for schedule in (*SCHEDULES_OF_TWO, *sliced) if pp > 1 else ("1f1b",):
            recompute = RECOMPUTE if "recompute" in SCHEDULES[schedule].options else RECOMPUTE[:1]
            overlaps = OVERLAPS[:1] if schedule == SLICED else OVERLAPS
            for value, overlap, rules in product(recompute, overlaps, RULES):
                yield TensorCell(
                    model=model, dp=dp, tp=tp, pp=pp, schedule=schedule, recompute=value, sequence_parallel=sequence,
                    overlap=overlap, rules=rules,
                )  # fmt: skip


@cache
def pairwise() -> tuple[TensorCell, ...]:
    """A few cells that contain every possible pair of values, sorted by model."""
    mixed = Random(1).sample(cells(), len(cells()))  # the cover takes the first of equally good cells
    cover = [mixed[position] for position in pairwise_cover([cell.axes for cell in mixed])]
    return tuple(sorted(cover, key=lambda cell: cell.model))


@cache
def sample() -> tuple[TensorCell, ...]:
    """Fewer cells of that cover: every pair of sequence and overlap; every value of the other axes once."""
    cover = pairwise()
    once = ("model", "schedule", "degrees", "recompute", "dropout", "rules")
    chosen = [cover[position] for position in sample_of([cell.axes for cell in cover], once=once)]
    return tuple(sorted(chosen, key=lambda cell: cell.model))


@cache
def whole() -> tuple[TensorCell, ...]:
    """Cells with every model, degrees, schedule, recomputation and sequence; overlap and rules are drawn at random."""
    groups: dict[TensorCell, list[TensorCell]] = {}
    for cell in cells():
        groups.setdefault(replace(cell, overlap="", rules=""), []).append(cell)
    draw = Random(1)
    return tuple(draw.choice(group) for group in groups.values())
