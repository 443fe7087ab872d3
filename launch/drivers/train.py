"""Training under one plan: on processes of our own, among those that a launcher started, or as a job of SLURM."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from auto3d.capture.graph import Graph
from auto3d.capture.model import CapturedModel
from auto3d.errors import InputError
from auto3d.plan import Plan, PlanError
from auto3d.runtime.checkpoint import newest
from auto3d.runtime.measurement import BYTES, Measurement, Status
from auto3d.runtime.out_of_memory import OutOfMemoryError
from auto3d.runtime.rank import check_plan
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import TrainingResult, train
from auto3d.runtime.waiting import PeerLostError, naming_lost_peers
from auto3d.runtime.world import World, leave_or_end
from auto3d.schedule import samples_at_once
from launch.console.progress import at_work, training_progress
from launch.drivers.executor import executor_of
from launch.drivers.sweep import check_place
from launch.executors.submit import on_their_way
from launch.executors.trial import TrainingRun, is_whole
from launch.model import candidates
from launch.model.build import captured_model, initial_weights, use_device
from launch.model.check_capture import check_once
from launch.model.graphs import PlanningModel
from launch.recipe.data import data_settings
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import AUTO, PlanRecipe, Recipe
from launch.recipe.settings import cluster, device, training_settings
from launch.run.devices import check_joined_device, devices_for
from launch.run.ranks import Report, check_devices, run_ranks
from launch.run.streams import stdout_to_stderr
from launch.slurm.executor import in_a_job, on_slurm, why_no_slurm
from launch.slurm.warning import asked_by_slurm, await_end
from launch.store.ends import record_ends
from launch.store.manifest import Entry, State, histories
from launch.store.trials import Trial, exclusive, manifest_of, training_of, write_command
from launch.store.watcher import Watcher


@dataclass(frozen=True)
class PlannedTraining:
    """A training that can begin: its plan, and the model that this was made for."""

    trial: Trial
    graph: Graph
    capture: Callable[[], CapturedModel]  # each rank calls it; on a CPU, or under a launcher, it is done already
    settings: TrainingSettings

    @property
    def plan(self) -> Plan:
        return self.trial.plan


OnResult = Callable[[dict[str, Any]], None]


def planned(
    recipe: LoadedRecipe, plan_file: str | None, console: Console, world: World | None = None
) -> PlannedTraining:
    """Plan and check the training of ``recipe``, under the plan of ``plan_file`` or the recipe's own."""
    values = recipe.values
    given = _read_plan(recipe, plan_file) if plan_file else None
    wanted = given or plan_of(recipe)
    _check_processes(recipe, world, given.ranks if given else wanted.dp * wanted.tp * wanted.pp)
    if world is not None and device(values) == "cuda":
        use_device(world.device("cuda"))
    captures_in_ranks = world is None and device(values) == "cuda" and not on_slurm(recipe)

    @cache
    def captured_at(micro_batch_size: int) -> CapturedModel:
        with at_work(console, "capturing the model"):
            return captured_model(recipe, micro_batch_size)

    @cache
    def graph_at(micro_batch_size: int) -> Graph:
        if not captures_in_ranks:
            return captured_at(micro_batch_size).graph
        with at_work(console, "capturing the model"):
            return PlanningModel(recipe).graph(micro_batch_size)

    plan = given or candidates.of_plan(recipe, wanted, graph_at)
    size = samples_at_once(plan)
    graph = graph_at(size)
    settings = training_settings(values, iterations=values.training.iterations)
    with _errors_naming(plan_file):
        if given:
            candidates.check_memory(recipe, plan, graph_at)
        if not captures_in_ranks:  # else they check it themselves
            check_plan(captured_at(size), plan, settings)
    capture = partial(captured_model, recipe, size) if captures_in_ranks else partial(captured_at, size)
    return PlannedTraining(training_of(recipe, plan), graph, capture, settings)


