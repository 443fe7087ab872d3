"""The Plan: everything that decides how a model is trained, complete and explicit, with a JSON form.

A search makes Plans; the simulator and the runtime take them. A person can write a Plan by hand and run it.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from json import dumps

from pydantic import ConfigDict, TypeAdapter, ValidationError

from auto3d.conversions import CONVERSIONS, Conversion
from auto3d.errors import InputError
from auto3d.mesh import PIPELINE, REPLICA, TENSOR, Mesh
from auto3d.tensor_placement import Split

SCHEMA = 5

NO_OVERLAP, SUB_PIPELINED = TENSOR_OVERLAPS = ("none", "sub-pipelined")

AUTO3D, TORCH_PIPELINING, DEEPSPEED_PIPELINE = "auto3d", "torch-pipelining", "deepspeed-pipeline"
DDP, FSDP, FSDP_GATHERED = "ddp", "fsdp", "fsdp:reshard=no"
ZERO_1, ZERO_2, ZERO_3 = "deepspeed-zero", "deepspeed-zero:stage=2", "deepspeed-zero:stage=3"
ENGINES = (AUTO3D, TORCH_PIPELINING, DEEPSPEED_PIPELINE, ZERO_1, ZERO_2, ZERO_3, DDP, FSDP, FSDP_GATHERED)
"""Runtimes that train a Plan. The simulator and this package's runtime know the first; the application runs the others,
its peers, for comparison."""


class PlanError(InputError):
    """The Plan contradicts itself, or it does not fit the model that it is used with."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage: operations of the Graph, as ranges ``[first, last)`` of their positions in its order."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    operations: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, int], ...] = ()
    """Operations among them that keep their activations while the stage recomputes all others. Without effect if the
    stage does not recompute."""
    replicas: int = 1  # copies of the stage in each pipeline; each takes an equal slice of every micro-batch's samples


def stages_between(bounds: Sequence[int]) -> tuple[StagePlan, ...]:
    """Consecutive stages in the Graph's order; each begins at one bound and ends before the next."""
    return tuple(StagePlan(operations=((first, last),)) for first, last in pairwise(bounds))


