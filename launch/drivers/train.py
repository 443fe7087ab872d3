"""Train under one plan: in processes that we start, as one rank that a launcher started, or as a job of SLURM."""

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

from rich.console import Console

from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.checkpoint.format import check, checkpoint_folder, learnt_by, newest, read
from auto3d.runtime.measurement import BYTES, Measurement, Status
from auto3d.runtime.out_of_memory import OutOfMemoryError
from auto3d.runtime.process.world import World, leave_or_end
from auto3d.runtime.training import TrainingResult, train
from auto3d.runtime.waiting import PeerLostError, naming_lost_peers
from auto3d.search.axes import plan_name
from launch.console.progress import at_work
from launch.console.training_progress import watching
from launch.drivers.planned_training import PlannedTraining, plan_training
from launch.drivers.sweep import check_place
from launch.executors.submit import on_their_way
from launch.executors.trial import TrainingRun, is_whole
from launch.executors.trial_executor import executor_of
from launch.model.build import use_device
from launch.model.check_capture import check_once
from launch.model.data import training_data
from launch.model.initial_weights import initial_weights
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import Recipe
from launch.recipe.schema_key import AUTO
from launch.run.devices import devices_for
from launch.run.ranks import Report, run_ranks
from launch.run.streams import stdout_to_stderr
from launch.slurm.executor import in_a_job, why_no_slurm
from launch.slurm.warning import asked_by_slurm, await_end
from launch.store.ends import record_ends
from launch.store.manifest import Entry, State, histories
from launch.store.trials import Command, Trial, exclusive, manifest_of, same_training, write_command
from launch.store.watcher import Watcher
from launch.watch.outlets import metrics_folder

OnResult = Callable[[dict[str, Any]], None]


def run_training(
    recipe: LoadedRecipe,
    plan_file: str | None,
    world: World | None,
    console: Console,
    on_result: OnResult,
    *,
    fresh: bool,
) -> int:
    """Train as one rank of ``world``, or start all ranks if it is None; returns the exit code.

    Progress goes to ``console``, and rank 0's record to ``on_result``. The training continues from its newest
    checkpoint, or starts over if ``fresh``.
    """
    training = plan_training(recipe, plan_file, console, world)
    if world is not None:
        with exclusive(recipe, training.trial) if world.rank == 0 else nullcontext():
            return _train(recipe, training, world, console, on_result, fresh=fresh)
    _check_not_submitted(recipe, training.trial)
    with exclusive(recipe, training.trial):
        return _train(recipe, training, None, console, on_result, fresh=fresh)


def _check_capture(recipe: LoadedRecipe, training: PlannedTraining, console: Console) -> None:
    """Raise InputError if the captured model does not compute what the model itself computes."""
    with at_work(console, "comparing the captured model with the model itself"):
        tell = partial(console.print, markup=False, soft_wrap=True)
        check_once(recipe, training.graph, training.capture, training.plan, tell)


def _check_not_submitted(recipe: LoadedRecipe, trial: Trial) -> None:
    """Raise InputError if the training may be a job of SLURM, and we train here only since SLURM does not answer."""
    known = histories(manifest_of(recipe).entries())
    last = [known[name].last for name in same_training(trial, known)]
    job = next((entry.job for entry in last if entry.state is State.SUBMITTED), None)
    chosen = recipe.values.launch.executor != AUTO or in_a_job()
    if not chosen and job is not None:
        problem = f"job {job} of SLURM, which does not answer now, may be this training: {why_no_slurm()}"
        raise InputError(f"{problem}; to train here all the same: launch.executor=local")


