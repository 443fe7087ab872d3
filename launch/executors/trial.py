"""Run a plan for a few iterations, as a trial, or as a whole training; the result is a Measurement."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from auto3d.capture.model import CapturedModel
from auto3d.cost.throughput import IterationFlops, flops_of_graph
from auto3d.errors import InputError
from auto3d.plan import AUTO3D, Plan
from auto3d.runtime.checkpoint.format import Checkpoints
from auto3d.runtime.executor import IterationResult
from auto3d.runtime.measurement import BYTES, CommunicationCalls, Environment, Measurement, Status
from auto3d.runtime.process.world import World
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import TrainingResult, train
from auto3d.runtime.watch.metrics import Metrics, metrics_of
from auto3d.runtime.watch.of_rank import TracedIteration, TraceRequest, Watched
from launch.console.records import measured_precision
from launch.model.build import RankCaptures
from launch.model.data import check_data_fits, training_data
from launch.model.initial_weights import initial_weights
from launch.peers.communication import log_communication
from launch.peers.limits import DEEPSPEED, engine_version
from launch.peers.training import train_by_peer
from launch.recipe.data import tokens_per_sample
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import known_peak_flops, training_settings
from launch.run.devices import devices_for
from launch.run.diagnosis import Ending
from launch.run.ranks import NodeRanks, Outcome, Report, run_ranks
from launch.store.files import private_folder
from launch.watch.outlets import trace_folder

RankCapture = Callable[[World], CapturedModel]  # gives a rank the captured model


@dataclass(frozen=True)
class TrainingRun:
    """What a run needs to be the recipe's whole training; a trial is a few of its iterations."""

    recipe: LoadedRecipe
    checkpoints: Checkpoints
    asked_to_end: Callable[[], bool]  # says whether to end early; no signal but SIGKILL ends the ranks

    @staticmethod
    def of(recipe: LoadedRecipe, folder: Path, asked_to_end: Callable[[], bool]) -> "TrainingRun":
        """The training of ``recipe`` with its checkpoints in ``folder``, which is created."""
        private_folder(folder)
        training = recipe.values.training
        if training.trace:
            private_folder(trace_folder(folder))
        checkpoints = Checkpoints(folder=folder, every=training.checkpoint_every, keep=training.checkpoint_keep)
        return TrainingRun(recipe, checkpoints, asked_to_end)

    def arguments(
        self, plan: Plan, captured: CapturedModel, world: World, report: Report, settings: TrainingSettings
    ) -> dict[str, Any]:
        """Further arguments for ``train``; they make rank 0 report the Metrics of each iteration to its parent."""
        emulated = settings.emulation is not None
        make = metrics_of(
            plan,
            flops=flops_of_graph(plan, captured.graph),
            tokens_per_sample=tokens_per_sample(self.recipe.values),
            peak_flops=None if emulated else known_peak_flops(self.recipe, plan, measured_precision(self.recipe)),
            emulated=emulated,
        )

        def on_iteration(iteration: int, result: IterationResult, watched: Watched) -> None:
            if world.rank == 0:
                if watched.traced is not None:
                    report(watched.traced)
                report(make(iteration, result, watched))

        trace = self.recipe.values.training.trace
        request = TraceRequest(
            iterations=tuple(trace),
            warmup=self.recipe.values.measure.warmup_iterations,
            folder=trace_folder(self.checkpoints.folder),
        )

        return {
            "checkpoints": self.checkpoints,
            "asked_to_end": self.asked_to_end,
            "on_iteration": on_iteration,
            "trace": request,
        }


