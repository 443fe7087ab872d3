"""Recipe -> the cost model and its input: the work of the model, captured or measured layer by layer."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from auto3d.capture.graph import Graph
from auto3d.capture.interpolate import interpolate
from auto3d.cost.memory.plan import PlanMemory
from auto3d.cost.memory.workspaces import with_workspaces
from auto3d.cost.model import CostModel
from auto3d.cost.model_work import ModelWork
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import Work, work_of, work_of_local, work_scaled
from auto3d.derived.local_graph import LocalGraph
from auto3d.errors import InputError
from auto3d.partition.merak import Sharding
from auto3d.runtime.optimizer.memory import flops_of_parameters, memory_options, state_of_parameters
from auto3d.search.planned_model import PlannedGraphs, PlannedModel
from auto3d.share import Share
from auto3d.tensor_placement import Split
from launch.model.capture_process import CaptureProcess
from launch.model.graphs import PlanningModel
from launch.model.measured_layers import measured_model, with_measured_update
from launch.model.profile import find_profile
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import FLOAT8, UNFUSED
from launch.recipe.settings import cluster, optimizer_settings, predicted_precision, predicted_system, training

INTERPOLATED = (2, 4)  # samples; at 1 sample a model may have fewer operations than at other sizes


def subject_of(recipe: LoadedRecipe, *, process: CaptureProcess | None = None) -> PlannedModel:
    """The recipe's model in the form that search and cost model take; captured in ``process`` if there is one."""
    values = recipe.values
    if values.model.layers is None:
        model = PlanningModel(recipe, predicted=True, process=process)
        return _captured_subject(
            recipe,
            model.graph,
            model.sharding,
            model.split,
            model.graph_of,
            fused_attention=_fused_attention(recipe),
        )
    return measured_model(recipe)


def planning_subject(
    recipe: LoadedRecipe, *, only_predicted: bool = False, process: CaptureProcess | None = None
) -> PlannedModel:
    """The recipe's model for a search; captured in ``process`` if there is one.

    Plans for several machines are only predicted, and with ``only_predicted`` those for one machine are too. So all
    micro-batch sizes are interpolated from two captures, unless the model's code behaves differently at that size. A
    plan at an interpolated size has no Graph; ``candidates.exact_plans`` makes it ready to run.
    """
    runs_here = len(cluster(recipe).nodes) == 1 and not only_predicted
    if recipe.values.model.layers is not None or runs_here:
        return subject_of(recipe, process=process)
    model = PlanningModel(recipe, predicted=True, process=process)

    captured = cache(model.graph)

    @cache
    def graph_at(samples: int) -> Graph:
        if samples in INTERPOLATED:
            return captured(samples)
        try:
            first, second = map(captured, INTERPOLATED)
            return interpolate(first, second, samples)
        except InputError:
            return captured(samples)

    def sharding(graph: Graph) -> Sharding:
        """The sharding of ``graph``; an interpolated Graph has the operations, and so the sharding, of its sources."""
        return model.sharding(graph if graph.fingerprint else captured(INTERPOLATED[0]))

    def source_of(samples: int) -> int:
        """The micro-batch size at which the model is divided for ``samples``: the same for all interpolated sizes."""
        return samples if samples not in INTERPOLATED and graph_at(samples).fingerprint else INTERPOLATED[0]

    def split(samples: int, share: Share) -> dict[str, Split]:
        return model.split(source_of(samples), share)

    return _captured_subject(
        recipe, graph_at, sharding, split, model.graph_of, source_of, fused_attention=_fused_attention(recipe)
    )


def captured_subject(
    recipe: LoadedRecipe, graph_at: Callable[[int], Graph], model: PlanningModel | None = None
) -> PlannedGraphs:
    """The recipe's model for a caller that captures its Graphs anyway, such as a process that will run it.

    ``model`` gives what follows from the Graphs (default: made in this process).
    """
    model = model or PlanningModel(recipe)
    return _captured_subject(recipe, graph_at, model.sharding, model.split, model.graph_of, fused_attention=True)


