"""The Plan of a candidate whose schedule is ``synthesized``: an order of a file, or an order sought for the Plan."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from auto3d.cost.model import CostModel
from auto3d.errors import InputError
from auto3d.plan import Plan, PlanError
from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.operation import Schedule
from auto3d.schedule.options import SYNC
from auto3d.schedule.order_file import read_order_file
from auto3d.schedule.order_text import NAME
from auto3d.schedule.shape import shape_of
from auto3d.search.axes import Candidate
from auto3d.search.order_problem import problem_of, with_order
from auto3d.search.recompute import AUTO, FULL, NONE
from auto3d.synthesis.problem import Problem

_STRUCTURES = 3  # sets of stages on devices, of each kind, that the time is divided among
_TRIES = 4  # searches for an order that fits the memory, each with less of it, for the whole time
_FILE = "file"  # option of a candidate's schedule: the file of an order


def is_sought(candidate: Candidate) -> bool:
    """Whether the order of ``candidate`` is sought, not read from a file or made by rule."""
    return candidate.schedule == NAME


def options_of_file(
    given: Mapping[str, int | str], candidate: Candidate, *, devices: int, micro_batches: int
) -> dict[str, int | str]:
    """The options of a schedule whose order is in the file that ``given`` names: the order itself.

    Raises InputError if ``given`` has anything else, or if the file does not fit these sizes or ``candidate``.
    """
    if set(given) != {_FILE}:
        others = ", ".join(sorted(set(given) - {_FILE})) or "no file"
        raise InputError(f"schedule {NAME}: found {others}; its option is file, the path of a schedule file")
    path = str(given[_FILE])
    if candidate.recompute != NONE:
        raise PlanError(f"recompute: {candidate.recompute}; the order in {path} decides what recomputes: it takes none")
    file = read_order_file(path)
    options = file.options if candidate.sync == SYNC[0] else {**file.options, "sync": candidate.sync}
    try:
        build_schedule(NAME, devices=devices, micro_batches=micro_batches, **options)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return options


def check_sought(candidate: Candidate, model: CostModel) -> None:
    """Raise PlanError if no order can be sought for ``candidate``."""
    if candidate.recompute not in (NONE, AUTO):
        raise PlanError(
            f"recompute: {candidate.recompute}; schedule {NAME} takes none, or auto: its search chooses the stages "
            "that recompute"
        )
    if candidate.recompute == AUTO and model.cluster.memory_bytes is None:
        raise PlanError("recompute: auto needs to know the memory of a device")
    if model.method != "simulated":
        raise PlanError(f"schedule {NAME}: times are by {model.method}; its search needs simulated ones")


def seed_candidates(candidate: Candidate) -> Iterator[Candidate]:
    """``candidate`` with each schedule that ``auto`` tries instead, and with recomputation where it may be."""
    for name, family in SCHEDULES.items():
        if not family.automatic:
            continue
        for recompute in (NONE, FULL, AUTO) if candidate.recompute == AUTO else (NONE,):
            yield replace(candidate, schedule=name, recompute=recompute, sync=SYNC[0])


def best_order(
    seeds: Sequence[Plan],
    model: CostModel,
    shortage: Callable[[Plan], str],
    check: Callable[[Plan], None],
    *,
    seconds: float,
    recompute: bool,
    sync: str,
    seed: int,
) -> Plan:
    """The fastest Plan with an order on the stages and devices of one of ``seeds``, sought for ``seconds``.

    It is never slower than a seed that fits the memory by ``shortage`` and whose order can be written. Raises
    InputError if no order fits, or if ``check`` refuses all of them.
    """
    from auto3d.synthesis.synthesize import synthesize  # slow to import: it compiles

    fastest = _Fastest(model, shortage, check)
    orders: list[Schedule] = []
    preference: dict[Plan, tuple[bool, float]] = {}
    for plan in seeds:
        order = shape_of(plan).schedule()
        try:
            written = with_order(plan, order, sync=sync)
        except InputError:  # Chimera's halves of micro-batches, or a pipe without any
            continue
        orders.append(order)
        if written not in preference:
            preference[written] = fastest.add(written)
    problems: list[tuple[Plan, Problem]] = []
    for plan in _structures(preference, recompute=recompute):
        try:
            problem = _problem(plan, model)
            if _may_beat(problem, fastest.seconds, sync):
                problems.append((plan, problem))
        except InputError as error:
            fastest.refusal = fastest.refusal or error
    for start, problem in problems:
        for _ in range(_TRIES):
            usable = [
                known
                for known in orders
                if known.device_of == problem.device_of and known.recompute <= problem.may_recompute
            ]
            try:
                if not _may_beat(problem, fastest.seconds, sync):
                    break
                order = synthesize(problem, seconds=seconds / len(problems), seeds=usable, seed=seed).schedule
                plan = with_order(start, order, sync=sync)
            except InputError as error:
                fastest.refusal = fastest.refusal or error
                break
            orders.append(order)
            fastest.add(plan)
            tighter = _tighter(problem.free, plan, model)
            if tighter == problem.free or min(tighter) < 0:
                break
            problem = replace(problem, free=tighter)
    if fastest.plan is None:
        assert fastest.refusal is not None
        raise fastest.refusal
    return fastest.plan


class _Fastest:
    """The fastest of the Plans that fit and that the check accepts, and why another is refused."""

    def __init__(self, model: CostModel, shortage: Callable[[Plan], str], check: Callable[[Plan], None]) -> None:
        self._model, self._shortage, self._check = model, shortage, check
        self.plan: Plan | None = None
        self.seconds = inf
        self.refusal: InputError | None = None

    def add(self, plan: Plan) -> tuple[bool, float]:
        """Whether ``plan`` is refused, and its seconds. The smallest such pair belongs to the best plan."""
        seconds = self._model.seconds(plan)
        try:
            if missing := self._shortage(plan):
                raise PlanError(missing, kind="memory")
            self._check(plan)
        except InputError as error:
            self.refusal = error
            return True, seconds
        if seconds < self.seconds:
            self.plan, self.seconds = plan, seconds
        return False, seconds


def _structures(preference: Mapping[Plan, tuple[bool, float]], *, recompute: bool) -> list[Plan]:
    """Plans on whose stages and devices an order is sought: the best Plan of each structure, the best first.

    There are at most _STRUCTURES of each kind: without recomputation and, if the search may ``recompute``, with it, of
    stages that keep nothing and of stages that keep a part. ``preference`` is the smaller the better a plan is.
    """
    chosen: dict[tuple, Plan] = {}
    taken: Counter[tuple[bool, bool]] = Counter()
    for plan in sorted(preference, key=preference.__getitem__):
        form = shape_of(plan)
        kind = bool(form.recompute), any(stage.kept for stage in plan.stages)
        structure = kind, plan.stages, plan.meshes, tuple(sorted(form.device_of.items()))
        if structure not in chosen and taken[kind] < _STRUCTURES and (recompute or not form.recompute):
            chosen[structure] = plan
            taken[kind] += 1
    return list(chosen.values())


def _problem(plan: Plan, model: CostModel) -> Problem:
    """The problem of the stages of ``plan``: if any stage recomputes there, every stage may; otherwise none may."""
    form = shape_of(plan)
    return problem_of(plan, model, may_recompute=frozenset(range(form.stages) if form.recompute else ()))


def _may_beat(problem: Problem, seconds: float, sync: str) -> bool:
    """Whether the bound of ``problem`` leaves room for an order that takes less than ``seconds``."""
    from auto3d.synthesis.bound import lower_bound  # slow to import: it compiles

    return sync != SYNC[0] or lower_bound(problem).time < seconds  # the bound has all syncs and updates at the end


def _tighter(free: Sequence[float], plan: Plan, model: CostModel) -> tuple[float, ...]:
    """``free`` of each device, less what ``plan`` needs beyond the memory of the device."""
    memory = [model.cluster.memory_of(mesh.ranks) for mesh in plan.meshes]
    excess = [
        0.0 if has is None else max(0.0, most - has) for most, has in zip(model.memory.of(plan), memory, strict=True)
    ]
    return tuple(has - more for has, more in zip(free, excess, strict=True))
