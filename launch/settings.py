"""Recipe -> the engine's own settings, group by group."""

from dataclasses import asdict

from auto3d.cluster import Cluster
from auto3d.runtime.emulation import Emulation
from auto3d.runtime.optimizer import OptimizerSettings
from auto3d.runtime.rank import TrainingSettings
from auto3d.search.space import SearchSpace
from launch.schema import Recipe


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
        device=device(recipe),
        threads_per_rank=training.threads_per_rank,
        timeout_s=training.timeout_s,
        emulation=emulation(recipe),
    )


def device(recipe: Recipe) -> str:
    """What a rank runs on: emulated devices are processes of a CPU, whatever they stand for."""
    return "cpu" if recipe.training.compute == "emulated" else recipe.cluster.device


def emulation(recipe: Recipe) -> Emulation | None:
    """What devices emulate; None if they are real."""
    if recipe.training.compute == "real":
        return None
    given = asdict(recipe.emulation) if recipe.emulation else {}
    return Emulation(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


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
