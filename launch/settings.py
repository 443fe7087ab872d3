"""Recipe -> the engine's own settings, group by group."""

from auto3d.cluster import Cluster
from auto3d.runtime.optimizer import OptimizerSettings
from auto3d.runtime.training import TrainingSettings
from auto3d.search.space import SearchSpace
from launch.schema import Recipe


def cluster(recipe: Recipe) -> Cluster:
    return Cluster(
        nodes=recipe.cluster.nodes,
        devices_per_node=recipe.cluster.devices_per_node,
        device=recipe.cluster.device,
    )


def training_settings(recipe: Recipe, *, iterations: int) -> TrainingSettings:
    training = recipe.training
    return TrainingSettings(
        iterations=iterations,
        optimizer=OptimizerSettings(
            optimizer=training.optimizer,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            momentum=training.momentum,
            betas=tuple(training.betas),
            learning_rate_schedule=training.learning_rate_schedule,
            warmup_iterations=training.warmup_iterations,
            clip_norm=training.clip_norm,
        ),
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
        allow_idle_devices=search.allow_idle_devices,
    )
