"""A recipe's search space: the plans that a sweep runs, and the reasons why others do not run."""

from collections.abc import Callable, Collection, Sequence
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
from auto3d.schedule import SCHEDULES, samples_at_once, schedule_of, write_schedule
from auto3d.schedule.carried_buffers import check_carried_buffers
from auto3d.schedule.order_text import ORDER
from auto3d.search.algorithms.exhaustive import estimate_best
from auto3d.search.listing import ListedCandidate, list_candidates
from auto3d.search.make import PlanMaker
from auto3d.search.search import Budget, Ranked, Search
from auto3d.search.space import Candidate, Domain, Refusals, Workload, without_numbers
from launch.model.costs import captured_subject, cost_model, runtime_memory
from launch.model.graphs import PlanningModel
from launch.peers.limits import check_engine
from launch.recipe.error import RecipeError
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema_key import AUTO
from launch.recipe.search_schema import PlanRecipe
from launch.recipe.settings import cluster, emulation, search_space, training_settings


def find(
    recipe: LoadedRecipe,
    graph_at: Callable[[int], Graph],
    chosen: Callable[[Sequence[Plan]], Collection[Plan]],
    model: PlanningModel | None = None,
) -> list[ListedCandidate]:
    """Every combination of the recipe's search space, with its plan or the reason why it does not run.

    If there are more plans than search.max_trials, those run that were ``chosen`` before, then the fastest by
    prediction. ``model`` gives what follows from the Graphs (default: made in this process).
    """
    values = recipe.values
    if AUTO in values.search.recompute:
        check_memory_known(recipe, "search.recompute")
    domain = Domain(search_space(values), cluster(recipe), task(recipe))
    check_rules(recipe, domain, model or PlanningModel(recipe))
    maker = runnable_maker(recipe, graph_at, model)
    found = list(list_candidates(domain, maker))
    runnable = [place for place, one in enumerate(found) if one.plan is not None]
    if len(runnable) <= values.search.max_trials:
        return found
    before = chosen([plan for one in found if (plan := one.plan) is not None])
    run = {place for place in runnable if found[place].plan in before}
    others = [place for place in runnable if place not in run]
    run.update(_fastest(domain, maker, found, others, values.search.max_trials - len(run)))
    for place in runnable:
        if place not in run:
            found[place] = replace(found[place], plan=None, reason=left_out(recipe))
    return found


def _fastest(
    domain: Domain, maker: PlanMaker, found: Sequence[ListedCandidate], places: Sequence[int], count: int
) -> list[int]:
    """The ``count`` places in ``found`` whose plans are the fastest by prediction; among equals, the first.

    Only plans that may be among them, by a lower bound of their time, are simulated.
    """
    if count <= 0:
        return []
    search = Search(domain, maker, Budget(candidates=len(found), best=count))
    bounds = []
    for place in places:
        one = found[place]
        assert one.plan is not None
        search.add(one.candidate, one.plan)
        bounds.append((search.bound(one.candidate), place, one.candidate))
    estimate_best(search, bounds)
    predicted = {one.candidate: one.seconds for one in search.ranked()}
    estimated = [place for place in places if found[place].candidate in predicted]
    return sorted(estimated, key=lambda place: (predicted[found[place].candidate], place))[:count]


def left_out(recipe: LoadedRecipe) -> str:
    """The reason of candidates that could run, but are too many."""
    return f"left out: search.max_trials is {recipe.values.search.max_trials}"


def of_plan(
    recipe: LoadedRecipe,
    wanted: PlanRecipe,
    graph_at: Callable[[int], Graph],
    model: PlanningModel | None = None,
) -> Plan:
    """The plan that ``wanted`` describes, after the same checks as in a search; raises RecipeError if one fails.

    ``model`` gives what follows from the Graphs (default: made in this process).
    """
    if wanted.recompute == AUTO:
        check_memory_known(recipe, "plan.recompute")
    maker = runnable_maker(recipe, graph_at, model)
    try:
        plan = maker.plan(candidate_of(wanted))
        maker.check_captured()
        return plan
    except InputError as error:
        raise recipe.error("plan", str(error), kind=error.kind) from None


def candidate_of(wanted: PlanRecipe) -> Candidate:
    """The candidate of a recipe's plan; raises InputError if it holds the order of a schedule itself."""
    if ORDER in wanted.schedule_options:
        raise InputError(f"schedule_options.{ORDER}: a recipe names the file of an order: use {{file: FILE}}")
    return Candidate(
        dp=wanted.dp,
        tp=wanted.tp,
        pp=wanted.pp,
        micro_batch_size=wanted.micro_batch_size,
        schedule=write_schedule(wanted.schedule, wanted.schedule_options),
        recompute=wanted.recompute,
        shard_optimizer=wanted.shard_optimizer,
        sequence_parallel=wanted.sequence_parallel,
        tensor_overlap=wanted.tensor_overlap,
    )


