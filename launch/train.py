"""Training by hand: one plan, on processes of our own or among those that a launcher started."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from auto3d.capture.model import CapturedModel
from auto3d.errors import InputError
from auto3d.plan import Plan, PlanError
from auto3d.runtime.executor import IterationResult
from auto3d.runtime.measurement import Status
from auto3d.runtime.out_of_memory import OutOfMemoryError
from auto3d.runtime.rank import check_plan
from auto3d.runtime.training import TrainingResult, train
from auto3d.runtime.waiting import PeerLostError
from auto3d.runtime.world import World
from auto3d.schedule import samples_at_once
from launch import candidates
from launch.data import data_settings
from launch.join import joined_world
from launch.model import captured_model, initial_weights
from launch.output import stdout_to_stderr
from launch.progress import at_work, training_progress
from launch.ranks import Report, check_devices, run_ranks
from launch.recipe import LoadedRecipe
from launch.schema import PlanRecipe, Recipe
from launch.settings import cluster, training_settings


def run_training(
    recipe: LoadedRecipe, plan_file: str | None, console: Console, on_result: Callable[[dict[str, Any]], None]
) -> int:
    """Train, show progress on ``console``, and give rank 0's record to ``on_result``; returns the exit code."""
    values = recipe.values
    world = joined_world()
    given = _read_plan(recipe, plan_file) if plan_file else None
    wanted = given or plan_of(recipe)
    _check_processes(recipe, world, given.ranks if given else wanted.dp * wanted.tp * wanted.pp)

    @cache
    def captured_at(micro_batch_size: int) -> CapturedModel:
        with at_work(console, "capturing the model"):
            return captured_model(recipe, micro_batch_size)

    plan = given or candidates.of_plan(recipe, wanted, lambda size: captured_at(size).graph)
    captured = captured_at(samples_at_once(plan))
    settings = training_settings(values, iterations=values.training.iterations)
    with _errors_naming(plan_file):
        check_plan(captured, plan, settings)
    data = data_settings(values)
    state = initial_weights(recipe, captured.graph)

    def run(world: World, report: Report) -> TrainingResult:
        def on_iteration(iteration: int, result: IterationResult) -> None:
            if world.rank == 0:
                report((iteration, None if settings.emulation else result.loss, result.seconds))

        return train(captured, plan, settings, data, world, state=state, on_iteration=on_iteration)

    if world is not None:
        try:
            result = _run_joined(world, run, console, settings.iterations)
        except (OutOfMemoryError, PeerLostError, TimeoutError) as error:  # of another rank, its own output tells why
            console.print(f"auto3d: {error}", markup=False, soft_wrap=True)
            return 1
        if world.rank == 0:
            on_result(_record(result, plan, values))
        return 0
    with training_progress(console, settings.iterations) as on_report:
        outcome = run_ranks(plan.ranks, run, timeout_s=None, straggle_s=settings.timeout_s, on_report=on_report)
    if outcome.status is not Status.OK:
        console.print(f"auto3d: training ended as {outcome.status}:\n{outcome.error}", markup=False, soft_wrap=True)
        return 1
    on_result(_record(outcome.result, plan, values))
    return 0


def _check_processes(recipe: LoadedRecipe, world: World | None, needed: int) -> None:
    """Raise RecipeError, before the model is captured, if there are not the processes and devices that a plan needs."""
    if world is None:
        nodes = recipe.values.cluster.nodes
        if nodes > 1:
            problem = f"found {nodes}; on several machines, start `auto3d train` with srun, torchrun or mpirun on each"
            raise recipe.error("cluster.nodes", problem)
        check_devices(recipe, needed)
        return
    if world.size != needed:
        raise recipe.error("plan", f"it needs {needed} ranks, one for each device; the launcher started {world.size}")
    check_devices(recipe, world.local_rank + 1)


def _run_joined(
    world: World, run: Callable[[World, Report], TrainingResult], console: Console, iterations: int
) -> TrainingResult:
    with stdout_to_stderr():
        if world.rank:
            return run(world, lambda report: None)
        with training_progress(console, iterations) as on_report:
            return run(world, on_report)


def plan_of(recipe: LoadedRecipe) -> PlanRecipe:
    """The recipe's own plan; raises RecipeError where it has none."""
    if recipe.values.plan is None:
        problem = "the recipe has none; give --plan FILE, or plan.dp=… plan.pp=… plan.micro_batch_size=…"
        raise recipe.error("plan", problem)
    return recipe.values.plan


def _read_plan(recipe: LoadedRecipe, plan_file: str) -> Plan:
    overrides = recipe.overrides_of("plan")
    if overrides:
        raise recipe.error("plan", f"{' '.join(overrides)} changes the recipe's plan, but --plan gives another")
    devices = cluster(recipe).devices
    with _errors_naming(plan_file):
        plan = Plan.from_json(Path(plan_file).read_bytes())
        samples_at_once(plan)  # refuses a schedule that is not known or does not fit
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


def _record(result: TrainingResult, plan: Plan, values: Recipe) -> dict[str, Any]:
    measured = result.iteration_s[min(values.measure.warmup_iterations, len(result.iteration_s) - 1) :]
    return {
        "emulated": values.training.compute == "emulated",
        **asdict(result),
        "samples_per_s": plan.global_batch / median(measured),
        "plan": asdict(plan),
    }
