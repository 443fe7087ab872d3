"""Plan a training and check that it can begin, before anything runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console

from auto3d.capture.graph import Graph
from auto3d.capture.model import CapturedModel
from auto3d.errors import InputError
from auto3d.plan import Plan, PlanError
from auto3d.runtime.layout import lay_out_plan
from auto3d.runtime.process.world import World
from auto3d.runtime.rank import check_plan
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.verify.spec import SPEC
from auto3d.schedule import samples_at_once
from auto3d.schedule.order_text import NAME
from auto3d.search.synthesized import is_sought
from launch.console.progress import at_work
from launch.model import candidates
from launch.model.build import captured_model, stored_model, use_device
from launch.model.graphs import PlanningModel
from launch.recipe.data import data_settings
from launch.recipe.load import LoadedRecipe
from launch.recipe.search_schema import PlanRecipe
from launch.recipe.settings import cluster, device, training_settings
from launch.run.devices import check_joined_device
from launch.run.ranks import check_devices
from launch.run.scaled_down import devices_of, what_helps
from launch.slurm.executor import on_slurm
from launch.store.trials import Trial, training_of


@dataclass(frozen=True)
class PlannedTraining:
    """A training that can begin: its plan, and the model that the plan was made for."""

    trial: Trial
    graph: Graph
    capture: Callable[[], CapturedModel]  # called by each rank; on a CPU, or under a launcher, it returns at once
    settings: TrainingSettings

    @property
    def plan(self) -> Plan:
        return self.trial.plan


def check_spec(recipe: LoadedRecipe, plan_file: str | None, console: Console) -> dict[str, list[str]]:
    """What must hold in the training's programs -> the places that break it (``auto3d.runtime.verify.spec``)."""
    training = plan_training(recipe, plan_file, console)
    common = lay_out_plan(training.capture(), training.plan, training.settings)
    return {says: list(broken(common)) for says, broken in SPEC.items()}


def plan_training(
    recipe: LoadedRecipe, plan_file: str | None, console: Console, world: World | None = None
) -> PlannedTraining:
    """Plan and check the training of ``recipe``, under the plan of ``plan_file`` or the recipe's own."""
    values = recipe.values
    wanted: Plan | PlanRecipe = _read_plan(recipe, plan_file) if plan_file else plan_of(recipe)
    _check_processes(recipe, world, wanted.ranks if isinstance(wanted, Plan) else wanted.dp * wanted.tp * wanted.pp)
    if world is not None and _order_is_sought(wanted):
        raise recipe.error(
            "plan.schedule",
            f"found {NAME}; each process that a launcher starts would find another order: give --plan FILE, "
            "or plan.schedule_options={file: FILE} (docs/synthesis.md)",
        )
    if world is not None and device(values) == "cuda":
        use_device(world.device("cuda"))
    captures_in_ranks = world is None and device(values) == "cuda" and not on_slurm(recipe)

    @cache
    def captured_at(micro_batch_size: int) -> CapturedModel:
        with at_work(console, "capturing the model"):
            return captured_model(recipe, micro_batch_size)

    model = PlanningModel(recipe, captured_at=None if captures_in_ranks else captured_at)
    with at_work(console, "capturing the model") if captures_in_ranks else nullcontext():
        plan = wanted if isinstance(wanted, Plan) else candidates.of_plan(model, wanted)
        size = samples_at_once(plan)
        graph = model.graph(size)
    settings = training_settings(values, iterations=values.training.iterations)
    with _errors_naming(plan_file):
        if plan_file:
            candidates.check_memory(model, plan)
        if not captures_in_ranks:  # otherwise the ranks check it
            check_plan(captured_at(size), plan, settings, data_settings(values))
    stored = stored_model(recipe, size) if captures_in_ranks else None  # for a GPU, what another process has captured

    def captured() -> CapturedModel:
        return stored or (captured_model(recipe, size) if captures_in_ranks else captured_at(size))

    return PlannedTraining(training_of(recipe, plan, sought=_order_is_sought(wanted)), graph, captured, settings)


def _order_is_sought(wanted: Plan | PlanRecipe) -> bool:
    """Whether a search finds the order of the plan, so that each process would find another."""
    return isinstance(wanted, PlanRecipe) and is_sought(candidates.candidate_of(wanted))


def _check_processes(recipe: LoadedRecipe, world: World | None, needed: int) -> None:
    """Raise RecipeError, before the model is captured, if the processes or devices that a plan needs are missing."""
    if world is None:
        if on_slurm(recipe):
            return
        nodes = len(cluster(recipe).nodes)
        if nodes > 1:
            problem = f"found {nodes}; the recipe needs {devices_of(recipe)}, and this machine is 1 node"
            problem += f" (or start a rank on each by srun, torchrun or mpirun): {what_helps(recipe, 'train')}"
            raise recipe.error("cluster.nodes", problem)
        check_devices(recipe, needed, "train")
        return
    if world.size != needed:
        raise recipe.error("plan", f"it needs {needed} ranks, one per device; the launcher started {world.size}")
    check_joined_device(recipe, local_rank=world.local_rank, size=world.size)


def plan_of(recipe: LoadedRecipe) -> PlanRecipe:
    """The recipe's own plan; raises RecipeError if it has none."""
    if recipe.values.plan is None:
        problem = "the recipe has no plan; give --plan FILE, or plan.dp=… plan.pp=… plan.micro_batch_size=…"
        raise recipe.error("plan", problem)
    return recipe.values.plan


def _read_plan(recipe: LoadedRecipe, plan_file: str) -> Plan:
    overrides = recipe.overrides_of("plan")
    if overrides:
        raise recipe.error("plan", f"{' '.join(overrides)} changes the recipe's plan, but --plan gives another")
    devices = cluster(recipe).devices
    with _errors_naming(plan_file):
        plan = Plan.from_json(Path(plan_file).read_bytes())
        samples_at_once(plan)  # raises an error for a schedule that is unknown or does not fit
        if plan.ranks > devices:
            raise PlanError(f"needs {plan.ranks} devices; the cluster has {devices}")
    for key in ("global_batch", "seed"):
        present, made_for = getattr(recipe.values.training, key), getattr(plan, key)
        if present != made_for:
            raise recipe.error(f"training.{key}", f"found {present}; {plan_file} was made for {made_for}")
    return plan


@contextmanager
def _errors_naming(plan_file: str | None) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise PlanError(f"{plan_file}: {error}" if plan_file else str(error)) from None
