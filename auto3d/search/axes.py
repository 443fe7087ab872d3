"""The axes of a plan: each axis is a field of ``Candidate``, with everything that is said of the axis elsewhere.

The search space, the keys ``search.*`` and ``plan.*`` of a recipe, the columns of tables and files, and the words for a
candidate follow from these fields. A new axis is a new field here; what it does to a plan is up to ``PlanMaker``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import gcd
from typing import Any, Literal, get_type_hints

from auto3d.cluster import Cluster
from auto3d.partition.methods import SEARCHED_METHODS, STAGE_METHODS
from auto3d.plan import AUTO3D, ENGINES, NO_OVERLAP, TENSOR_OVERLAPS, Plan
from auto3d.schedule import SCHEDULES, write_schedule
from auto3d.schedule.options import SYNC
from auto3d.search.placement import MEGATRON, PLACEMENTS
from auto3d.search.recompute import AUTO, FULL, NONE

Tried = Sequence[Any] | Literal["auto"]  # the values of an axis that a search tries; auto: all that make sense
EQUAL, UNEVEN = REPLICAS = ("equal", "uneven")


@dataclass(frozen=True, kw_only=True)
class PlanAxis:
    """One choice that every plan makes.

    ``every(cluster, global_batch)`` gives the values that "auto" stands for. Where ``matters`` is false, all values of
    the axis give the same plan, and ``alike`` says which of the tried values stands for them.
    """

    default: Any = None  # None: every candidate has to say it
    meaning: str = ""  # description of the key plan.NAME; empty: a recipe's own plan takes the default
    trying: str  # description of the key search.NAME
    tried: Tried = AUTO  # default of that key
    every: Callable[[Cluster, int], Sequence[Any]]
    takes: Sequence[str | bool] = ()  # the accepted words; empty: only numbers
    options: bool = False  # a word may be followed by a colon and options
    least: float | None = None
    most: float | None = None
    is_degree: bool = False  # it decides, with the others of this kind, whether a plan fits the cluster and the batch
    bounds_time: bool = False  # the lower bound of a candidate's time depends on it
    bounds_memory: bool = False  # and the memory that a candidate is expected to need
    saves_memory: bool = False  # True in place of False saves memory
    of_shards: bool = False  # the axis says how tensor-parallel ranks work; other plans have its default
    matters: Callable[["Candidate"], bool] = lambda candidate: True
    alike: Callable[[Sequence[Any]], Any] = lambda tried: tried[0]
    heading: str = ""  # the axis has a column under this heading in tables; empty: no column
    label: str | None = None  # stands before the value in the words for a plan; None: see ``unusual``
    unusual: str = ""  # the words for another value than the default, where only such a value is named; {} is the value
    tag: str = ""  # the words for such a value in the name of a trial; empty: none


def _axis(**of: Any) -> Any:
    if of.get("of_shards"):
        of |= {"matters": lambda candidate: candidate.tp > 1, "alike": lambda tried: of["default"]}
    axis = PlanAxis(**of)
    return field(default=MISSING if axis.default is None else axis.default, metadata={"axis": axis})


def divisors_of(count: int) -> list[int]:
    """The numbers that divide ``count``, from 1 up."""
    return [number for number in range(1, count + 1) if count % number == 0]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One value of each axis. A Plan is made from it."""

    dp: int = _axis(
        meaning="data-parallel degree",
        trying="data-parallel degrees to try; auto: every divisor of the number of devices",
        every=lambda cluster, batch: divisors_of(cluster.devices),
        least=1,
        is_degree=True,
        heading="dp",
        label="dp=",
    )
    tp: int = _axis(
        meaning="tensor-parallel degree",
        trying="tensor-parallel degrees to try; auto: every divisor of the number of devices of each node",
        every=lambda cluster, batch: divisors_of(gcd(*(node.devices for node in cluster.nodes))),
        least=1,
        is_degree=True,
        heading="tp",
        label="tp=",
    )
    pp: int = _axis(
        meaning="pipeline depth",
        trying="pipeline depths to try; auto: every divisor of the number of devices",
        every=lambda cluster, batch: divisors_of(cluster.devices),
        least=1,
        is_degree=True,
        heading="pp",
        label="pp=",
    )
    micro_batch_size: int = _axis(
        meaning="samples per micro-batch",
        trying="samples per micro-batch to try; auto: every power of 2 up to the global batch",
        every=lambda cluster, batch: [2**power for power in range(batch.bit_length())],
        least=1,
        is_degree=True,
        heading="micro-\nbatch",
        label="micro-batch=",
    )
    schedule: str = _axis(
        default="1f1b",
        meaning="pipeline schedule",
        trying="pipeline schedules to try, which may have options, as in interleaved-1f1b:chunks=4; auto: all "
        "synchronous ones but synthesized, which is found by a search of its own, and seq1f1b, which needs a causal "
        "model",
        every=lambda cluster, batch: [name for name, family in SCHEDULES.items() if family.automatic],
        takes=tuple(SCHEDULES),
        options=True,
        bounds_time=True,
        matters=lambda candidate: candidate.pp > 1,
        alike=lambda tried: "1f1b" if "1f1b" in tried else tried[0],
        heading="schedule",
        label="",
    )
    recompute: int | float | str = _axis(  # NONE, FULL, AUTO, or a fraction from 0 to 1
        default=NONE,
        meaning="what stages compute again for the backward; a number: all but this fraction of the first stage's "
        "subgraphs, while the other stages keep the fraction that costs as much memory; auto: the largest fraction "
        "that fits into the devices' memory",
        trying="recomputation to try: values that plan.recompute takes",
        tried=(NONE,),
        every=lambda cluster, batch: [NONE, FULL] if cluster.memory_bytes is None else [AUTO],
        takes=(NONE, FULL, AUTO),
        least=0,
        most=1,
        bounds_time=True,
        bounds_memory=True,
        heading="recompute",
        label="recompute=",
    )
    partition: str = _axis(
        default="uniform",
        meaning="way to cut the model into stages (docs/partition.md)",
        trying="ways to cut the model into stages; auto: all",
        tried=("uniform",),
        every=lambda cluster, batch: list(SEARCHED_METHODS),
        takes=tuple(STAGE_METHODS),
        heading="partition",
        label="",
    )
    placement: str = _axis(
        default=MEGATRON,
        meaning="order of the ranks on the cluster (docs/search.md)",
        trying="ways to place ranks on the cluster; auto: on several nodes Megatron-LM's order, other orders, and "
        "AMP's tilings; on one node only Megatron-LM's, since all are alike there",
        every=lambda cluster, batch: list(PLACEMENTS) if len(cluster.nodes) > 1 else [MEGATRON],
        takes=tuple(PLACEMENTS),
        matters=lambda candidate: candidate.replicas == EQUAL,  # uneven replicas have their own order of ranks
        heading="placement",
        label="",
    )
    replicas: str = _axis(
        default=EQUAL,
        meaning="replicas of stages: equal, or uneven (each pipeline has more devices than stages; slower stages get "
        "more)",
        trying="values of plan.replicas to try",
        tried=(EQUAL,),
        every=lambda cluster, batch: REPLICAS,
        takes=REPLICAS,
        is_degree=True,
        heading="replicas\nof stages",
        unusual="uneven replicas",
    )
    """Replicas of stages. equal: one replica per stage, so the plan uses dp × tp × pp devices; uneven: a pipeline has
    more devices than stages."""
    sync: str = _axis(  # positions of gradient syncs, which decide how much of them compute hides
        default=SYNC[0],
        trying="when gradient syncs run: lazy: after all else; eager: beside compute; eager-opt: beside compute where "
        "that hides them",
        tried=(SYNC[0],),
        every=lambda cluster, batch: SYNC,
        takes=SYNC,
        matters=lambda candidate: candidate.pp > 1,
        unusual="sync={}",
    )
    shard_optimizer: bool = _axis(
        default=False,
        meaning="ZeRO-1: each rank that holds a copy of a parameter keeps only its own shard of the optimizer's state",
        trying="ZeRO-1 or not, as in plan.shard_optimizer",
        tried=(False,),
        every=lambda cluster, batch: (False, True),
        takes=(False, True),
        bounds_memory=True,
        saves_memory=True,
        matters=lambda candidate: candidate.dp > 1 or candidate.replicas == UNEVEN,
        heading="ZeRO-1",
        unusual="ZeRO-1",
    )
    sequence_parallel: bool = _axis(
        default=False,
        meaning="with tp of 2 or more: the ranks of a tensor-parallel group also split norms and dropout, along the "
        "sequence",
        trying="sequence parallelism or not, as in plan.sequence_parallel, where tp is 2 or more",
        tried=(False,),
        every=lambda cluster, batch: (False, True),
        takes=(False, True),
        bounds_time=True,
        bounds_memory=True,
        saves_memory=True,
        of_shards=True,
        heading="sequence-\nparallel",
        unusual="sequence-parallel",
        tag="sp",
    )
    tensor_overlap: str = _axis(
        default=NO_OVERLAP,
        meaning="with tp of 2 or more, how its collectives are hidden; sub-pipelined: each micro-batch is computed in "
        "two halves, and the collective of one runs beside the compute of the other",
        trying="values of plan.tensor_overlap to try where tp is 2 or more",
        tried=(NO_OVERLAP,),
        every=lambda cluster, batch: list(TENSOR_OVERLAPS),
        takes=tuple(TENSOR_OVERLAPS),
        bounds_time=True,
        of_shards=True,
        heading="tensor\noverlap",
        unusual="{}",
        tag="{}",
    )
    engine: str = _axis(
        default=AUTO3D,
        trying="runtimes that `auto3d sweep` measures: auto3d, or peers of it for comparison (docs/peers.md); auto: "
        "all",
        tried=(AUTO3D,),
        every=lambda cluster, batch: list(ENGINES),
        takes=tuple(ENGINES),
        is_degree=True,
        heading="engine",
        unusual="{}",
    )
    cuts: tuple[int, ...] | None = None
    """Bounds of the stages, as indices into the model's cuts; they override ``partition``. No axis."""
    kept: tuple[float, ...] | None = None
    """The fraction of its subgraphs that each stage keeps, where ``recompute`` is full. No axis."""

    def __str__(self) -> str:
        return f"{usual_choices(vars(self))} {self.more}".rstrip()

    @property
    def more(self) -> str:
        """The unusual choices, in words."""
        return ", ".join(unusual_choices(vars(self)))