def _check_no_other_plan(recipe: LoadedRecipe, trial: Trial) -> None:
    """Raise InputError if a job trains the same under another plan: both would write the same checkpoints."""
    names = same_training(trial, histories(manifest_of(recipe).entries()))
    others = [replace(trial, name=name) for name in names if name != trial.name]
    for other, job in on_their_way(recipe, others).items():
        problem = f"job {job} is this training under another plan, {other.name}"
        raise InputError(f"{problem}; to end it first: {recipe.follow_up('cancel')}")


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
    tell = partial(console.print, markup=False, soft_wrap=True)
    data = training_data(recipe, training.graph, tell if world is None or world.rank == 0 else lambda line: None)
    state = initial_weights(recipe, training.graph)
    if world is None or world.rank == 0:
        _check_capture(recipe, training, console)
    if not _has_iterations_left(
        recipe, training, fresh=fresh, console=console if world is None or world.rank == 0 else None
    ):
        return 0
    asked = asked_by_slurm() if in_a_job() else None
    assert training.trial.checkpoints is not None  # a training has some
    whole = TrainingRun.of(recipe, training.trial.checkpoints, asked_to_end=lambda: bool(asked))

    def run(world: World, report: Report) -> TrainingResult:
        if settings.device == "cuda":
            use_device(world.device("cuda"))  # before the rank captures
        captured = training.capture()
        more = whole.arguments(training.plan, captured, world, report, settings)
        return train(captured, training.plan, settings, data, world, state=state, **more)

    if world is not None:
        try:
            result = _run_joined(recipe, training, world, run, console)
        except (
            OutOfMemoryError,
            PeerLostError,
            TimeoutError,
        ) as error:  # if another rank failed, its output says why
            console.print(f"auto3d: {error}", markup=False, soft_wrap=True)
            return 1
        if result.asked_to_end:
            assert asked is not None
            await_end(asked, requeue=world.rank == 0)
        if world.rank == 0:
            on_result(_record(result, training.plan, recipe.values))
        leave_or_end()
        return 0
    devices = devices_for(recipe, training.plan.ranks, size=training.plan.ranks)
    manifest, name = manifest_of(recipe), training.trial.name
    manifest.append([Entry(trial=name, state=State.STARTED)])
    limits: dict[str, Any] = {"limit_s": None, "straggle_s": settings.timeout_s, "ignore_sigterm": asked is not None}
    with watching(console, recipe, training.plan, training.trial.checkpoints) as on_report:
        outcome = run_ranks(training.plan.ranks, run, on_report=on_report, devices=devices, **limits)
    if outcome.status is Status.OK and outcome.result.asked_to_end:
        assert asked is not None
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
    """Train as a job of SLURM, which is submitted unless it is under way already, and ``follow`` it to its end."""
    check_place(recipe, "train")
    training = plan_training(recipe, plan_file, console)
    trial = training.trial
    _check_no_other_plan(recipe, trial)
    job = on_their_way(recipe, [trial]).get(trial)
    if job is not None and fresh:
        raise InputError(f"job {job} is this training; to end it first: {recipe.follow_up('cancel')}")
    write_command(recipe, Command("train", [*recipe.overrides], plan_file, [trial.name]))
    known = {} if (measurement := trial.measurement()) is None else {trial: measurement}
    record_ends(recipe, known)  # it may have ended while no process followed it
    if measurement is not None and is_whole(recipe, measurement) and not fresh:
        console.print(
            f"this training ended at {measurement.finished}; --fresh starts over", markup=False, soft_wrap=True
        )
        on_result(_record(measurement, measurement.plan, recipe.values))
        return 0
    _check_capture(recipe, training, console)
    if job is None and not _has_iterations_left(recipe, training, fresh=fresh, console=console):
        return 0
    watcher.begin(1, [], 0)
    with executor_of(recipe) as executor:
        executor.run([trial], watcher, known=known, follow=follow)
    if not follow:
        return 0
    measurement = trial.measurement()
    assert measurement is not None  # it was followed to its end
    if measurement.status is not Status.OK:
        return _ended_badly(console, measurement.status, measurement.error)
    on_result(_record(measurement, measurement.plan, recipe.values))
    return 0


def _has_iterations_left(
    recipe: LoadedRecipe, training: PlannedTraining, *, fresh: bool, console: Console | None
) -> bool:
    """Whether any iteration remains; prints on ``console`` after which iteration the training continues.

    ``fresh`` removes the checkpoints, except in a job that SLURM has requeued. The rank that has a console does so.
    Raises CheckpointError if the newest cannot be read or belongs to another training.
    """
    folder, iterations = training.trial.checkpoints, recipe.values.training.iterations
    assert folder is not None  # a training has some
    if fresh and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        if console is not None:
            for stale in (folder, metrics_folder(folder)):
                shutil.rmtree(stale, ignore_errors=True)
        return True
    done = newest(folder)
    if done is None:
        return True
    source = checkpoint_folder(folder, done)
    check(source, read(source), training.graph, learnt_by(training.plan, training.settings.optimizer))
    if console is not None:
        line = f"continuing after iteration {done} of {iterations}, by the checkpoint in {folder}; --fresh starts over"
        if done >= iterations:
            line = f"nothing left to do: the checkpoint in {folder} is after iteration {done}; --fresh starts over"
        console.print(line, markup=False, soft_wrap=True)
    return done < iterations


def _ended_badly(console: Console, status: Status, error: str) -> int:
    console.print(f"auto3d: training ended as {status}:\n{error}", markup=False, soft_wrap=True)
    return 1


def _run_joined(
    recipe: LoadedRecipe,
    training: PlannedTraining,
    world: World,
    run: Callable[[World, Report], TrainingResult],
    console: Console,
) -> TrainingResult:
    assert training.trial.checkpoints is not None  # a training has some
    with stdout_to_stderr(), naming_lost_peers():
        if world.rank:
            return run(world, lambda report: None)
        with watching(console, recipe, training.plan, training.trial.checkpoints) as on_report:
            return run(world, on_report)


def _record(result: TrainingResult | Measurement, plan: Plan, values: Recipe) -> dict[str, Any]:
    measured = result.iteration_s[values.measure.warmup_iterations :] or result.iteration_s
    return {
        "emulated": values.training.compute == "emulated",
        **{name: getattr(result, name) for name in ("loss", "grad_norm", "iteration_s", *BYTES)},
        "first_iteration": result.first_iteration,
        "samples_per_s": plan.global_batch / median(measured) if measured else None,
        "plan_name": plan_name(plan),
        "plan": asdict(plan),
    }