def runtime_memory(
    recipe: LoadedRecipe, graph_at: Callable[[int], Graph], model: PlanningModel | None = None
) -> PlanMemory:
    """The memory of plans as this runtime trains them, whatever system the recipe's group ``prediction`` describes.

    ``graph_at`` and ``model`` are as in ``captured_subject``.
    """
    model = model or PlanningModel(recipe)
    training = recipe.values.training
    subject = _captured_subject(
        recipe,
        graph_at,
        model.sharding,
        model.split,
        model.graph_of,
        fused_attention=True,
        precision=training.precision,
    )
    settings, kind = optimizer_settings(recipe.values), recipe.values.cluster.device
    options = memory_options(settings, kind, training.precision, lambda: graph_at(INTERPOLATED[0]))
    options = with_workspaces(replace(options, deterministic=training.deterministic), cluster(recipe))
    return PlanMemory(ModelWork(subject.work, options), options)


def _captured_subject(
    recipe: LoadedRecipe,
    graph_at: Callable[[int], Graph],
    sharding: Callable[[Graph], Sharding],
    split: Callable[[int, Share], dict[str, Split]],
    graph_of: Callable[[int, Share], LocalGraph],
    divided_at: Callable[[int], int] = lambda samples: samples,
    *,
    fused_attention: bool,
    precision: str | None = None,
) -> PlannedGraphs:
    """``graph_of`` gives the Graph of a share at a number of samples, and ``divided_at`` the number from which the work
    of shares at other numbers is taken. ``precision`` replaces the precision that the recipe predicts."""
    prediction = recipe.values.prediction
    float8 = precision is None and prediction.precision == FLOAT8
    precision = precision or predicted_precision(recipe.values)

    def work(graph: Graph) -> Work:
        return work_of(
            graph,
            sharding(graph).bounds,
            precision=precision,
            fused=prediction.fused,
            fused_attention=fused_attention,
            system=predicted_system(recipe.values),
            float8=float8,
        )

    @cache
    def work_there(there: int, share: Share) -> Work:
        return work_of_local(
            subject.work(there),
            graph_of(there, share),
            precision=precision,
            fused=prediction.fused,
            fused_attention=fused_attention,
            system=predicted_system(recipe.values),
            float8=float8,
        )

    def share_work(samples: int, share: Share) -> Work:
        there = divided_at(samples)
        local, whole = work_there(there, share), subject.work(there)
        return local if there == samples else work_scaled(local, whole, subject.work(samples), samples / there)

    subject = PlannedGraphs(graph_at, work, lambda graph: sharding(graph).bounds, split, share_work)
    return subject


def _fused_attention(recipe: LoadedRecipe) -> bool:
    return recipe.values.prediction.attention != UNFUSED


def cost_model(recipe: LoadedRecipe, subject: PlannedModel) -> CostModel:
    """The cost model of the recipe's cluster and training; it uses measured times if there is a profile."""
    machine, times = cluster(recipe), subject.times

    def fingerprint(samples: int) -> str:
        """The fingerprint of the Graph at so many samples, also if the subject has only interpolated that Graph."""
        return subject.fingerprint(samples) or PlanningModel(recipe).graph(samples).fingerprint

    measured_in, times_of_work, stage_seconds = "", None, None
    if (stored := find_profile(recipe, fingerprint)) is not None:
        file, profile = stored
        measured_in = str(file)
        machine, times = profile.measured(machine), profile.times_at(subject.work, subject.cuts)
        times_of_work, stage_seconds = profile.times_of_work, profile.stage_seconds
    return CostModel(
        with_measured_update(machine, recipe),
        _training(recipe, subject),
        subject.work,
        times_at=times,
        times_of_work=times_of_work,
        stage_seconds=stage_seconds,
        method=recipe.values.prediction.method,
        measured_in=measured_in,
    )


def _training(recipe: LoadedRecipe, subject: PlannedModel) -> TrainingOptions:
    """The training settings, with what follows from the shapes of the parameters where the optimizer asks for it."""
    options, settings = training(recipe.values), optimizer_settings(recipe.values)
    if (
        settings.updates_all_alike
        or settings.offload
        or options.system is not None
        or not isinstance(subject, PlannedGraphs)
    ):
        return options

    def graph() -> Graph:
        return subject.graph(INTERPOLATED[0])

    of_state, flops = state_of_parameters(settings, graph), flops_of_parameters(settings, graph)
    return replace(options, state_elements=of_state, update_flops=flops)
