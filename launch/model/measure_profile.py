"""Measures a profile of this machine with a recipe's model; `auto3d profile` and `auto3d tune` use it."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime

from auto3d.cost.profile import Profile, ProfileError
from auto3d.derived.of_share import derived
from auto3d.derived.planned_split import planned_split
from auto3d.errors import InputError
from auto3d.runtime.measurement import Environment, Status
from auto3d.runtime.process.world import World
from auto3d.runtime.profile.distinct_subgraphs import ModelSubgraphs, distinct_subgraphs
from auto3d.runtime.profile.profiler import MachineTimes, measure, num_reports
from launch.model.build import captured_model, use_device
from launch.model.data import training_data
from launch.model.graphs import PlanningModel
from launch.model.profile import micro_batch_sizes, setting_of, tensor_parallel_shares
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import training_settings
from launch.run.devices import devices_for
from launch.run.ranks import Report, check_devices, run_ranks
from launch.run.streams import stdout_to_stderr


def measure_profile(
    recipe: LoadedRecipe,
    *,
    capturing: Callable[[int], AbstractContextManager[None]],
    measuring: Callable[[int | None], AbstractContextManager[Callable[[str], None]]],
) -> Profile:
    """The profile of this machine, measured with one process per device of a node.

    The arguments report progress. ``capturing`` is entered for the capture at each micro-batch size. ``measuring`` is
    entered for the measurement with the number of its parts, if known, and yields a function that is called with the
    name of each part that is done.
    """
    values = recipe.values
    _check(recipe)
    ranks = values.cluster.devices_per_node
    check_devices(recipe, ranks)
    devices = devices_for(recipe, ranks, size=ranks)
    settings, data = training_settings(values, iterations=1), training_data(recipe)
    planning, cores = PlanningModel(recipe), len(os.sched_getaffinity(0))

    def models_of(size: int) -> list[ModelSubgraphs]:
        captured = captured_model(recipe, size)
        bounds = planning.sharding(captured.graph).bounds
        models = [distinct_subgraphs(captured, bounds)]
        for share in tensor_parallel_shares(recipe):
            with suppress(InputError), stdout_to_stderr():  # such plans are refused, with the reason
                split = planned_split(captured, share, rules=values.model.tensor_parallel)
                of_share = derived(captured, share, split=split)
                models.append(distinct_subgraphs(captured, bounds, derived=of_share))
        return models

    models: list[ModelSubgraphs] = []
    for size in [] if devices else micro_batch_sizes(recipe):  # ranks on GPUs capture: see launch.model.build
        with capturing(size):
            models += models_of(size)

    def run(world: World, report: Report) -> tuple[MachineTimes, Environment]:
        if devices:
            use_device(world.device("cuda"))
        ours = models or [model for size in micro_batch_sizes(recipe) for model in models_of(size)]
        measured = measure(ours, settings, data, world, seed=values.training.seed, report=report)
        return measured, Environment.here(settings.device, cores=cores)

    with measuring(num_reports(models) if models else None) as on_report:
        outcome = run_ranks(
            ranks, run, on_report=on_report, devices=devices, limit_s=None, straggle_s=settings.timeout_s
        )
    if outcome.status is not Status.OK:
        raise ProfileError(f"profile: the ranks ended as {outcome.status}:\n{outcome.error}")
    measured, environment = outcome.result
    return Profile(
        setting=setting_of(recipe),
        host=f"{environment.host}: {environment.computer}, load {os.getloadavg()[0]:.1f}",
        torch=environment.torch,
        model=f"{values.model.architecture or values.model.factory} of {recipe.name}",
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        sizes=measured.sizes,
        slowdown=measured.slowdown,
        messages=measured.messages,
        collectives=measured.collectives,
        sums=measured.sums,
        update_s=measured.update_s,
    )


def _check(recipe: LoadedRecipe) -> None:
    """Raise RecipeError for a recipe whose model cannot be measured here."""
    values = recipe.values
    if values.model.layers is not None:
        raise recipe.error("model.layers", "found measured layers; a profile measures a model that can run")
    if values.training.compute != "real":
        raise recipe.error("training.compute", f"found {values.training.compute!r}; only real devices are measured")
    if values.cluster.more:
        raise recipe.error("cluster.more", "found further kinds of nodes; a profile is for one kind: leave them out")