def exact_plans(recipe: LoadedRecipe) -> Callable[[Ranked], Plan]:
    """A function that makes a plan of a search ready to run.

    The plan then has the Graph at its own micro-batch size, and its memory is checked as the runtime counts it. The
    function raises InputError for a plan that cannot run; a plan of measured layers is returned unchanged.
    """
    model = PlanningModel(recipe)
    graph_at = cache(model.graph)
    maker = cache(lambda: runnable_maker(recipe, graph_at, model))

    def exact(ranked: Ranked) -> Plan:
        plan, candidate = ranked.plan, ranked.candidate
        if recipe.values.model.layers is not None:
            return plan
        explicit = SCHEDULES[plan.schedule].explicit
        if not plan.graph and candidate.partition in STAGE_METHODS and not explicit:
            return maker().plan(candidate)
        if not plan.graph:  # no PlanMaker cuts stages as RaNNC does, or finds an order again
            plan = replace(plan, graph=graph_at(samples_at_once(plan)).fingerprint)
        maker().check(plan)
        return plan

    return exact


def task(recipe: LoadedRecipe) -> Workload:
    training = recipe.values.training
    return Workload(global_batch=training.global_batch, seed=training.seed, clip_norm=training.clip_norm)


def check_rules(recipe: LoadedRecipe, domain: Domain, model: PlanningModel) -> None:
    """Raise RecipeError if a rule of model.tensor_parallel fits the model at no degree.

    A rule that is not possible at one degree refuses only the candidates of that degree.
    """
    sizes = sorted({one.micro_batch_size for one in domain.degrees if one.tp > 1})
    if not recipe.values.model.tensor_parallel or not sizes:
        return
    try:
        model.split(sizes[0], 1, False)
    except InputError as error:
        key, found, problem = str(error).partition("tensor_parallel: ")
        if key or not found:
            raise
        raise recipe.error("model.tensor_parallel", problem) from None


def runnable_maker(
    recipe: LoadedRecipe, graph_at: Callable[[int], Graph], model: PlanningModel | None = None
) -> PlanMaker:
    """A PlanMaker of plans that auto3d can run and whose memory, as the runtime counts it, fits.

    ``model`` gives what follows from the Graphs (default: made in this process).
    """
    subject = captured_subject(recipe, graph_at, model)
    emulated, machine = emulation(recipe.values), cluster(recipe)
    memory = runtime_memory(recipe, graph_at, model)

    def missing(plan: Plan) -> str:
        # Nobody predicts a peer's memory: its trial finds out.
        return shortage(memory, plan, machine) if plan.engine == AUTO3D else ""

    def check(plan: Plan) -> None:
        if plan.engine != AUTO3D:
            from launch.recipe.data import data_settings  # imports torch

            check_engine(
                plan,
                lambda: graph_at(samples_at_once(plan)),
                training_settings(recipe.values, iterations=recipe.values.training.iterations),
                unequal_targets=data_settings(recipe.values).has_unequal_targets,
            )
        if emulated is not None:
            emulated.check_fits(plan.stages)
        graph = graph_at(samples_at_once(plan))
        if graph.carried_buffers:
            check_carried_buffers(graph, plan, schedule_of(plan), cut(graph, plan.stages))

    return PlanMaker(
        subject,
        cost_model(recipe, subject),
        task(recipe),
        shortage=missing,
        check=check,
        order_seconds=recipe.values.search.order_seconds,
    )


def check_memory(recipe: LoadedRecipe, plan: Plan, graph_at: Callable[[int], Graph]) -> None:
    """Raise PlanError if the recipe's devices lack the memory that ``plan`` needs by estimate."""
    machine = cluster(recipe)
    if machine.memory_bytes is not None and (missing := shortage(runtime_memory(recipe, graph_at), plan, machine)):
        raise PlanError(f"{missing}; cluster.memory_gib sets the GiB that a process may fill", kind="memory")


def shortage(memory: PlanMemory, plan: Plan, machine: Cluster) -> str:
    """The reason why ``plan``, by estimate, does not fit into its devices' memory; empty if it fits."""
    if machine.memory_bytes is None:
        return ""  # nothing is captured for an unknown size
    short: dict[int, float] = {}  # pipeline device -> missing bytes
    capacity = [machine.memory_of(ranks) for ranks in plan.placement]
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


def runnable(recipe: LoadedRecipe, found: Sequence[ListedCandidate]) -> list[Plan]:
    """The plans of the candidates that can run; raises RecipeError with the commonest reason if none can."""
    plans = [candidate.plan for candidate in found if candidate.plan is not None]
    if not plans:
        raise none_runs(recipe, refusals_of(found))
    return plans


def refusals_of(found: Sequence[ListedCandidate]) -> Refusals:
    """The reasons of the candidates that have no plan."""
    refused = Refusals()
    for one in found:
        if one.plan is None:
            refused.add(one.candidate, one.reason, one.kind)
    return refused


def refused_by_peers(found: Sequence[ListedCandidate]) -> dict[Plan, str]:
    """The plans that peers cannot train, with the reasons: for each peer, whatever its options, one of each reason."""
    first: dict[tuple[str, str], Plan] = {}
    reasons: dict[Plan, str] = {}
    for one in found:
        if one.refused is not None:
            engine = one.refused.engine.partition(":")[0]
            reason = without_numbers(one.reason.removeprefix(one.refused.engine))
            plan = first.setdefault((engine, reason), one.refused)
            reasons.setdefault(plan, one.reason)
    return reasons


def none_runs(recipe: LoadedRecipe, refused: Refusals) -> RecipeError:
    """The error of a search space whose candidates were all ``refused``, with the foremost reason."""
    one = refused.foremost
    problem = f"its only candidate cannot run: {one.reason}"
    if refused.total > 1:
        problem = f"none of its {refused.total} candidates can run; {one.count} of them: {one.reason}"
    return recipe.error("search", problem, kind=one.kind)
