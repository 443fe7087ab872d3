"""The grid of `make parity`: every synchronous schedule with all its options, sizes, recomputation and models."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from random import Random

from auto3d.capture.graph import Graph
from auto3d.partition.merak import shard
from auto3d.partition.methods.uniform import uniform
from auto3d.partition.recompute import subgraph_starts
from auto3d.plan import Plan
from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.operation import Schedule
from auto3d.search.kept_fractions import KeptFractions
from tests.distributed.parity import make_plan
from tests.models import captured
from tests.pairwise import pairwise_cover, sample_of
from tests.schedule.samples import BY_RULE, SYNC, options_of

SAMPLES = 2  # samples that one operation runs
WIDTHS = ((2, 1), (2, 2), (4, 1))  # (devices, dp) for four processes
MICRO_BATCHES = {"D": lambda d: d, "2D": lambda d: 2 * d, "D+1": lambda d: d + 1}
RECOMPUTE = ("none", "full", 0.5)  # for each stage that may recompute; a number is the kept fraction of the first stage
MODELS = {  # model -> the largest number of stages into which the grid cuts it
    "gpt2-dropout": 16,  # tied embedding and head
    "bert-dropout": 16,
    "t5-dropout": 16,  # values that skip stages, a tied embedding with three users
    "vit-dropout": 16,
    "resnet-transformers": 12,  # batch statistics
    "residual": 4,  # an input and a layer that two stages share, batch statistics, the loss computed inside
    "averaging": 2,  # code without gradients, a buffer that is written and then used, a loss that is used again
    "twins": 16,  # stages without parameters, embeddings of equal shape that are not tied, a shared input
}
CAUSAL = {  # those for schedules that run slices of the sequence
    "gpt2-4-heads-dropout": 16,  # a tied weight, dropout
    "llama-grouped-query": 16,  # rotary positions, keys and values that heads share
    "two-losses": 4,  # two terms of the loss, on two stages
}
SLICES = [{"slices": slices} for slices in (2, 4)]  # they divide the sequence of the models
ONE_COPY = {"averaging"}  # its forward reads a buffer that all earlier micro-batches have written


@dataclass(frozen=True, kw_only=True)
class Cell:
    model: str
    schedule: str
    options: tuple[tuple[str, int | str], ...]  # options that change the order: chunks, pipes, scale
    devices: int
    dp: int
    micro_batches: str  # one of MICRO_BATCHES
    recompute: str | float  # one of RECOMPUTE
    sync: str

    @property
    def axes(self) -> dict[str, str | int]:
        """The axes that the pairwise cover combines. A schedule and its options make the order: one value."""
        order = " ".join([self.schedule, *(f"{name}={value}" for name, value in self.options)])
        others = {name: value for name, value in vars(self).items() if name not in ("schedule", "options")}
        return {"order": order} | others

    def __str__(self) -> str:
        return "-".join(str(value).replace(" ", "-") for value in self.axes.values())


UNEVEN = Cell(  # a group larger than the number of devices, then a smaller one, and a device with one stage less
    model="gpt2-dropout",
    schedule="interleaved-1f1b",
    options=(("chunks", 2), ("group", 3), ("fewer", 1)),
    devices=2,
    dp=1,
    micro_batches="2D",
    recompute="none",
    sync="eager",
)


def schedule_of(cell: Cell) -> Schedule:
    numbers = MICRO_BATCHES[cell.micro_batches](cell.devices)
    return build_schedule(cell.schedule, devices=cell.devices, micro_batches=numbers, **_options(cell))


def plan_of(cell: Cell) -> Plan:
    schedule = schedule_of(cell)
    plan = make_plan(
        cell.model,
        dp=cell.dp,
        pp=cell.devices,
        micro_batch_size=SAMPLES * schedule.sample_parts,
        micro_batches=schedule.micro_batches,
        schedule=cell.schedule,
        options=_options(cell),
        stages=uniform(captured(cell.model, SAMPLES).graph, schedule.stages),
    )
    if isinstance(cell.recompute, float):
        return kept_fractions_of(captured(cell.model, SAMPLES).graph, plan).plan(cell.recompute)
    return plan


def kept_fractions_of(graph: Graph, plan: Plan) -> KeptFractions:
    """Plans that differ from ``plan`` in how many of Merak's subgraphs its stages keep."""
    bounds = shard(graph).bounds
    return KeptFractions(plan, lambda stage: subgraph_starts(graph, stage, bounds))


def _options(cell: Cell) -> dict[str, int | str]:
    word = "none" if cell.recompute == "none" else "full"
    recompute = {"recompute": word} if "recompute" in SCHEDULES[cell.schedule].options else {}
    return dict(cell.options) | {"sync": cell.sync} | recompute


@lru_cache
def cells() -> tuple[Cell, ...]:
    """All possible cells."""
    return tuple(_cells())


def _cells() -> Iterator[Cell]:
    for name, (devices, dp) in product(BY_RULE, WIDTHS):
        for options in SLICES if "slices" in SCHEDULES[name].options else options_of(name, devices):
            schedule = build_schedule(name, devices=devices, micro_batches=devices, **options)
            if schedule.weight_version:  # an asynchronous schedule does not equal one process
                continue
            copies = dp * len({pipe for _, pipe in schedule.device_of})
            models = [
                model
                for model, most in (CAUSAL if schedule.slices > 1 else MODELS).items()
                if schedule.stages <= most and (copies == 1 or model not in ONE_COPY)
            ]
            if "recompute" in SCHEDULES[name].options:
                recompute = RECOMPUTE
            else:  # the schedule decides whether it recomputes
                recompute = RECOMPUTE[1:] if schedule.recompute else RECOMPUTE[:1]
            for values in product(models, MICRO_BATCHES, SYNC, recompute):
                axes = dict(zip(("model", "micro_batches", "sync", "recompute"), values, strict=True))
                yield Cell(schedule=name, options=tuple(options.items()), devices=devices, dp=dp, **axes)


@lru_cache
def mixed() -> tuple[Cell, ...]:
    """All cells in a random order, since a cover takes the first of equally good ones."""
    return tuple(Random(1).sample(cells(), len(cells())))


@lru_cache
def pairwise() -> tuple[Cell, ...]:
    """A few cells that contain every possible pair of values."""
    return tuple(mixed()[position] for position in pairwise_cover([cell.axes for cell in mixed()]))


@lru_cache
def sample() -> tuple[Cell, ...]:
    """Cells in which every model meets every schedule and every value of the other axes; and every order once."""
    few_ranks_first = sorted(mixed(), key=lambda cell: cell.devices * cell.dp)
    axes = [cell.axes | {"schedule": cell.schedule} for cell in few_ranks_first]
    chosen = [few_ranks_first[position] for position in sample_of(axes, once=("order",))]
    return tuple(sorted(chosen, key=lambda cell: cell.model))


def whole() -> list[list[Cell]]:
    """All groups of cells that differ only in recomputation; dp and sync are drawn at random for each group."""
    groups: dict[Cell, dict[tuple[int, str], list[Cell]]] = {}
    for cell in cells():
        group = groups.setdefault(replace(cell, dp=0, sync="", recompute=""), {})
        group.setdefault((cell.dp, cell.sync), []).append(cell)
    draw = Random(1)
    return [draw.choice(list(group.values())) for group in groups.values()]
