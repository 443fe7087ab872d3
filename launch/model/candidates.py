"""Candidate of a recipe -> Plan that auto3d can run there, or the reason why it cannot."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from auto3d.capture.graph import Graph
from auto3d.cluster import Cluster
from auto3d.cost.memory.device import in_gib
from auto3d.cost.memory.plan import PlanMemory
from auto3d.errors import InputError
from auto3d.partition.methods import STAGE_METHODS
from auto3d.partition.stage import cut
from auto3d.plan import AUTO3D, Plan, PlanError
from auto3d.runtime.optimizer.parameter_groups import update_rules
from auto3d.schedule import SCHEDULES, samples_at_once, schedule_of, write_schedule
from auto3d.schedule.carried_buffers import check_carried_buffers
from auto3d.schedule.order_text import ORDER
from auto3d.search.axes import AXES, Candidate
from auto3d.search.make import PlanMaker
from auto3d.search.search import Ranked
from auto3d.search.space import Domain, Workload
from auto3d.share import WHOLE
from launch.model.costs import INTERPOLATED, captured_subject, cost_model, runtime_memory
from launch.model.graphs import PlanningModel, refused_rules
from launch.peers.limits import check_engine
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema_key import AUTO
from launch.recipe.search_schema import PlanRecipe
from launch.recipe.settings import cluster, emulation, optimizer_settings, training_settings


def of_plan(model: PlanningModel, wanted: PlanRecipe) -> Plan:
    """The plan that ``wanted`` describes, after the same checks as in a search; raises RecipeError if one fails."""
    if wanted.recompute == AUTO:
        check_memory_known(model.recipe, "plan.recompute")
    maker = runnable_maker(model)
    try:
        plan = maker.plan(candidate_of(wanted))
        maker.check_captured()
        return plan
    except InputError as error:
        raise model.recipe.error("plan", str(error), kind=error.kind) from None


def candidate_of(wanted: PlanRecipe) -> Candidate:
    """The candidate of a recipe's plan; raises InputError if it holds the order of a schedule itself."""
    if ORDER in wanted.schedule_options:
        raise InputError(f"schedule_options.{ORDER}: a recipe names the file of an order: use {{file: FILE}}")
    choices = {name: getattr(wanted, name) for name, axis in AXES.items() if axis.meaning}
    schedule = write_schedule(wanted.schedule, wanted.schedule_options)
    cuts, kept = tuple(wanted.cuts) or None, tuple(wanted.kept) or None
    return Candidate(**choices | {"schedule": schedule}, cuts=cuts, kept=kept)


def exact_plans(recipe: LoadedRecipe, maker: PlanMaker | None = None) -> Callable[[Ranked], Plan]:
    """A function that makes a plan of a search ready to run.

    The plan then has the Graph at its own micro-batch size, and its memory is checked as the runtime counts it. The
    function raises InputError for a plan that cannot run; a plan of measured layers is returned unchanged. ``maker`` is
    a ``runnable_maker`` (default: it is made when it is needed).
    """

    @cache
    def runnable() -> PlanMaker:
        return maker or runnable_maker(PlanningModel(recipe))

    def exact(ranked: Ranked) -> Plan:
        plan, candidate = ranked.plan, ranked.candidate
        if recipe.values.model.layers is not None:
            return plan
        explicit = SCHEDULES[plan.schedule].explicit
        if not plan.graph and candidate.partition in STAGE_METHODS and not explicit:
            return runnable().plan(candidate)
        if not plan.graph:  # no PlanMaker cuts stages as RaNNC does, or finds an order again
            fingerprint = runnable().planned.fingerprint(samples_at_once(plan))
            plan = replace(plan, graph=fingerprint)
        runnable().check(plan)
        return plan

    return exact


def task(recipe: LoadedRecipe) -> Workload:
    training = recipe.values.training
    return Workload(global_batch=training.global_batch, seed=training.seed, clip_norm=training.clip_norm)


