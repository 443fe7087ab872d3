"""The search space: its axes, and the candidates that they span."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd, prod
from re import sub
from typing import Literal

from auto3d.cluster import Cluster
from auto3d.errors import InputError, ProblemKind
from auto3d.partition.methods import SEARCHED_METHODS
from auto3d.plan import AUTO3D, ENGINES, NO_OVERLAP, TENSOR_OVERLAPS, PlanError, check_degrees
from auto3d.schedule import SCHEDULES
from auto3d.schedule.options import SYNC
from auto3d.search.placement import MEGATRON, PLACEMENTS
from auto3d.search.recompute import AUTO, FULL, NONE

Axis = Sequence | Literal["auto"]
ORDER_SECONDS = 5.0  # default time of the search for the order of one plan, if its first result fits the memory
EQUAL, UNEVEN = REPLICAS = ("equal", "uneven")


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The axes to combine. Each is a list of values, or "auto" for all values that make sense on the cluster.

    "auto" leaves out asynchronous schedules, since they change what a model learns, and the synthesized one, which is
    found by a search of its own; a user has to name them. It has the tensor-parallel degrees whose groups fit into one
    node and, if there is only one node, one placement.
    """

    dp: Axis = AUTO
    tp: Axis = AUTO
    pp: Axis = AUTO
    micro_batch_size: Axis = AUTO
    schedule: Axis = AUTO  # names, optionally with options, as in interleaved-1f1b:chunks=4
    recompute: Axis = (NONE,)  # none, full, auto, or fractions from 0 to 1
    partition: Axis = ("uniform",)
    placement: Axis = AUTO
    replicas: Axis = (EQUAL,)
    sync: Axis = (SYNC[0],)  # positions of gradient syncs, which decide how much of them compute hides
    shard_optimizer: Axis = (False,)  # ZeRO-1
    sequence_parallel: Axis = (False,)  # norms and dropout on a sequence that the tensor-parallel ranks split
    tensor_overlap: Axis = (NO_OVERLAP,)  # keys of TENSOR_OVERLAPS
    micro_batches: Axis = AUTO  # micro-batches of a pipeline in an iteration; [1] is no gradient accumulation
    engine: Axis = (AUTO3D,)  # keys of ENGINES
    allow_idle_devices: bool = False  # a plan may use fewer devices than the cluster has


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every plan has to train, whatever its degrees and choices."""

    global_batch: int
    seed: int
    clip_norm: float = 0.0  # limit of the gradient norm; 0: no clipping. Not every schedule can clip


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One value of each axis. A Plan is made from it."""

    dp: int
    tp: int
    pp: int
    micro_batch_size: int
    schedule: str = "1f1b"
    recompute: str | float = NONE
    partition: str = "uniform"
    placement: str = MEGATRON
    replicas: str = EQUAL
    """Replicas of stages. equal: one each, so the plan uses dp × tp × pp devices; uneven: a pipeline has more devices
    than stages."""
    sync: str = SYNC[0]
    shard_optimizer: bool = False
    sequence_parallel: bool = False
    tensor_overlap: str = NO_OVERLAP
    engine: str = AUTO3D
    cuts: tuple[int, ...] | None = None
    """Bounds of the stages, as indices into the model's cuts; they override ``partition``."""

    def __str__(self) -> str:
        return (
            f"dp={self.dp} tp={self.tp} pp={self.pp} micro-batch={self.micro_batch_size} {self.schedule} "
            f"recompute={self.recompute} {self.partition} {self.placement} {self.more}"
        ).rstrip()

    @property
    def more(self) -> str:
        """The unusual choices, in words."""
        unusual = {
            "uneven replicas": self.replicas == UNEVEN,
            f"sync={self.sync}": self.sync != SYNC[0],
            "ZeRO-1": self.shard_optimizer,
            "sequence-parallel": self.sequence_parallel,
            self.tensor_overlap: self.tensor_overlap != NO_OVERLAP,
            self.engine: self.engine != AUTO3D,
        }
        return ", ".join(words for words, holds in unusual.items() if holds)


DEGREES = ("dp", "tp", "pp", "micro_batch_size", "replicas", "engine")
CHOICES = (  # the other axes
    "schedule",
    "recompute",
    "partition",
    "placement",
    "sync",
    "shard_optimizer",
    "sequence_parallel",
    "tensor_overlap",
)


