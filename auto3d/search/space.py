"""The search space: every combination of its axes, made a Plan or refused with a reason."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from auto3d.capture.graph import Graph
from auto3d.cluster import Cluster, place_ranks
from auto3d.errors import InputError
from auto3d.partition.stage import cut
from auto3d.partition.uniform import uniform
from auto3d.plan import Plan, PlanError, check_degrees
from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.asynchronous import check_trainable
from auto3d.schedule.memory import peak_activations
from auto3d.schedule.operation import Schedule

Axis = Sequence | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Axes to combine; each is a list of values, or "auto" for all that make sense on the cluster.

    Asynchronous schedules make sense to those alone who name them: under them a model learns something else.
    """

    dp: Axis
    tp: Axis
    pp: Axis
    micro_batch_size: Axis
    schedule: Axis
    allow_idle_devices: bool  # whether a plan may use fewer devices than there are


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One combination: either its ``plan``, or the ``reason`` why it cannot or need not run."""

    dp: int
    tp: int
    pp: int
    micro_batch_size: int
    schedule: str
    plan: Plan | None
    reason: str


def candidates(
    space: SearchSpace,
    cluster: Cluster,
    graph_at: Callable[[int], Graph],
    *,
    global_batch: int,
    seed: int,
    clip_norm: float,
) -> Iterator[Candidate]:
    """Every combination of ``space`` in order; ``graph_at`` gives the model's Graph at a micro-batch size.

    ``clip_norm`` is what training clips the gradient norm to, if above 0: not every schedule can. A size at which
    ``graph_at`` raises InputError is no candidate (batch statistics need two samples), unless it does at all: then that
    error is raised at the end.
    """
    divisors = [number for number in range(1, cluster.devices + 1) if cluster.devices % number == 0]
    sizes = [2**power for power in range(global_batch.bit_length()) if 2**power <= global_batch]

    def values(axis: Axis, auto: Sequence) -> Sequence:
        return auto if axis == "auto" else list(dict.fromkeys(axis))

    graphs = _Graphs(graph_at)
    schedules = values(space.schedule, [name for name, family in SCHEDULES.items() if not family.asynchronous])
    for dp, tp, pp, micro_batch_size, schedule in product(
        values(space.dp, divisors),
        values(space.tp, divisors),
        values(space.pp, divisors),
        values(space.micro_batch_size, sizes),
        schedules,
    ):
        plan, reason = None, ""
        try:
            _check_devices(dp * tp * pp, cluster, space.allow_idle_devices)
            check_degrees(dp=dp, tp=tp, pp=pp, global_batch=global_batch, micro_batch_size=micro_batch_size)
            plan = make_plan(
                graphs.at(micro_batch_size),
                dp=dp,
                tp=tp,
                pp=pp,
                global_batch=global_batch,
                schedule=schedule,
                seed=seed,
            )
            _check_trainable(plan, graphs.at(micro_batch_size), clip_norm)
            _check_worth(schedule, schedules, devices=pp, micro_batches=plan.micro_batches)
        except InputError as error:
            plan, reason = None, str(error)
        yield Candidate(
            dp=dp, tp=tp, pp=pp, micro_batch_size=micro_batch_size, schedule=schedule, plan=plan, reason=reason
        )
    graphs.check()


class _Graphs:
    """Each Graph is asked for once, also where the model cannot be captured."""

    def __init__(self, graph_at: Callable[[int], Graph]) -> None:
        self._graph_at = graph_at
        self._found: dict[int, Graph | InputError] = {}

    def at(self, micro_batch_size: int) -> Graph:
        if micro_batch_size not in self._found:
            try:
                self._found[micro_batch_size] = self._graph_at(micro_batch_size)
            except InputError as error:
                self._found[micro_batch_size] = error
        found = self._found[micro_batch_size]
        if isinstance(found, InputError):
            raise found
        return found

    def check(self) -> None:
        """Raise the first error if there was nothing else."""
        found = list(self._found.values())
        if found and all(isinstance(one, InputError) for one in found):
            raise found[0]


def make_plan(graph: Graph, *, dp: int, tp: int, pp: int, global_batch: int, schedule: str, seed: int) -> Plan:
    """The Plan of these degrees, with uniform stages and the default placement; its micro-batch size is the Graph's."""
    micro_batches = global_batch // (dp * graph.micro_batch_size)
    shape = build_schedule(schedule, devices=pp, micro_batches=micro_batches)
    return Plan(
        graph=graph.fingerprint,
        dp=dp,
        tp=tp,
        pp=pp,
        global_batch=global_batch,
        micro_batch_size=graph.micro_batch_size,
        schedule=schedule,
        stages=uniform(graph, shape.stages),
        placement=place_ranks(dp=dp, pp=pp),
        seed=seed,
    )


def _check_trainable(plan: Plan, graph: Graph, clip_norm: float) -> None:
    if SCHEDULES[plan.schedule].asynchronous:
        schedule = build_schedule(plan.schedule, devices=plan.pp, micro_batches=plan.micro_batches)
        check_trainable(schedule, cut(graph, plan.stages), graph.trained, clip_norm=clip_norm)


def _check_worth(schedule: str, schedules: Sequence[str], *, devices: int, micro_batches: int) -> None:
    """Raise PlanError if another of ``schedules`` cannot be worse than ``schedule`` at these sizes."""
    built, reasons = _built(schedules, devices, micro_batches)
    if schedule in reasons:
        raise PlanError(reasons[schedule])
    names = list(built)
    earlier = names[: names.index(schedule)]
    same = [name for name in earlier if built[name].operations == built[schedule].operations]
    if same:
        raise PlanError(f"the same operations as {same[0]}")
    if devices == 1:
        leanest = min(names, key=lambda name: max(peak_activations(built[name])))
        if schedule != leanest:
            raise PlanError(f"one device has no pipeline: as fast as {leanest}, which holds no more activations")


def _built(schedules: Sequence[str], devices: int, micro_batches: int) -> tuple[dict[str, Schedule], dict[str, str]]:
    """Of ``schedules`` at these sizes: those that there are, and the reasons why there are no others."""
    built, reasons = {}, {}
    for name in schedules:
        try:
            built[name] = build_schedule(name, devices=devices, micro_batches=micro_batches)
        except InputError as error:
            reasons[name] = str(error)
    return built, reasons


def _check_devices(needed: int, cluster: Cluster, allow_idle: bool) -> None:
    if needed > cluster.devices:
        raise PlanError(f"needs {needed} devices; the cluster has {cluster.devices}")
    if needed < cluster.devices and not allow_idle:
        raise PlanError(f"uses {needed} of {cluster.devices} devices, and allow_idle_devices is false")
