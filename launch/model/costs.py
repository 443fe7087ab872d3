"""Recipe -> the cost model and its input: the work of the model, captured or measured layer by layer."""

from contextlib import suppress
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
from launch.recipe.schema import FLOAT8
from launch.recipe.settings import cluster, optimizer_settings, predicted_precision, predicted_system, training

INTERPOLATED = (2, 4)  # samples; at 1 sample a model may have fewer operations than at other sizes


def subject_of(recipe: LoadedRecipe, *, process: CaptureProcess | None = None) -> PlannedModel:
    """The recipe's model in the form that search and cost model take; captured in ``process`` if there is one."""
    if recipe.values.model.layers is not None:
        return measured_model(recipe)
    return captured_subject(PlanningModel(recipe, predicted=True, process=process))


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
    return captured_subject(_InterpolatedModel(recipe, predicted=True, process=process))


class _InterpolatedModel(PlanningModel):
    """A model that is captured at INTERPOLATED sizes; its Graphs at other sizes are interpolated, if possible."""

    def _graph(self, micro_batch_size: int) -> Graph:
        if micro_batch_size not in INTERPOLATED:
            with suppress(InputError):
                first, second = map(self.graph, INTERPOLATED)
                return interpolate(first, second, micro_batch_size)
        return super()._graph(micro_batch_size)

    def sharding(self, graph: Graph, subgraphs: int | None = None) -> Sharding:
        """The sharding of ``graph``; an interpolated Graph has the operations, and so the sharding, of its sources."""
        return super().sharding(graph if graph.fingerprint else self.graph(INTERPOLATED[0]), subgraphs)

    def divided_at(self, micro_batch_size: int) -> int:
        """The size at which the model is divided: the same for all interpolated sizes."""
        captured = micro_batch_size not in INTERPOLATED and self.graph(micro_batch_size).fingerprint
        return micro_batch_size if captured else INTERPOLATED[0]

    def split(self, micro_batch_size: int, share: Share) -> dict[str, Split]:
        return super().split(self.divided_at(micro_batch_size), share)


def runtime_memory(model: PlanningModel) -> PlanMemory:
    """The memory of plans as this runtime trains them, whatever system the recipe's group ``prediction`` describes."""
    values = model.recipe.values
    settings, precision = optimizer_settings(values), values.training.precision
    options = memory_options(settings, values.cluster.device, precision, lambda: model.graph(INTERPOLATED[0]))
    options = replace(options, deterministic=values.training.deterministic)
    options = with_workspaces(options, cluster(model.recipe))
    return PlanMemory(ModelWork(captured_subject(model, precision=precision).work, options), options)


def captured_subject(model: PlanningModel, *, precision: str | None = None) -> PlannedGraphs:
    """``model`` in the form that search and cost model take; ``precision`` replaces what the recipe predicts."""
    values, fused_attention = model.recipe.values, model.fused_attention
    prediction = values.prediction
    float8 = precision is None and prediction.precision == FLOAT8
    precision = precision or predicted_precision(values)

    def work(graph: Graph) -> Work:
        return work_of(
            graph,
            model.sharding(graph).bounds,
            precision=precision,
            fused=prediction.fused,
            fused_attention=fused_attention,
            system=predicted_system(values),
            float8=float8,
        )

    @cache
    def work_there(there: int, share: Share) -> Work:
        return work_of_local(
            subject.work(there),
            model.graph_of(there, share),
            precision=precision,
            fused=prediction.fused,
            fused_attention=fused_attention,
            system=predicted_system(values),
            float8=float8,
        )

    def share_work(samples: int, share: Share) -> Work:
        there = model.divided_at(samples)
        local, whole = work_there(there, share), subject.work(there)
        return local if there == samples else work_scaled(local, whole, subject.work(samples), samples / there)

    subject = PlannedGraphs(model.graph, work, lambda graph: model.sharding(graph).bounds, model.split, share_work)
    return subject


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
