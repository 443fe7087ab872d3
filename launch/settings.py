"""Recipe -> the engine's own settings, group by group."""

from auto3d.capture.export import ExportedModel, export
from auto3d.cluster import Cluster
from auto3d.runtime.data import DataSettings, InputField
from auto3d.runtime.optimizer import OptimizerSettings
from auto3d.runtime.training import TrainingSettings
from auto3d.search.space import SearchSpace
from launch.model import build_function, told
from launch.output import stdout_to_stderr
from launch.recipe import LoadedRecipe, data_files
from launch.schema import Recipe


def exported_model(recipe: LoadedRecipe) -> ExportedModel:
    """The recipe's model, captured."""
    with stdout_to_stderr():
        build = build_function(recipe)
        try:
            return export(build, data_settings(recipe.values).input_specs())
        except SystemExit as error:
            raise recipe.error("model", f"its code ended the program: {told(error)}") from None


def data_settings(recipe: Recipe) -> DataSettings:
    inputs = {
        name: InputField(kind=i.kind, shape=tuple(i.shape), high=i.high) for name, i in recipe.data.inputs.items()
    }
    return DataSettings(
        source=recipe.data.source,
        files=tuple(data_files(recipe)),
        sequence_length=recipe.data.sequence_length,
        vocabulary_size=recipe.data.vocabulary_size,
        inputs=inputs or {"input_ids": InputField(kind="tokens"), "labels": InputField(kind="tokens")},
    )


def cluster(recipe: Recipe) -> Cluster:
    return Cluster(
        nodes=recipe.cluster.nodes,
        devices_per_node=recipe.cluster.devices_per_node,
        device=recipe.cluster.device,
        memory_bytes=None if recipe.cluster.memory_gib is None else recipe.cluster.memory_gib * 2**30,
    )


def optimizer_settings(recipe: Recipe) -> OptimizerSettings:
    training = recipe.training
    return OptimizerSettings(
        optimizer=training.optimizer,
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        momentum=training.momentum,
        betas=tuple(training.betas),
        learning_rate_schedule=training.learning_rate_schedule,
        warmup_iterations=training.warmup_iterations,
        clip_norm=training.clip_norm,
    )


def training_settings(recipe: Recipe, *, iterations: int) -> TrainingSettings:
    training = recipe.training
    return TrainingSettings(
        iterations=iterations,
        optimizer=optimizer_settings(recipe),
        device=recipe.cluster.device,
        threads_per_rank=training.threads_per_rank,
        timeout_s=training.timeout_s,
    )


def search_space(recipe: Recipe) -> SearchSpace:
    search = recipe.search
    return SearchSpace(
        dp=search.dp,
        tp=search.tp,
        pp=search.pp,
        micro_batch_size=search.micro_batch_size,
        schedule=search.schedule,
        recompute=search.recompute,
        allow_idle_devices=search.allow_idle_devices,
    )
