"""Runs the candidate stages of RaNNC on this machine; `auto3d profile --stages` uses it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from auto3d.cost.profile import CandidateTimes, Profile, ProfileError
from auto3d.partition.methods.rannc import candidate_blocks
from auto3d.partition.methods.rannc.candidates import candidate_stages
from auto3d.partition.stage import PartitionError
from auto3d.runtime.measurement import Status
from auto3d.runtime.process.world import World
from auto3d.runtime.profile.distinct_subgraphs import distinct_stages
from auto3d.runtime.profile.profiler import STAGE_ROUNDS, NamedStages, measure_stages
from launch.model.build import captured_model, use_device
from launch.model.data import training_data
from launch.model.graphs import PlanningModel, default_micro_batch_size
from launch.model.profile import micro_batch_sizes
from launch.model.stages import request_on
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import cluster, training_settings
from launch.run.devices import devices_for
from launch.run.ranks import Report, run_ranks


def measure_candidates(
    recipe: LoadedRecipe,
    profile: Profile,
    *,
    capturing: Callable[[int], AbstractContextManager[None]],
    measuring: Callable[[int | None], AbstractContextManager[Callable[[str], None]]],
) -> tuple[CandidateTimes, ...]:
    """The times of all candidate stages of the recipe's model at each micro-batch size, run whole by one process.

    The candidates are the runs of the blocks that RaNNC forms by the times of ``profile``, if they fit a device. The
    other arguments are as in ``measure_profile``.
    """
    planning = PlanningModel(recipe, predicted=True)
    machine = profile.measured(cluster(recipe))
    size = default_micro_batch_size(recipe)
    request = request_on(machine, planning, profile, cuts=(), stages=None, micro_batch_size=size)
    profiles, blocks = candidate_blocks(request)
    settings, data = training_settings(recipe.values, iterations=1), training_data(recipe)
    devices = devices_for(recipe, 1, size=1)

    def stages_of(size: int) -> list[NamedStages]:
        captured = captured_model(recipe, size)
        with suppress(PartitionError):  # a model may have other operations at 1 sample
            names, stages = zip(*candidate_stages(profiles, blocks, captured.graph), strict=True)
            return [NamedStages(names=names, model=distinct_stages(captured, stages))]
        return []

    sizes: list[NamedStages] = []
    for size in [] if devices else micro_batch_sizes(recipe):  # ranks on GPUs capture: see launch.model.build
        with capturing(size):
            sizes += stages_of(size)

    def run(world: World, report: Report) -> tuple[CandidateTimes, ...]:
        if devices:
            use_device(world.device("cuda"))
        ours = sizes or [named_stages for size in micro_batch_sizes(recipe) for named_stages in stages_of(size)]
        return measure_stages(ours, settings, data, world, seed=recipe.values.training.seed, report=report)

    parts = STAGE_ROUNDS * sum(len(named_stages.model.distinct) for named_stages in sizes)
    with measuring(parts or None) as on_report:
        outcome = run_ranks(1, run, on_report=on_report, devices=devices, limit_s=None, straggle_s=settings.timeout_s)
    if outcome.status is not Status.OK:
        raise ProfileError(f"profile: the rank ended as {outcome.status}:\n{outcome.error}")
    times: tuple[CandidateTimes, ...] = outcome.result
    return times
