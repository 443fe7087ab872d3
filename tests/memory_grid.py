"""The grid of trainings whose predicted memory is compared with the bytes that their ranks hold."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from auto3d.capture.model import CapturedModel
from auto3d.cluster import place_ranks
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import NO_OVERLAP, SUB_PIPELINED, Plan
from auto3d.runtime.replicas import capture_slices
from auto3d.runtime.settings import OptimizerSettings
from auto3d.schedule import SCHEDULES, build_schedule
from tests.distributed.grid import kept_fractions_of
from tests.distributed.parity import ADAMW, make_plan
from tests.live_tensors import Peak, peak_of_rank
from tests.models import TRAINED, captured
from tests.processes import ProcessPool
from tests.schedule.samples import BY_RULE

MODELS = ("gpt2-wide", "bert-wide", "t5-wide", "llama-wide", "vit-wide")
TIED = ("gpt2-wide", "bert-wide", "t5-wide")  # PipeDream would give both users of a weight different versions of it
CAUSAL = ("gpt2-wide", "llama-wide")
SAMPLES = 8  # samples that one operation runs
NO_CLIPPING = replace(ADAMW, clip_norm=0.0)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training: a model under a schedule."""

    model: str
    schedule: str = "1f1b"
    pp: int = 2
    micro_batches: int = 4
    slices: int = 1  # slices of the sequence, under seq1f1b
    recompute: float | None = None  # fraction that the first stage keeps; None: it does not recompute
    dp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    sub_pipelined: bool = False  # two halves of each micro-batch take turns
    shard_optimizer: bool = False
    replicas: tuple[int, ...] = ()  # copies of each pipeline device's stages in one pipeline; empty: one

    def __str__(self) -> str:
        parts = [
            self.model,
            self.schedule,
            f"dp{self.dp}-tp{self.tp}-pp{self.pp}",
            f"{self.micro_batches} micro-batches",
        ]
        parts += [f"{self.slices} slices"] if self.slices > 1 else []
        parts += [] if self.recompute is None else [f"recompute keeping {self.recompute}"]
        parts += [f"replicas {'+'.join(map(str, self.replicas))}"] if self.replicas else []
        parts += ["sub-pipelined"] * self.sub_pipelined
        parts += ["sequence-parallel"] * self.sequence_parallel + ["ZeRO-1"] * self.shard_optimizer
        return ", ".join(parts)

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * (sum(self.replicas) or self.pp)


@dataclass(frozen=True)
class Compared:
    """Bytes of one rank."""

    cell: Cell
    rank: int
    predicted: int
    peak: Peak
    estimate: object  # estimate that predicted them

    @property
    def error(self) -> float:
        return self.predicted / self.peak.total - 1