AXES: dict[str, PlanAxis] = {
    field.name: field.metadata["axis"] for field in fields(Candidate) if "axis" in field.metadata
}
TYPES: dict[str, Any] = get_type_hints(Candidate)
DEGREES = tuple(name for name, axis in AXES.items() if axis.is_degree)
CHOICES = tuple(name for name, axis in AXES.items() if not axis.is_degree)
_OF_PLAN = get_type_hints(Plan)
OF_PLANS = tuple(name for name in AXES if _OF_PLAN.get(name) == TYPES[name])
"""The axes whose values a Plan holds. What became of the others shows in its stages, placement and options."""


DEFAULTS_OF_SHARDS = {name: axis.default for name, axis in AXES.items() if axis.of_shards}
"""The values of these axes in every plan without tensor parallelism."""


def degrees_of(candidate: Candidate) -> tuple:
    """The values of DEGREES."""
    return tuple(getattr(candidate, name) for name in DEGREES)


def unusual_choices(values: Mapping[str, Any]) -> list[str]:
    """The words for the ``values`` that are not the default, of the axes that are not named in every plan."""
    return [
        axis.unusual.format(values[name]) or f"{name}={values[name]}"
        for name, axis in AXES.items()
        if axis.label is None and values.get(name, axis.default) != axis.default
    ]


def usual_choices(values: Mapping[str, Any]) -> str:
    """The words for the values, of ``values``, that are named in every plan."""
    return " ".join(
        f"{axis.label}{values[name]}" for name, axis in AXES.items() if axis.label is not None and name in values
    )


def schedule_of_axis(plan: Plan) -> str:
    """The schedule of ``plan`` with its options, as a Candidate has it: recomputation is another axis."""
    options = {name: value for name, value in plan.schedule_options.items() if name != "recompute"}
    return write_schedule(plan.schedule, options)


def plan_name(plan: Plan) -> str:
    """The choices that ``plan`` holds, in words; two plans of one name differ in stages or placement."""
    options = {name: value for name, value in plan.schedule_options.items() if name != "times"}  # the model's, long
    schedule = write_schedule(plan.schedule, options)
    values = {name: getattr(plan, name) for name in OF_PLANS} | {"schedule": schedule}
    return ", ".join([usual_choices(values), *unusual_choices(values)])