def degrees_of(candidate: Candidate) -> tuple:
    """The values of DEGREES."""
    return tuple(getattr(candidate, name) for name in DEGREES)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A reason for which ``count`` candidates were refused, as it stands for the candidate ``example``."""

    count: int
    example: Candidate
    reason: str
    kind: ProblemKind


class Refusals:
    """Counts of refused candidates by reason. Reasons that differ only in their numbers count as one."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, tuple[Candidate, str, ProblemKind]] = {}

    def add(self, candidate: Candidate, reason: str, kind: ProblemKind = "other", *, times: int = 1) -> None:
        words = without_numbers(reason)
        self._counts[words] += times
        self._examples.setdefault(words, (candidate, reason, kind))

    def __iter__(self) -> Iterator[Refusal]:
        """Each reason, the most common first."""
        for words, times in self._counts.most_common():
            example, reason, kind = self._examples[words]
            yield Refusal(count=times, example=example, reason=reason, kind=kind)

    @property
    def foremost(self) -> Refusal:
        """The most common lack of memory, which says more than degrees that do not fit; else the most common reason."""
        return next((one for one in self if one.kind == "memory"), next(iter(self)))

    def __add__(self, other: "Refusals") -> "Refusals":
        both = Refusals()
        both._counts = self._counts + other._counts
        both._examples = other._examples | self._examples
        return both

    @property
    def total(self) -> int:
        return self._counts.total()


def without_numbers(reason: str) -> str:
    """``reason`` with N for each number, so that reasons of the same kind are equal."""
    return sub(r"\d[\d.e+,-]*", "N", reason.split(": weights")[0])