def measure(
    recipe: LoadedRecipe,
    plan: Plan,
    folder: Path,
    *,
    node: NodeRanks | None = None,
    of_all: Callable[[Outcome], Outcome] = lambda outcome: outcome,
    training: TrainingRun | None = None,
    on_report: Callable[[Metrics | TracedIteration], None] = lambda report: None,
    captures: RankCaptures | None = None,
) -> Measurement:
    """The measurement of a run of ``plan``: the recipe's warm-up and measured iterations, or the whole ``training``.

    All ranks run on this machine, or only the ranks of ``node``, and ``of_all`` turns their outcome into the outcome of
    all nodes. ``folder`` is private, and may have copies of captured programs; ``captures`` are those that this process
    has already. ``on_report`` receives each iteration of a training.
    """
    values = recipe.values
    warmup = 0 if training else values.measure.warmup_iterations
    iterations = values.training.iterations if training else warmup + values.measure.iterations
    settings = training_settings(values, iterations=iterations)
    facts: dict[str, Any] = {
        "plan": plan,
        "emulated": settings.emulation is not None,
        "warmup_iterations": warmup,
        "tokens_per_sample": tokens_per_sample(values),
    }
    cores = len(os.sched_getaffinity(0))
    limits: dict[str, Any] = {"limit_s": values.launch.trial_timeout_s, "straggle_s": settings.timeout_s}
    if training:
        limits |= {"limit_s": None, "on_report": on_report, "ignore_sigterm": True}
    try:
        devices = devices_for(recipe, len(node.ranks) if node else plan.ranks, size=plan.ranks)
        data = training_data(recipe)
        captured_for = (captures or RankCaptures(recipe, folder)).of_plan(plan)

        def run(world: World, report: Report) -> tuple[TrainingResult, IterationFlops, Environment]:
            captured = captured_for(world)
            check_data_fits(data, captured.graph, emulated=settings.emulation is not None)
            state = initial_weights(recipe, captured.graph)
            if plan.engine == AUTO3D:
                more = training.arguments(plan, captured, world, report, settings) if training else {}
                result = train(captured, plan, settings, data, world, state=state, **more)
            else:
                result = train_by_peer(captured, plan, settings, data, world, state=state)
            return result, flops_of_graph(plan, captured.graph), Environment.here(settings.device, cores=cores)

        outcome = run_ranks(plan.ranks, run, folder=folder, node=node, devices=devices, **limits)
    except InputError as error:
        outcome = Outcome(Status.FAILED, error=str(error), ending=Ending.REFUSED)
    outcome = of_all(outcome)
    if outcome.status is not Status.OK:
        return Measurement(status=outcome.status, error=outcome.error, finished=_now(), **facts)
    result, flops, environment = outcome.result
    if values.measure.communication and not training:
        facts |= _communication(recipe, plan, settings, folder, devices, captured_for, on_nodes=node is not None)
    return Measurement(
        status=Status.OK,
        iteration_s=result.iteration_s[warmup:],
        loss=result.loss[warmup:],
        grad_norm=result.grad_norm[warmup:],
        **{name: getattr(result, name) for name in BYTES},
        first_iteration=result.first_iteration,
        model_flops=flops.model,
        recomputed_flops=flops.recomputed,
        engine_version=engine_version(plan.engine),
        environment=environment,
        finished=_now(),
        **facts,
    )


def _communication(
    recipe: LoadedRecipe,
    plan: Plan,
    settings: TrainingSettings,
    folder: Path,
    devices: Sequence[str],
    captured_for: RankCapture,
    *,
    on_nodes: bool,
) -> dict[str, Any]:
    """The communication of ``plan`` in a second run, or why there is none, as fields of a Measurement."""
    if plan.engine not in DEEPSPEED:
        return {"why_not_logged": f"{plan.engine} has no communication log"}
    if on_nodes:
        return {"why_not_logged": "communication is logged only where one node runs all ranks"}
    data, first = training_data(recipe), recipe.values.measure.warmup_iterations

    def run(world: World, report: Report) -> list[list[CommunicationCalls]]:
        captured = captured_for(world)
        state = initial_weights(recipe, captured.graph)
        return log_communication(captured, plan, settings, data, world, first=first, state=state)

    limit_s = recipe.values.launch.trial_timeout_s
    try:
        outcome = run_ranks(
            plan.ranks, run, limit_s=limit_s, straggle_s=settings.timeout_s, folder=folder, devices=devices
        )
    except InputError as error:
        outcome = Outcome(Status.FAILED, error=str(error))
    if outcome.status is Status.OK:
        return {"communication": outcome.result}
    return {"why_not_logged": f"the run that logs ended with {outcome.status}: {outcome.error}"}


def is_whole(recipe: LoadedRecipe, measurement: Measurement) -> bool:
    """Whether ``measurement`` belongs to a training that has reached its last iteration."""
    done = measurement.first_iteration + len(measurement.iteration_s)
    return measurement.status is Status.OK and done >= recipe.values.training.iterations


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
