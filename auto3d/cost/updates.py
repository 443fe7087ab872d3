"""Seconds of gradient syncs and of the optimizer's updates."""

from collections.abc import Sequence

from auto3d.cluster import Accelerator
from auto3d.conversions import Collective
from auto3d.cost.model_work import ModelWork
from auto3d.cost.parameters import parameters_of
from auto3d.cost.placed import PlacedTraffic
from auto3d.cost.training_options import TrainingOptions
from auto3d.plan import Plan


def update_s(
    work: ModelWork,
    training: TrainingOptions,
    plan: Plan,
    number: int,
    *,
    accelerator: Accelerator,
    traffic: PlacedTraffic,
    forward: float,
) -> float:
    """Update time of one rank of stage ``number``. Under ZeRO-1: its slices, plus gathering the slices of others.

    ``forward`` has the seconds of the stage's forward of one micro-batch, which hides the gather of some systems.
    """
    stage, summed = plan.stages[number], plan.gradient_sum
    elements = work.elements(plan, stage.operations)
    per_element, bandwidth = accelerator.update_s, accelerator.memory_bandwidth * accelerator.memory_efficiency
    if per_element is None:
        per_element = training.update_traffic / bandwidth
        if training.update_flops is not None and elements:
            parameters = parameters_of(work.tables_of(plan), stage.operations)
            flops = sum(training.update_flops(parameter.name, parameter.shape) for parameter in parameters)
            per_element += flops / (accelerator.peak_flops * accelerator.matrix_efficiency) / elements
    whole = elements * training.times.whole_update_bytes / bandwidth
    updated = gather = 0.0
    for stages, size in _sums(work, training, plan, number):
        links, group = traffic.summing(stages)
        updated += size / (len(group) if summed.splits else 1)
        if stages[-1] == number:
            gather += links.seconds(summed.backward, group, size * training.weight_bytes)
    if training.times.hides_sharded_sums and gather:
        gather = _beside(gather, forward, work.tables_of(plan).first_parameters(stage.operations) / elements)
    return whole + updated * per_element + gather


def _is_apart(training: TrainingOptions, plan: Plan) -> bool:
    """Whether stages that hold a tied parameter sum it each for itself, and then among each other."""
    return training.times.tied_apart or not plan.gradient_sum.splits


def _sums(work: ModelWork, training: TrainingOptions, plan: Plan, number: int) -> list[tuple[tuple[int, ...], float]]:
    """(stages, elements) of what stage ``number`` trains, by the stages whose holders sum the gradient together."""
    elements = work.elements(plan, plan.stages[number].operations)
    shared = [] if _is_apart(training, plan) else work.tables_of(plan).shared(plan.stages)
    tied = [(tuple(stages), size) for size, stages in shared if number in stages]
    return [((number,), elements - sum(size for _, size in tied)), *tied]


def _beside(collective: float, compute: float, exposed: float) -> float:
    """Seconds by which ``collective`` lasts longer than ``compute`` beside it, which hides all but a part of it."""
    return max(collective - compute, collective * exposed)


def accumulation_s(training: TrainingOptions, elements: float, accelerator: Accelerator) -> float:
    """Seconds in which a backward adds the gradients of a stage's ``elements`` of parameters to their buffers."""
    bandwidth = accelerator.memory_bandwidth * accelerator.memory_efficiency
    return elements * training.times.accumulated_bytes / bandwidth


def syncs_s(
    work: ModelWork, training: TrainingOptions, plan: Plan, traffic: PlacedTraffic, backward: Sequence[float]
) -> tuple[float, ...]:
    """Seconds of each stage's gradient sum after its last backward: an all-reduce, or under ZeRO-1 a reduce-scatter.

    ``backward`` has the seconds of each stage's backward of one micro-batch, which hides a sum that begins inside it.
    """
    summed = plan.gradient_sum
    how = summed.forward if training.times.reduce_shards else Collective.ALL_REDUCE
    seconds: list[float] = []
    tables = work.tables_of(plan)
    for number, stage in enumerate(plan.stages):
        whole = 0.0
        for stages, size in _sums(work, training, plan, number):
            if stages[-1] == number:
                links, group = traffic.summing(stages)
                whole += links.seconds(how, group, size * training.sync_bytes)
        hidden = training.times.hides_sharded_sums if summed.splits else training.times.sync_in_backward
        if hidden and whole:
            exposed = tables.first_parameters(stage.operations) / work.elements(plan, stage.operations)
            whole = _beside(whole, backward[number], exposed)
        seconds.append(whole)
        if copied := tables.copied(stage.operations):
            link = traffic.tensor[traffic.homes[number][0], 0]
            seconds[number] += link.seconds(how, copied * training.sync_bytes)
    for size, users in tables.shared(plan.stages) if _is_apart(training, plan) else ():
        # After each stage has reduced its own copy, a tied parameter is reduced over all stages that hold it.
        links, group = traffic.summing(tuple(users), apart=True)
        seconds[users[-1]] += links.seconds(Collective.ALL_REDUCE, group, size * training.sync_bytes)
    return tuple(seconds)
