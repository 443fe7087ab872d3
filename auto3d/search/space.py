"""The search space: its axes, and the candidates that they make."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from re import sub
from typing import Literal

from auto3d.cluster import Cluster
from auto3d.errors import InputError
from auto3d.partition.methods import STAGE_METHODS
from auto3d.plan import PlanError, check_degrees
from auto3d.schedule import SCHEDULES
from auto3d.schedule.options import SYNC
from auto3d.search.placement import MEGATRON, PLACEMENTS
from auto3d.search.recompute import AUTO, FULL, NONE

Axis = Sequence | Literal["auto"]
EQUAL, UNEVEN = REPLICAS = ("equal", "uneven")
PARTITIONS = STAGE_METHODS


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Axes to combine; each is a list of values, or "auto" for all that make sense on the cluster.

    Asynchronous schedules make sense to those alone who name them: under them a model learns something else.
    """

    dp: Axis = AUTO
    tp: Axis = (1,)
    pp: Axis = AUTO
    micro_batch_size: Axis = AUTO
    schedule: Axis = AUTO  # names, with options of their own as in interleaved-1f1b:chunks=4
    recompute: Axis = (NONE,)  # of none, full, auto, and shares from 0 to 1
    partition: Axis = ("uniform",)
    placement: Axis = (MEGATRON,)
    replicas: Axis = (EQUAL,)
    sync: Axis = (SYNC[0],)  # where gradient syncs stand: which of them overlap with compute
    shard_optimizer: Axis = (False,)  # ZeRO-1
    allow_idle_devices: bool = False  # whether a plan may use fewer devices than there are


@dataclass(frozen=True, kw_only=True)
class Task:
    """What training asks of every plan."""

    global_batch: int
    seed: int
    clip_norm: float = 0.0  # what the gradient norm is clipped to, if above 0: not every schedule can


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One value of each axis: what a Plan is made from."""

    dp: int
    tp: int
    pp: int
    micro_batch_size: int
    schedule: str = "1f1b"
    recompute: str | float = NONE
    partition: str = "uniform"
    placement: str = MEGATRON
    replicas: str = EQUAL
    """Of stages: equal, so that dp × tp × pp devices are used; or uneven: a pipeline has more devices than stages."""
    sync: str = SYNC[0]
    shard_optimizer: bool = False
    cuts: tuple[int, ...] | None = None
    """Bounds of the stages, as numbers of the model's cuts; they take the place of ``partition``."""

    def __str__(self) -> str:
        return (
            f"dp={self.dp} tp={self.tp} pp={self.pp} micro-batch={self.micro_batch_size} {self.schedule} "
            f"recompute={self.recompute} {self.partition} {self.placement} {self.more}"
        ).rstrip()

    @property
    def more(self) -> str:
        """What of it is out of the ordinary, in words."""
        found = {
            "uneven replicas": self.replicas == UNEVEN,
            f"sync={self.sync}": self.sync != SYNC[0],
            "ZeRO-1": self.shard_optimizer,
        }
        return ", ".join(words for words, holds in found.items() if holds)


DEGREES = ("dp", "tp", "pp", "micro_batch_size", "replicas")
CHOICES = ("schedule", "recompute", "partition", "placement", "sync", "shard_optimizer")  # the other axes


