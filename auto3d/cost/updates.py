"""Seconds of gradient syncs and of the optimizer's updates."""

from auto3d.cluster import Accelerator
from auto3d.cost.model_work import ModelWork
from auto3d.cost.placed import PlacedTraffic
from auto3d.cost.training_options import TrainingOptions
from auto3d.plan import Plan, StagePlan
from auto3d.tensor.conversions import Collective


def update_s(
    work: ModelWork,
    training: TrainingOptions,
    plan: Plan,
    stage: StagePlan,
    *,
    accelerator: Accelerator,
    group: tuple[int, ...],
    traffic: PlacedTraffic,
) -> float:
    """Update time of one rank. Under ZeRO-1: its shard, plus gathering the other shards of ``group``."""
    elements = work.elements(plan, stage.operations)
    each = accelerator.update_s
    if each is None:
        each = training.update_traffic / (accelerator.memory_bandwidth * accelerator.memory_efficiency)
    if not plan.shard_optimizer:
        return elements * each
    size = elements * training.weight_bytes
    return elements / len(group) * each + traffic.sync.all_reduce_s(group, size) / 2


def syncs_s(work: ModelWork, training: TrainingOptions, plan: Plan, traffic: PlacedTraffic) -> tuple[float, ...]:
    """Seconds of each stage's gradient all-reduce."""
    seconds: list[float] = []
    tables = work.tables_of(plan)
    for number, stage in enumerate(plan.stages):
        size = work.elements(plan, stage.operations) * training.sync_bytes
        seconds.append(traffic.sync.all_reduce_s(traffic.holders[number], size))
        if copied := tables.copied(stage.operations):
            link = traffic.tensor[traffic.homes[number][0], 0]
            seconds[number] += link.seconds(Collective.ALL_REDUCE, copied * training.sync_bytes)
    for elements, stages in tables.shared(plan.stages):
        # After each stage has reduced its own copy, a tied parameter is reduced over all stages that hold it.
        seconds[stages[-1]] += traffic.tied_s(tuple(stages), elements * training.sync_bytes)
    return tuple(seconds)