def run_training(
    recipe: LoadedRecipe,
    plan_file: str | None,
    world: World | None,
    console: Console,
    on_result: OnResult,
    *,
    fresh: bool,
) -> int:
    """Train, show progress on ``console``, and give rank 0's record to ``on_result``; returns the exit code.

    It is one rank of ``world``, or starts all of them. It goes on from the newest checkpoint unless it is to begin
    ``fresh``.
    """
    training = planned(recipe, plan_file, console, world)
    if world is not None:
        return _train(recipe, training, world, console, on_result, fresh=fresh)
    _check_not_submitted(recipe, training.trial)
    with exclusive(recipe, training.trial):
        return _train(recipe, training, None, console, on_result, fresh=fresh)


def _check_capture(recipe: LoadedRecipe, training: PlannedTraining, console: Console) -> None:
    """Raise InputError where the captured model does something else than the model itself."""
    with at_work(console, "comparing the captured model with the model itself"):
        told = partial(console.print, markup=False, soft_wrap=True)
        check_once(recipe, training.graph, training.capture, told)


def _check_not_submitted(recipe: LoadedRecipe, trial: Trial) -> None:
    """Raise InputError where this machine is the choice only because SLURM, which may have the training, is silent."""
    history = histories(manifest_of(recipe).entries()).get(trial.name)
    chosen = recipe.values.launch.executor != AUTO or in_a_job()
    if not chosen and history is not None and history.last.state is State.SUBMITTED:
        told = f"job {history.last.job} of SLURM, which does not answer now, may be this training: {why_no_slurm()}"
        raise InputError(f"{told}; launch.executor=local trains here all the same")


def _train(
    recipe: LoadedRecipe,
    training: PlannedTraining,
    world: World | None,
    console: Console,
    on_result: OnResult,
    *,
    fresh: bool,
) -> int:
    settings = training.settings
    data = data_settings(recipe.values)
    state = initial_weights(recipe, training.graph)
    if world is None or world.rank == 0:
        _check_capture(recipe, training, console)
    if not _is_left(recipe, training, fresh=fresh, console=console if world is None or world.rank == 0 else None):
        return 0
    asked = asked_by_slurm() if in_a_job() else None
    whole = TrainingRun.of(recipe, training.trial.checkpoints, asked_to_end=lambda: bool(asked))

    def run(world: World, report: Report) -> TrainingResult:
        more = whole.arguments(world, report, settings)
        if settings.device == "cuda":
            use_device(world.device("cuda"))  # before the rank captures
        return train(training.capture(), training.plan, settings, data, world, state=state, **more)

    if world is not None:
        try:
            result = _run_joined(world, run, console, settings.iterations)
        except (OutOfMemoryError, PeerLostError, TimeoutError) as error:  # of another rank, its own output tells why
            console.print(f"auto3d: {error}", markup=False, soft_wrap=True)
            return 1
        if result.asked_to_end:
            await_end(asked, requeue=world.rank == 0)
        if world.rank == 0:
            on_result(_record(result, training.plan, recipe.values))
        leave_or_end()
        return 0
    devices = devices_for(recipe, training.plan.ranks, size=training.plan.ranks)
    manifest, name = manifest_of(recipe), training.trial.name
    manifest.append([Entry(trial=name, state=State.STARTED)])
    limits = {"timeout_s": None, "straggle_s": settings.timeout_s, "ignore_sigterm": asked is not None}
    with training_progress(console, settings.iterations) as on_report:
        outcome = run_ranks(training.plan.ranks, run, on_report=on_report, devices=devices, **limits)
    if outcome.status is Status.OK and outcome.result.asked_to_end:
        await_end(asked, requeue=True)
    manifest.append([Entry(trial=name, state=State.ENDED, told=outcome.status)])
    if outcome.status is not Status.OK:
        return _ended_badly(console, outcome.status, outcome.error)
    on_result(_record(outcome.result, training.plan, recipe.values))
    return 0


