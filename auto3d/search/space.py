"""The search space: its axes, and the candidates that they span."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from re import sub
from typing import Any

from auto3d.cluster import Cluster
from auto3d.errors import InputError, ProblemKind
from auto3d.plan import PlanError, check_degrees
from auto3d.search.axes import AXES, CHOICES, DEGREES, EQUAL, UNEVEN, Candidate, Tried
from auto3d.search.recompute import AUTO

ORDER_SECONDS = 5.0  # default time of the search for the order of one plan, if its first result fits the memory

_Axes: Any = make_dataclass(
    "_Axes", [(name, Tried, field(default=axis.tried)) for name, axis in AXES.items()], frozen=True, kw_only=True
)


@dataclass(frozen=True, kw_only=True)
class SearchSpace(_Axes):
    """The axes to combine, by the names in AXES. Each is a list of values, or "auto" for all that make sense there.

    "auto" leaves out asynchronous schedules, since they change what a model learns, and the synthesized schedule, which
    is found by a search of its own; a user has to name them. It has the tensor-parallel degrees whose groups fit into
    one node and, if there is only one node, one placement.
    """

    micro_batches: Tried = AUTO  # micro-batches of a pipeline in an iteration; [1] is no gradient accumulation
    allow_idle_devices: bool = False  # a plan may use fewer devices than the cluster has


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every plan has to train, whatever its degrees and choices."""

    global_batch: int
    seed: int
    clip_norm: float = 0.0  # limit of the gradient norm; 0: no clipping. Not every schedule can clip


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
        return next((refusal for refusal in self if refusal.kind == "memory"), next(iter(self)))

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
        self._values: dict[str, list] = {}
        for name, axis in AXES.items():
            tried = getattr(space, name)
            every = axis.every(cluster, workload.global_batch) if tried == AUTO else tried
            self._values[name] = list(dict.fromkeys(every))
        self.choices = {name: self._values[name] for name in CHOICES}

    @cached_property
    def degrees(self) -> list[Candidate]:
        """One candidate for each possible combination of degrees and micro-batch size, with the first other choices."""
        return [candidate for candidate in self._all_degrees() if not self._misfit(candidate)]

    @cached_property
    def refused(self) -> Refusals:
        """The reasons why degrees do not fit together; the numbers of devices only if no degrees use all devices."""
        refusals, variants = Refusals(), prod(map(len, self.choices.values()))
        for candidate in self._all_degrees():
            if reason := self._misfit(candidate):
                refusals.add(candidate, reason, times=variants)
        if not refusals.total and not self.degrees:
            for candidate in self._any_degrees():
                refusals.add(candidate, self._wrong_devices(candidate), times=variants)
        return refusals

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
        return {
            name: tried if AXES[name].matters(candidate) else [AXES[name].alike(tried)]
            for name, tried in self.choices.items()
        }

    def variants(self, candidate: Candidate, axes: Collection[str] = CHOICES) -> Iterator[Candidate]:
        """All candidates with the degrees of ``candidate``, which differ from it in ``axes`` only."""
        choices = {name: values for name, values in self.choices_of(candidate).items() if name in axes}
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