def grid() -> Iterator[Cell]:
    """Every schedule with every family, and the other axes with some of each."""
    for model in MODELS:
        for schedule in BY_RULE:
            if schedule != "seq1f1b" and (schedule != "pipedream" or model not in TIED):
                yield Cell(model=model, schedule=schedule, pp=2)
        for pp, slices in ((1, 4), (2, 2), (2, 4), (4, 4)) if model in CAUSAL else ():
            yield Cell(model=model, schedule="seq1f1b", pp=pp, slices=slices)
            if pp == 2:
                yield Cell(model=model, schedule="seq1f1b", pp=pp, slices=slices, tp=2)
                for recompute in (0.0, 0.5):
                    yield Cell(model=model, schedule="seq1f1b", pp=pp, slices=slices, recompute=recompute)
                yield Cell(model=model, schedule="seq1f1b", pp=pp, slices=slices, tp=2, recompute=0.0)
        for schedule in ("1f1b", "gpipe", "chimera", "interleaved-1f1b"):
            yield Cell(model=model, schedule=schedule, pp=2, recompute=0.0)
        yield Cell(model=model, schedule="1f1b", pp=2, recompute=0.5)
        yield Cell(model=model, pp=1, micro_batches=2)
        yield Cell(model=model, schedule="1f1b", pp=4)
        yield Cell(model=model, schedule="gpipe", pp=4)
        yield Cell(model=model, pp=2, dp=2)
        yield Cell(model=model, pp=2, dp=2, shard_optimizer=True)
        for sequence_parallel in (False, True):
            yield Cell(model=model, pp=2, tp=2, sequence_parallel=sequence_parallel)
            yield Cell(model=model, pp=1, tp=2, sequence_parallel=sequence_parallel, sub_pipelined=True)
        yield Cell(model=model, schedule="1f1b", pp=2, tp=2, recompute=0.0, sub_pipelined=True)
        yield Cell(model=model, schedule="zb-h1", pp=2, tp=2)
        yield Cell(model=model, schedule="1f1b", pp=2, tp=2, recompute=0.0)
        for replicas in ((2, 1), (1, 2)):
            yield Cell(model=model, pp=2, replicas=replicas)
        yield Cell(model=model, schedule="zb-h1", pp=2, replicas=(1, 2))
        yield Cell(model=model, schedule="gpipe", pp=3, replicas=(1, 2, 1), recompute=0.0)
        yield Cell(model=model, schedule="chimera", pp=2, replicas=(2, 2))
        yield Cell(model=model, pp=2, replicas=(2, 1), shard_optimizer=True)
        if model in CAUSAL:
            yield Cell(model=model, schedule="seq1f1b", pp=2, slices=2, replicas=(1, 2))
    for model in ("gpt2-wide@bfloat16", "bert-wide@bfloat16", "llama-wide@bfloat16"):
        for schedule in ("1f1b", "gpipe", "zb-h1"):
            yield Cell(model=model, schedule=schedule, pp=2)
        yield Cell(model=model, pp=2, recompute=0.0)


def optimizer_of(cell: Cell) -> OptimizerSettings:
    asynchronous = SCHEDULES[cell.schedule].asynchronous
    return NO_CLIPPING if asynchronous else ADAMW


def plan_of(cell: Cell) -> Plan:
    """The Plan of ``cell``, whose programs this process then has."""
    options: dict[str, int | str] = {}
    if cell.recompute is not None:
        options["recompute"] = "full"
    if cell.slices > 1:
        options["slices"] = cell.slices
    if SCHEDULES[cell.schedule].asynchronous:
        options["iterations"] = 3
    schedule = build_schedule(cell.schedule, devices=cell.pp, micro_batches=cell.micro_batches, **options)
    graph = captured(cell.model, SAMPLES).graph
    plan = make_plan(
        cell.model,
        dp=cell.dp,
        tp=cell.tp,
        pp=cell.pp,
        micro_batch_size=SAMPLES * schedule.sample_parts,
        micro_batches=cell.micro_batches,
        schedule=cell.schedule,
        options=options,
        stages=uniform(graph, schedule.stages),
        sequence_parallel=cell.sequence_parallel,
        shard_optimizer=cell.shard_optimizer,
        tensor_overlap=SUB_PIPELINED if cell.sub_pipelined else NO_OVERLAP,
    )
    if cell.recompute:
        plan = kept_fractions_of(graph, plan).plan(cell.recompute)
    if cell.replicas:
        replicas_of = {stage: cell.replicas[device] for (stage, _), device in schedule.device_of.items()}
        plan = replace(
            plan,
            stages=tuple(replace(stage, replicas=replicas_of[number]) for number, stage in enumerate(plan.stages)),
            placement=place_ranks(dp=cell.dp, pp=cell.pp, tp=cell.tp, replicas=cell.replicas),
        )
    capture_slices(captured(cell.model, SAMPLES), plan)
    return plan


def _peak_of(world, model: str, plan: Plan, optimizer: OptimizerSettings, keeps_tensors: bool):  # type: ignore[no-untyped-def]
    trained: CapturedModel = captured(model, SAMPLES)
    return peak_of_rank(world, trained, TRAINED[model][1], plan, optimizer, keeps_tensors)


def compare(pool: ProcessPool, cell: Cell, *, keeps_tensors: bool = False) -> list[Compared]:
    """Trains ``cell`` and compares each of its ranks."""
    plan = plan_of(cell)
    found = pool.run(cell.ranks, _peak_of, cell.model, plan, optimizer_of(cell), keeps_tensors)
    return [Compared(cell, rank, predicted.total, peak, predicted) for rank, (peak, predicted) in enumerate(found)]