def run_as_job(
    recipe: LoadedRecipe,
    plan_file: str | None,
    console: Console,
    watcher: Watcher,
    on_result: OnResult,
    *,
    fresh: bool,
    follow: bool,
) -> int:
    """The same as a job of SLURM, if it is not under way already; unless it is to ``follow``, this only submits it."""
    check_place(recipe)
    training = planned(recipe, plan_file, console)
    trial = training.trial
    job = on_their_way(recipe, [trial]).get(trial)
    if job is not None and fresh:
        raise InputError(f"job {job} is this training; to end it first: {recipe.follow_up('cancel')}")
    write_command(recipe, "train", plan_file, trials=[trial.name])
    known = {} if (measurement := trial.measurement()) is None else {trial: measurement}
    record_ends(recipe, known)  # it may have ended while nobody followed it
    if measurement is not None and is_whole(recipe, measurement) and not fresh:
        console.print(f"done already, at {measurement.finished}; --fresh begins anew", markup=False, soft_wrap=True)
        on_result(_record(measurement, training.plan, recipe.values))
        return 0
    _check_capture(recipe, training, console)
    if job is None and not _is_left(recipe, training, fresh=fresh, console=console):
        return 0
    watcher.begin(1, [], 0)
    with executor_of(recipe) as executor:
        executor.run([trial], watcher, known=known, follow=follow)
    if not follow:
        return 0
    measurement = trial.measurement()
    if measurement.status is not Status.OK:
        return _ended_badly(console, measurement.status, measurement.error)
    on_result(_record(measurement, training.plan, recipe.values))
    return 0


def _is_left(recipe: LoadedRecipe, training: PlannedTraining, *, fresh: bool, console: Console | None) -> bool:
    """Whether any iteration is left to do; tells on ``console`` from where the training goes on.

    To begin it ``fresh`` removes its checkpoints, but not where SLURM starts the job that was told so again. Of several
    ranks, the one with a console does so.
    """
    folder, iterations = training.trial.checkpoints, recipe.values.training.iterations
    if fresh and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        if console is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return True
    done = newest(folder)
    if done is None:
        return True
    if console is not None:
        told = f"going on after iteration {done} of {iterations}, by the checkpoint in {folder}; --fresh begins anew"
        if done >= iterations:
            told = f"done already, by the checkpoint after iteration {done} in {folder}; --fresh begins anew"
        console.print(told, markup=False, soft_wrap=True)
    return done < iterations


def _ended_badly(console: Console, status: Status, error: str) -> int:
    console.print(f"auto3d: training ended as {status}:\n{error}", markup=False, soft_wrap=True)
    return 1


def _check_processes(recipe: LoadedRecipe, world: World | None, needed: int) -> None:
    """Raise RecipeError, before the model is captured, if there are not the processes and devices that a plan needs."""
    if world is None:
        if on_slurm(recipe):
            return
        nodes = len(cluster(recipe).nodes)
        if nodes > 1:
            problem = f"found {nodes}; on several machines: launch.executor=slurm, or srun, torchrun or mpirun on each"
            raise recipe.error("cluster.nodes", problem)
        check_devices(recipe, needed)
        return
    if world.size != needed:
        raise recipe.error("plan", f"it needs {needed} ranks, one for each device; the launcher started {world.size}")
    check_joined_device(recipe, local_rank=world.local_rank, size=world.size)


def _run_joined(
    world: World, run: Callable[[World, Report], TrainingResult], console: Console, iterations: int
) -> TrainingResult:
    with stdout_to_stderr(), naming_lost_peers():
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


def _record(result: TrainingResult | Measurement, plan: Plan, values: Recipe) -> dict[str, Any]:
    measured = result.iteration_s[values.measure.warmup_iterations :] or result.iteration_s
    return {
        "emulated": values.training.compute == "emulated",
        **{name: getattr(result, name) for name in ("loss", "grad_norm", "iteration_s", *BYTES)},
        "first_iteration": result.first_iteration,
        "samples_per_s": plan.global_batch / median(measured) if measured else None,
        "plan": asdict(plan),
    }