def check_rules(domain: Domain, model: PlanningModel) -> None:
    """Raise RecipeError if a rule of model.tensor_parallel fits the model at no degree.

    A rule that is not possible at one degree refuses only the candidates of that degree.
    """
    sizes = sorted({candidate.micro_batch_size for candidate in domain.degrees if candidate.tp > 1})
    if not model.recipe.values.model.tensor_parallel or not sizes:
        return
    with refused_rules(model.recipe):
        model.split(sizes[0], WHOLE)


def updates_check(recipe: LoadedRecipe, graph: Callable[[], Graph]) -> Callable[[Plan], None]:
    """A function that raises InputError for a Plan whose ranks have weights in parts that the optimizer cannot update.

    It asks for ``graph``, at any number of samples, where that may be so.
    """
    settings = optimizer_settings(recipe.values)
    if settings.updates_all_alike:
        return lambda plan: None
    from auto3d.runtime.optimizer.checks import check_updates  # imports torch

    rules = cache(lambda: update_rules(graph(), settings))
    return lambda plan: check_updates(graph(), plan, rules()) if plan.engine == AUTO3D else None


def runnable_maker(model: PlanningModel) -> PlanMaker:
    """A PlanMaker of plans that auto3d can run and whose memory, as the runtime counts it, fits."""
    recipe, subject, memory = model.recipe, captured_subject(model), runtime_memory(model)
    emulated, machine = emulation(recipe.values), cluster(recipe)
    check_updates = updates_check(recipe, lambda: subject.graph(INTERPOLATED[0]))

    def missing(plan: Plan) -> str:
        # Nobody predicts a peer's memory: its trial finds out.
        return shortage(memory, plan, machine) if plan.engine == AUTO3D else ""

    def check(plan: Plan) -> None:
        if plan.engine != AUTO3D:
            from launch.recipe.data import data_settings  # imports torch

            check_engine(
                plan,
                lambda: model.graph(samples_at_once(plan)),
                training_settings(recipe.values, iterations=recipe.values.training.iterations),
                unequal_targets=data_settings(recipe.values).has_unequal_targets,
            )
        check_updates(plan)
        if emulated is not None:
            emulated.check(plan)
        graph = model.graph(samples_at_once(plan))
        if graph.carried_buffers:
            check_carried_buffers(graph, plan, schedule_of(plan), cut(graph, plan.stages))

    return PlanMaker(
        subject,
        cost_model(recipe, subject),
        task(recipe),
        shortage=missing,
        memory=memory,
        check=check,
        order_seconds=recipe.values.search.order_seconds,
    )


def check_memory(model: PlanningModel, plan: Plan) -> None:
    """Raise PlanError if the recipe's devices lack the memory that ``plan`` of ``model`` needs by estimate."""
    machine = cluster(model.recipe)
    if machine.memory_bytes is not None and (missing := shortage(runtime_memory(model), plan, machine)):
        raise PlanError(f"{missing}; cluster.memory_gib sets the GiB that a process may fill", kind="memory")


def shortage(memory: PlanMemory, plan: Plan, machine: Cluster) -> str:
    """The reason why ``plan``, by estimate, does not fit into its devices' memory; empty if it fits."""
    if machine.memory_bytes is None:
        return ""  # nothing is captured for an unknown size
    short: dict[int, float] = {}  # pipeline device -> missing bytes
    capacity = [machine.memory_of(mesh.ranks) for mesh in plan.meshes]
    for device, (needed, has) in enumerate(zip(memory.of(plan), capacity, strict=True)):
        if has is not None and needed > has:
            short[device] = needed - has
    if not short:
        return ""
    device = max(short, key=short.__getitem__)
    has = capacity[device]
    assert has is not None
    needs = memory.devices(plan)[device]
    return f"infeasible: pipeline device {device} needs {needs}; a device has {in_gib(has)} GiB"


def check_memory_known(recipe: LoadedRecipe, key: str) -> None:
    """Raise RecipeError if the memory of a device is unknown, which the value auto of ``key`` needs."""
    if cluster(recipe).memory_bytes is None:
        problem = "found auto, which needs cluster.memory_gib: the GiB that a process may fill"
        raise recipe.error(key, f"{problem}, or an accelerator that has memory_gib")
