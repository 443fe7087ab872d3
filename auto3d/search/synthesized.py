"""The Plan of a candidate whose schedule is ``synthesized``: an order of a file, or one that is sought for the Plan."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from auto3d.cost.model import CostModel
from auto3d.errors import InputError
from auto3d.plan import Plan, PlanError
from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.options import SYNC
from auto3d.schedule.order_file import read_order_file
from auto3d.schedule.order_text import NAME, order_options
from auto3d.schedule.shape import shape_of
from auto3d.search.order_problem import problem_of, with_order
from auto3d.search.recompute import AUTO, FULL, NONE
from auto3d.search.space import Candidate

_STRUCTURES = 3  # sets of stages on devices that the time is divided among
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
    """``candidate`` with each synchronous schedule by rule instead, and with full recomputation where it may be."""
    for name, family in SCHEDULES.items():
        if family.asynchronous or family.explicit:
            continue
        for recompute in (NONE, FULL) if candidate.recompute == AUTO else (NONE,):
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

    It is never slower than a seed that fits the memory by ``shortage``. Raises InputError if no order fits, or if
    ``check`` refuses all of them.
    """
    from auto3d.synthesis.synthesize import synthesize  # slow to import: it compiles

    found: list[tuple[float, Plan]] = []
    refusal: InputError | None = None

    def add(plan: Plan) -> None:
        nonlocal refusal
        try:
            if missing := shortage(plan):
                raise PlanError(missing, kind="memory")
            check(plan)
        except InputError as error:
            refusal = error
        else:
            found.append((model.seconds(plan), plan))

    groups = _structures(seeds, model, shortage)
    for group in groups:
        for plan in group:
            add(with_order(plan, shape_of(plan).schedule(), sync=sync))
    for group in groups[:_STRUCTURES]:
        stages = frozenset(range(len(group[0].stages)))
        try:
            problem = problem_of(group[0], model, may_recompute=stages if recompute else frozenset())
            share = seconds / min(len(groups), _STRUCTURES)
            for _ in range(_TRIES):
                order = synthesize(
                    problem, seconds=share, seeds=[shape_of(plan).schedule() for plan in group], seed=seed
                ).schedule
                plan = with_order(group[0], order, sync=sync)
                add(plan)
                tighter = _tighter(problem.free, plan, model)
                if tighter == problem.free or min(tighter) < 0:
                    break
                problem = replace(problem, free=tighter)
        except InputError as error:
            refusal = refusal or error
    if not found:
        assert refusal is not None
        raise refusal
    return min(found, key=lambda one: one[0])[1]


def _tighter(free: Sequence[float], plan: Plan, model: CostModel) -> tuple[float, ...]:
    """``free`` of each device, less what ``plan`` needs beyond the memory of the device."""
    memory = [model.cluster.memory_of(ranks) for ranks in plan.placement]
    excess = [
        0.0 if has is None else max(0.0, most - has) for most, has in zip(model.memory(plan), memory, strict=True)
    ]
    return tuple(has - more for has, more in zip(free, excess, strict=True))


def _structures(seeds: Sequence[Plan], model: CostModel, shortage: Callable[[Plan], str]) -> list[list[Plan]]:
    """``seeds`` whose order can be written, by their stages and the devices of these.

    Those that fit the memory come before others, the fastest first.
    """
    ranks: dict[int, tuple[bool, float]] = {}
    groups: dict[tuple, list[Plan]] = {}
    for plan in seeds:
        with suppress(InputError):  # Chimera's halves of micro-batches, or a pipe without any
            order_options(shape_of(plan).schedule())
            ranks[id(plan)] = bool(shortage(plan)), model.seconds(plan)
            structure = plan.stages, plan.placement, tuple(sorted(shape_of(plan).device_of.items()))
            groups.setdefault(structure, []).append(plan)
    for group in groups.values():
        group.sort(key=lambda plan: ranks[id(plan)])
    return sorted(groups.values(), key=lambda group: ranks[id(group[0])])
