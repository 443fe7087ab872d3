"""The search space: every combination of its axes, made a Plan or refused with a reason."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from auto3d.capture.graph import Graph
from auto3d.cluster import Cluster, place_ranks
from auto3d.cost.memory import in_gib, predict
from auto3d.errors import InputError
from auto3d.partition.stage import cut
from auto3d.partition.uniform import uniform
from auto3d.plan import Plan, PlanError, check_degrees
from auto3d.schedule import SCHEDULES, build_schedule, samples_of_part, schedule_of
from auto3d.schedule.asynchronous import check_trainable
from auto3d.schedule.memory import peak_activations
from auto3d.schedule.operation import Schedule
from auto3d.search.recompute import AUTO, FULL, NONE, Shares, largest_share, schedule_options

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
    recompute: Axis  # of none, full, auto, and shares from 0 to 1
    allow_idle_devices: bool  # whether a plan may use fewer devices than there are
    schedule_options: Mapping[str, int | str] = field(default_factory=dict)  # of every schedule


@dataclass(frozen=True, kw_only=True)
class Task:
    """What training asks of every plan."""

    global_batch: int
    seed: int
    clip_norm: float  # what the gradient norm is clipped to, if above 0: not every schedule can
    optimizer_copies: int  # of each trained parameter: the optimizer's state, where memory limits plans


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One combination: either its ``plan``, or the ``reason`` why it cannot or need not run."""

    dp: int
    tp: int
    pp: int
    micro_batch_size: int
    schedule: str
    recompute: str | float
    plan: Plan | None
    reason: str


def candidates(
    space: SearchSpace, cluster: Cluster, graph_at: Callable[[int], Graph], task: Task
) -> Iterator[Candidate]:
    """Every combination of ``space`` in order; ``graph_at`` gives the model's Graph at a number of samples.

    A number at which it raises InputError is no candidate (batch statistics need two samples), unless it does at all:
    then that error is raised at the end.
    """
    divisors = [number for number in range(1, cluster.devices + 1) if cluster.devices % number == 0]
    sizes = [2**power for power in range(task.global_batch.bit_length()) if 2**power <= task.global_batch]

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
        earlier: dict[str | float, Plan] = {}
        for recompute in values(space.recompute, [AUTO]):
            degrees = {"dp": dp, "tp": tp, "pp": pp, "micro_batch_size": micro_batch_size}
            plan, reason = None, ""
            try:
                _check_devices(dp * tp * pp, cluster, space.allow_idle_devices)
                check_degrees(**degrees, global_batch=task.global_batch)
                plan = _make_plan(
                    graphs.at,
                    task,
                    **degrees,
                    schedule=schedule,
                    options=space.schedule_options,
                    recompute=recompute,
                    memory_bytes=cluster.memory_bytes,
                )
                _check_worth(plan, schedules, space.schedule_options, recompute)
                same = next((other for other, present in earlier.items() if present == plan), None)
                if same is not None:
                    raise PlanError(f"the same plan as with recompute {same}")
                earlier[recompute] = plan
            except InputError as error:
                plan, reason = None, str(error)
            yield Candidate(**degrees, schedule=schedule, recompute=recompute, plan=plan, reason=reason)
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


def _make_plan(
    graph_at: Callable[[int], Graph],
    task: Task,
    *,
    dp: int,
    tp: int,
    pp: int,
    micro_batch_size: int,
    schedule: str,
    options: Mapping[str, int | str],
    recompute: str | float,
    memory_bytes: float | None,
) -> Plan:
    """The Plan of these degrees, with uniform stages and the default placement.

    Raises PlanError where its schedule cannot train the model, or a device lacks the memory for it, as far as that is
    known.
    """
    if tp != 1:
        raise PlanError(f"tp: {tp} asks for tensor parallelism, which this build does not run; tp must be 1")
    micro_batches = task.global_batch // (dp * micro_batch_size)
    own = schedule_options(schedule, options, recompute, devices=pp, micro_batches=micro_batches)
    shape = build_schedule(schedule, devices=pp, micro_batches=micro_batches, **own)
    graph = graph_at(samples_of_part(shape, micro_batch_size))
    plan = Plan(
        graph=graph.fingerprint,
        dp=dp,
        tp=tp,
        pp=pp,
        global_batch=task.global_batch,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        schedule_options=own,
        stages=uniform(graph, shape.stages),
        placement=place_ranks(dp=dp, pp=pp),
        seed=task.seed,
    )
    check_trainable(shape, cut(graph, plan.stages), graph.trained, clip_norm=task.clip_norm)

    def missing(plan: Plan) -> str:
        return shortage(graph, plan, memory_bytes, task.optimizer_copies)

    if recompute == AUTO:
        if memory_bytes is None:
            raise PlanError("recompute: auto needs to know the memory of a device")
        return largest_share(Shares(graph, plan), missing)
    if recompute not in (NONE, FULL):
        plan = Shares(graph, plan).plan(float(recompute))
    if memory_bytes is not None and (words := missing(plan)):
        raise PlanError(words)
    return plan


def shortage(graph: Graph, plan: Plan, memory_bytes: float, optimizer_copies: int) -> str:
    """Why ``plan`` does not fit into devices of ``memory_bytes``, by its estimate; nothing where it does."""
    needed = predict(graph, plan, schedule_of(plan), optimizer_copies=optimizer_copies)
    device = max(range(plan.pp), key=lambda device: needed[device].total)
    if needed[device].total <= memory_bytes:
        return ""
    return f"infeasible: pipeline device {device} needs {needed[device]}; a device has {in_gib(memory_bytes)} GiB"


def _check_worth(
    plan: Plan, schedules: Sequence[str], options: Mapping[str, int | str], recompute: str | float
) -> None:
    """Raise PlanError if another of ``schedules`` cannot be worse than that of ``plan`` at its sizes."""
    built, reasons = _built(schedules, options, recompute, devices=plan.pp, micro_batches=plan.micro_batches)
    schedule = plan.schedule
    if schedule in reasons:
        raise PlanError(reasons[schedule])
    names = list(built)

    def work(name: str) -> tuple:
        return built[name].operations, built[name].recompute

    same = [name for name in names[: names.index(schedule)] if work(name) == work(schedule)]
    if same:
        raise PlanError(f"the same operations as {same[0]}")
    if plan.pp == 1:
        leanest = min(names, key=lambda name: max(peak_activations(built[name])))
        if schedule != leanest:
            raise PlanError(f"one device has no pipeline: as fast as {leanest}, which holds no more activations")


def _built(
    schedules: Sequence[str],
    options: Mapping[str, int | str],
    recompute: str | float,
    *,
    devices: int,
    micro_batches: int,
) -> tuple[dict[str, Schedule], dict[str, str]]:
    """Of ``schedules`` at these sizes: those that there are, and the reasons why there are no others."""
    built, reasons = {}, {}
    for name in schedules:
        try:
            own = schedule_options(name, options, recompute, devices=devices, micro_batches=micro_batches)
            built[name] = build_schedule(name, devices=devices, micro_batches=micro_batches, **own)
        except InputError as error:
            reasons[name] = str(error)
    return built, reasons


def _check_devices(needed: int, cluster: Cluster, allow_idle: bool) -> None:
    if needed > cluster.devices:
        raise PlanError(f"needs {needed} devices; the cluster has {cluster.devices}")
    if needed < cluster.devices and not allow_idle:
        raise PlanError(f"uses {needed} of {cluster.devices} devices, and allow_idle_devices is false")