def stages_at(positions: Sequence[int], stages: Sequence[StagePlan]) -> tuple[StagePlan, ...]:
    """The stages of a Graph derived from the Graph that ``stages`` cut, what they keep included.

    ``positions`` has, for each operation of the derived Graph, the position in the other of the operation that it
    belongs to, in ascending order.
    """

    def derived(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        moved = ((bisect_left(positions, first), bisect_left(positions, last)) for first, last in spans)
        return tuple(span for span in moved if span[0] < span[1])

    return tuple(replace(stage, operations=derived(stage.operations), kept=derived(stage.kept)) for stage in stages)


def stages_of_operations(stage_of: Sequence[int]) -> tuple[StagePlan, ...]:
    """The stages, given the number of the stage of each operation of the Graph, in any order."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    position = 0
    for stage, group in groupby(stage_of):
        length = sum(1 for _ in group)
        ranges.setdefault(stage, []).append((position, position + length))
        position += length
    return tuple(StagePlan(operations=tuple(ranges[stage])) for stage in sorted(ranges))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees, batch, schedule, stages and placement of one way to train one model.

    ``dp`` pipelines run micro-batches of their own; inside a pipeline, a stage may have replicas. ``placement[device]``
    has the ranks of a pipeline device in the order of its mesh (``meshes``): pipeline by pipeline, in each the replicas
    of the device's stages, in each the shards of their weights. The schedule decides which stages a pipeline device
    has.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    graph: str  # fingerprint of the Graph that ``stages`` cut
    dp: int
    tp: int
    pp: int
    global_batch: int  # samples per iteration, over all pipelines
    micro_batch_size: int  # samples of one micro-batch, over all replicas of a stage
    schedule: str
    stages: tuple[StagePlan, ...]
    placement: tuple[tuple[int, ...], ...]
    seed: int  # seed of the initial weights, the data order and dropout
    schedule_options: dict[str, int | str] = field(default_factory=dict, hash=False)  # options of the schedule's family
    split: dict[str, Split] = field(default_factory=dict, hash=False)
    """How tensor parallelism splits the model's parameters and buffers; those without an entry are whole on every
    rank."""
    sequence_parallel: bool = False  # tensor parallelism also splits norms and dropout, along the sequence
    tensor_overlap: str = NO_OVERLAP
    """Whether tensor-parallel collectives are hidden: a key of TENSOR_OVERLAPS."""
    shard_optimizer: bool = False
    """ZeRO-1: the ranks that hold the same parameters each keep one shard of the optimizer's state."""
    engine: str = AUTO3D
    """The runtime that trains the plan: a key of ENGINES."""
    schema: int = SCHEMA

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each pipeline runs in one iteration."""
        return self.global_batch // (self.dp * self.micro_batch_size)

    @property
    def ranks(self) -> int:
        return sum(len(ranks) for ranks in self.placement)

    @property
    def gradient_sum(self) -> Conversion:
        """What the holders of a parameter do with its gradient. Under ZeRO-1 it is split among them, and so is what
        follows from it: the optimizer's state and the update, after which the backward gathers the weight."""
        return CONVERSIONS["reduce_scatter" if self.shard_optimizer else "reduce"]

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """The ranks of each pipeline device."""
        return tuple(
            Mesh(((PIPELINE, self.dp), (REPLICA, len(ranks) // (self.dp * self.tp)), (TENSOR, self.tp)), ranks)
            for ranks in self.placement
        )

    def position(self, rank: int) -> tuple[int, Mapping[str, int]]:
        """The pipeline device of ``rank``, and its place on each axis of the device's mesh."""
        device = next(device for device, mesh in enumerate(self.meshes) if rank in mesh.ranks)
        return device, self.meshes[device].coordinate(rank)

    def __post_init__(self) -> None:
        check_degrees(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            global_batch=self.global_batch,
            micro_batch_size=self.micro_batch_size,
        )
        if self.schema != SCHEMA:
            raise PlanError(f"schema: {self.schema} is not a version this build reads; it reads {SCHEMA}")
        if self.engine not in ENGINES:
            raise PlanError(f"engine: {self.engine!r} is not known; use one of {', '.join(ENGINES)}")
        if self.seed < 0:
            raise PlanError(f"seed: {self.seed} is not possible; it must be 0 or more")
        if len(self.stages) < self.pp:
            raise PlanError(f"stages: {len(self.stages)} stages for pp = {self.pp}; each device needs at least one")
        end = 0
        for first, last in sorted(span for stage in self.stages for span in stage.operations):
            if first != end or last <= first:
                raise PlanError(
                    f"stages: the range {first} to {last} follows operation {end}; all ranges together must contain "
                    "each operation of the model once"
                )
            end = last
        if not all(stage.operations for stage in self.stages):
            raise PlanError("stages: one has no operations; each needs at least one")
        for number, stage in enumerate(self.stages):
            end = 0
            for first, last in stage.kept:
                inside = any(start <= first and last <= stop for start, stop in stage.operations)
                if not end <= first < last or not inside:
                    raise PlanError(
                        f"stages: stage {number} keeps {first} to {last}; each range of kept must follow the one "
                        f"before it and lie in one range of the stage's operations"
                    )
                end = last
        replicas = sorted({stage.replicas for stage in self.stages})
        for number in replicas:
            if number < 1:
                raise PlanError(f"stages: replicas: {number} is not possible; it must be 1 or more")
            if self.micro_batch_size % number:
                raise PlanError(
                    f"micro_batch_size: {self.micro_batch_size} does not divide into the {number} replicas of a stage; "
                    f"it must be a multiple of {number}"
                )
        ranks = sorted(rank for ranks in self.placement for rank in ranks)
        counts = {self.dp * number * self.tp for number in replicas}
        if (
            len(self.placement) != self.pp
            or not counts.issuperset(map(len, self.placement))
            or ranks != list(range(self.ranks))
        ):
            factors = f" × {' or '.join(map(str, replicas))} replicas of its stages" if replicas != [1] else ""
            factors += f" × tp = {self.tp}" if self.tp > 1 else ""
            needed = self.pp * max(counts) if len(counts) == 1 else len(ranks)
            raise PlanError(
                f"placement: {[list(ranks) for ranks in self.placement]} must be pp = {self.pp} lists of "
                f"dp = {self.dp}{factors} ranks that use each of 0 to {needed - 1} once"
            )

    def to_json(self) -> str:
        return dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> "Plan":
        """The Plan in ``text``; raises PlanError with the wrong key, its value and the accepted values."""
        try:
            return _adapter.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["type"] == "unexpected_keyword_argument":
                raise PlanError(
                    f"{first['loc'][-1]}: unknown; a plan has {', '.join(Plan.__dataclass_fields__)}"
                ) from None
            where = ".".join(map(str, first["loc"])) or "plan"
            value = (
                "" if first["type"] in ("missing", "json_invalid", "value_error") else f" (found {first['input']!r})"
            )
            message = first["msg"].removeprefix("Value error, ")
            raise PlanError(message if where == "plan" else f"{where}: {message}{value}") from None


_adapter = TypeAdapter(Plan)


class EngineRefusalError(PlanError):
    """The engine of ``plan`` cannot train it; the message says why."""

    def __init__(self, plan: Plan, reason: str) -> None:
        super().__init__(f"{plan.engine} {reason}")
        self.plan = plan


def check_degrees(*, dp: int, tp: int, pp: int, global_batch: int, micro_batch_size: int) -> None:
    """Raise PlanError if these numbers do not fit together; the message has the whole equation."""
    named = {"dp": dp, "tp": tp, "pp": pp, "global_batch": global_batch, "micro_batch_size": micro_batch_size}
    for name, value in named.items():
        if value < 1:
            raise PlanError(f"{name}: {value} is not possible; it must be 1 or more")
    if global_batch % (dp * micro_batch_size):
        raise PlanError(
            f"global_batch: {global_batch} does not divide into dp = {dp} pipelines with micro-batches of "
            f"{micro_batch_size} samples; it must be a multiple of {dp} × {micro_batch_size} = {dp * micro_batch_size}"
        )