class Refusals:
    """How many candidates cannot be, by reason; reasons that differ in their numbers alone are one."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, tuple[Candidate, str]] = {}

    def add(self, candidate: Candidate, reason: str, times: int = 1) -> None:
        words = sub(r"\d[\d.e+,-]*", "N", reason.split(": weights")[0])
        self._counts[words] += times
        self._examples.setdefault(words, (candidate, reason))

    def __iter__(self) -> Iterator[tuple[int, Candidate, str]]:
        """Commonest first: how many, and one of them with its reason."""
        for words, times in self._counts.most_common():
            yield times, *self._examples[words]

    def __add__(self, other: "Refusals") -> "Refusals":
        both = Refusals()
        both._counts = self._counts + other._counts
        both._examples = other._examples | self._examples
        return both

    @property
    def total(self) -> int:
        return self._counts.total()


class Domain:
    """The candidates of ``space`` on ``cluster``: ``degrees`` that fit together, and ``choices`` for each of the other
    axes. ``refused`` has those that do not fit together."""

    def __init__(self, space: SearchSpace, cluster: Cluster, task: Task) -> None:
        self.cluster, self.task = cluster, task
        self._allow_idle = space.allow_idle_devices
        divisors = [number for number in range(1, cluster.devices + 1) if cluster.devices % number == 0]
        sizes = [2**power for power in range(task.global_batch.bit_length()) if 2**power <= task.global_batch]
        every = {
            "dp": divisors,
            "tp": divisors,
            "pp": divisors,
            "micro_batch_size": sizes,
            "schedule": [name for name, family in SCHEDULES.items() if not family.asynchronous],
            "recompute": [NONE, FULL] if cluster.memory_bytes is None else [AUTO],
            "partition": list(STAGE_METHODS),
            "placement": list(PLACEMENTS),
            "replicas": [EQUAL, UNEVEN],
            "sync": list(SYNC),
            "shard_optimizer": [False, True],
        }
        self._values = {
            name: auto if getattr(space, name) == AUTO else list(dict.fromkeys(getattr(space, name)))
            for name, auto in every.items()
        }
        self.choices = {name: self._values[name] for name in CHOICES}
        schedules = self.choices["schedule"]
        self._alone = "1f1b" if "1f1b" in schedules else schedules[0]

    @cached_property
    def degrees(self) -> list[Candidate]:
        """One candidate, with the first of all other choices, for all that are of its degrees and micro-batch size."""
        return [candidate for candidate in self._all_degrees() if not self._misfit(candidate)]

    @cached_property
    def refused(self) -> Refusals:
        found = Refusals()
        for candidate in self._all_degrees():
            if reason := self._misfit(candidate):
                found.add(candidate, reason, times=prod(map(len, self.choices.values())))
        return found

    def __iter__(self) -> Iterator[Candidate]:
        for candidate in self.degrees:
            yield from self.variants(candidate)

    def __len__(self) -> int:
        return self._size

    @cached_property
    def _size(self) -> int:
        return sum(prod(map(len, self.choices_of(candidate).values())) for candidate in self.degrees)

    def choices_of(self, candidate: Candidate) -> dict[str, list]:
        """Those of its degrees: where an axis makes no difference to them, a single choice stands for all."""
        single = {}
        if candidate.pp == 1:
            single |= {"schedule": [self._alone], "sync": self.choices["sync"][:1]}
        if candidate.replicas == UNEVEN:  # which have an order of ranks of their own
            single["placement"] = self.choices["placement"][:1]
        elif candidate.dp == 1:
            single["shard_optimizer"] = self.choices["shard_optimizer"][:1]
        return {**self.choices, **single}

    def variants(self, candidate: Candidate) -> Iterator[Candidate]:
        """All candidates of its degrees."""
        choices = self.choices_of(candidate)
        for values in product(*choices.values()):
            yield replace(candidate, **dict(zip(choices, values, strict=True)))

    def everything(self) -> Iterator[tuple[Candidate, str]]:
        """Every combination, with the reason where its degrees do not fit."""
        for candidate in self._all_degrees():
            reason = self._misfit(candidate)
            for values in product(*self.choices.values()):
                yield replace(candidate, **dict(zip(self.choices, values, strict=True))), reason

    def _all_degrees(self) -> Iterator[Candidate]:
        first = {name: values[0] for name, values in self.choices.items()}
        for values in product(*(self._values[name] for name in DEGREES)):
            yield Candidate(**dict(zip(DEGREES, values, strict=True)), **first)

    def _misfit(self, candidate: Candidate) -> str:
        needed, there = candidate.dp * candidate.tp * candidate.pp, self.cluster.devices
        if needed < there and candidate.replicas == EQUAL and not self._allow_idle:
            return f"uses {needed} of {there} devices, and allow_idle_devices is false"
        try:
            check_fits(candidate, self.cluster, self.task)
        except InputError as error:
            return str(error)
        return ""


def check_fits(candidate: Candidate, cluster: Cluster, task: Task) -> None:
    """Raise PlanError where its degrees do not fit the cluster and the global batch."""
    needed = candidate.dp * candidate.tp * candidate.pp
    if candidate.replicas == UNEVEN:
        pipelines, devices = candidate.dp * candidate.tp, cluster.devices
        if candidate.pp < 2 or devices % pipelines or devices // pipelines <= candidate.pp:
            raise PlanError(
                f"replicas: uneven ones need pp of 2 or more and more devices than stages in each pipeline; {devices} "
                f"devices in dp × tp = {pipelines} pipelines of pp = {candidate.pp} have not"
            )
    if needed > cluster.devices:
        raise PlanError(f"needs {needed} devices; the cluster has {cluster.devices}")
    degrees = {name: getattr(candidate, name) for name in ("dp", "tp", "pp", "micro_batch_size")}
    check_degrees(**degrees, global_batch=task.global_batch)