class Domain:
    """The candidates of ``space`` on ``cluster``.

    Degrees that need another number of devices than the cluster has are not part of the space. Of the others,
    ``degrees`` has those that fit together, and ``refused`` those that do not. ``choices`` has the values of each other
    axis.
    """

    def __init__(self, space: SearchSpace, cluster: Cluster, workload: Workload) -> None:
        self.cluster, self.workload = cluster, workload
        self._allow_idle, self._micro_batches = space.allow_idle_devices, space.micro_batches
        divisors = [number for number in range(1, cluster.devices + 1) if cluster.devices % number == 0]
        in_a_node = gcd(*(node.devices for node in cluster.nodes))
        sizes = [2**power for power in range(workload.global_batch.bit_length()) if 2**power <= workload.global_batch]
        every = {
            "dp": divisors,
            "tp": [number for number in divisors if in_a_node % number == 0],
            "pp": divisors,
            "micro_batch_size": sizes,
            "schedule": [name for name, family in SCHEDULES.items() if family.automatic],
            "recompute": [NONE, FULL] if cluster.memory_bytes is None else [AUTO],
            "partition": list(SEARCHED_METHODS),
            "placement": list(PLACEMENTS) if len(cluster.nodes) > 1 else [MEGATRON],
            "replicas": [EQUAL, UNEVEN],
            "sync": list(SYNC),
            "shard_optimizer": [False, True],
            "sequence_parallel": [False, True],
            "tensor_overlap": list(TENSOR_OVERLAPS),
            "engine": list(ENGINES),
        }
        self._values = {
            name: auto if getattr(space, name) == AUTO else list(dict.fromkeys(getattr(space, name)))
            for name, auto in every.items()
        }
        self.choices = {name: self._values[name] for name in CHOICES}
        schedules = self.choices["schedule"]
        self._schedule_of_one = "1f1b" if "1f1b" in schedules else schedules[0]

    @cached_property
    def degrees(self) -> list[Candidate]:
        """One candidate for each possible combination of degrees and micro-batch size, with the first other choices."""
        return [candidate for candidate in self._all_degrees() if not self._misfit(candidate)]

    @cached_property
    def refused(self) -> Refusals:
        """The reasons why degrees do not fit together; the numbers of devices only if no degrees have the right one."""
        found, variants = Refusals(), prod(map(len, self.choices.values()))
        for candidate in self._all_degrees():
            if reason := self._misfit(candidate):
                found.add(candidate, reason, times=variants)
        if not found.total and not self.degrees:
            for candidate in self._any_degrees():
                found.add(candidate, self._wrong_devices(candidate), times=variants)
        return found

    def __iter__(self) -> Iterator[Candidate]:
        for candidate in self.degrees:
            yield from self.variants(candidate)

    def __len__(self) -> int:
        return self._size

    @cached_property
    def _size(self) -> int:
        return sum(map(self.variants_of, self.degrees))

    def variants_of(self, candidate: Candidate) -> int:
        """The number of candidates with the degrees of ``candidate``."""
        return prod(map(len, self.choices_of(candidate).values()))

    def choices_of(self, candidate: Candidate) -> dict[str, list]:
        """The choices for the degrees of ``candidate``; an axis that makes no difference to them has one choice."""
        single: dict[str, list] = {}
        if candidate.pp == 1:
            single |= {"schedule": [self._schedule_of_one], "sync": self.choices["sync"][:1]}
        if candidate.tp == 1:
            single |= {"sequence_parallel": [False], "tensor_overlap": [NO_OVERLAP]}
        if candidate.replicas == UNEVEN:  # uneven replicas have their own order of ranks
            single["placement"] = self.choices["placement"][:1]
        elif candidate.dp == 1:
            single["shard_optimizer"] = self.choices["shard_optimizer"][:1]
        return {**self.choices, **single}

    def variants(self, candidate: Candidate) -> Iterator[Candidate]:
        """All candidates with the degrees of ``candidate``."""
        choices = self.choices_of(candidate)
        for values in product(*choices.values()):
            yield replace(candidate, **dict(zip(choices, values, strict=True)))

    def everything(self) -> Iterator[tuple[Candidate, str]]:
        """Every combination, with the reason why its degrees do not fit, or an empty string if they do."""
        for candidate in self._all_degrees():
            reason = self._misfit(candidate)
            for values in product(*self.choices.values()):
                yield replace(candidate, **dict(zip(self.choices, values, strict=True))), reason

    def _all_degrees(self) -> Iterator[Candidate]:
        """All degrees with the right number of devices."""
        return (candidate for candidate in self._any_degrees() if not self._wrong_devices(candidate))

    def _any_degrees(self) -> Iterator[Candidate]:
        first = {name: values[0] for name, values in self.choices.items()}
        for values in product(*(self._values[name] for name in DEGREES)):
            yield Candidate(**dict(zip(DEGREES, values, strict=True)), **first)

    def _wrong_devices(self, candidate: Candidate) -> str:
        """The reason why the degrees of ``candidate`` do not fit the cluster's number of devices; empty if they do."""
        try:
            check_devices(candidate, self.cluster)
        except InputError as error:
            return str(error)
        needed, there = candidate.dp * candidate.tp * candidate.pp, self.cluster.devices
        if needed < there and candidate.replicas == EQUAL and not self._allow_idle:
            return f"uses {needed} of {there} devices, and allow_idle_devices is false"
        return ""

    def _misfit(self, candidate: Candidate) -> str:
        try:
            check_fits(candidate, self.cluster, self.workload)
        except InputError as error:
            return str(error)
        count = self.workload.global_batch // (candidate.dp * candidate.micro_batch_size)
        if self._micro_batches != AUTO and count not in self._micro_batches:
            return f"has {count} micro-batches; micro_batches is {', '.join(map(str, self._micro_batches))}"
        return ""


def check_fits(candidate: Candidate, cluster: Cluster, workload: Workload) -> None:
    """Raise PlanError if the degrees of ``candidate`` do not fit the cluster and the global batch."""
    check_devices(candidate, cluster)
    degrees = {name: getattr(candidate, name) for name in ("dp", "tp", "pp", "micro_batch_size")}
    check_degrees(**degrees, global_batch=workload.global_batch)


def check_devices(candidate: Candidate, cluster: Cluster) -> None:
    """Raise PlanError if the cluster has too few devices for ``candidate``, or cannot be shared by uneven replicas."""
    needed = candidate.dp * candidate.tp * candidate.pp
    if candidate.replicas == UNEVEN:
        pipelines, devices = candidate.dp * candidate.tp, cluster.devices
        if candidate.pp < 2 or devices % pipelines or devices // pipelines <= candidate.pp:
            raise PlanError(
                f"replicas: uneven ones need pp of 2 or more and more devices than stages in each pipeline; {devices} "
                f"devices in dp × tp = {pipelines} pipelines of pp = {candidate.pp} stages do not have that"
            )
    if needed > cluster.devices:
        raise PlanError(f"needs {needed} devices; the cluster has {cluster.devices}")
