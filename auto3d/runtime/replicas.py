"""What a Plan's replicas of stages ask of its schedule, its placement and its model."""

from collections.abc import Sequence
from dataclasses import replace

from auto3d.capture.model import CapturedModel
from auto3d.partition.samples import made_from_samples, sample_dimensions
from auto3d.partition.stage import Stage, same_stages
from auto3d.plan import Plan, PlanError
from auto3d.schedule.operation import Schedule


def share_of(captured: CapturedModel, plan: Plan, replicas: int) -> tuple[CapturedModel, Plan]:
    """The model and ``plan`` as each of ``replicas`` of a stage runs them, at its share of a micro-batch."""
    if replicas == 1:
        return captured, plan
    share = captured.at(captured.graph.micro_batch_size // replicas)
    stages = same_stages(plan.stages, captured.graph, share.graph)
    return share, replace(plan, graph=share.graph.fingerprint, stages=stages)


def replicas_of_devices(plan: Plan, schedule: Schedule) -> tuple[int, ...]:
    """The replicas of the stages of each pipeline device.

    Raises PlanError where the plan asks for tensor parallelism, where ``schedule`` has other sizes than the plan, where
    the stages of a device have different numbers of replicas, or where these are not those of the placement.
    """
    if plan.tp != 1:
        raise PlanError(f"tp: {plan.tp} asks for tensor parallelism, which this build does not run; tp must be 1")
    has = (schedule.devices, schedule.stages, schedule.micro_batches)
    if has != (plan.pp, len(plan.stages), plan.micro_batches):
        raise PlanError(
            f"schedule: {schedule.name} has {has[0]} devices, {has[1]} stages and {has[2]} micro-batches; "
            f"the plan has {plan.pp}, {len(plan.stages)} and {plan.micro_batches}"
        )
    found = []
    for device in range(plan.pp):
        stages = sorted({stage for (stage, _), home in schedule.device_of.items() if home == device})
        counts = [plan.stages[stage].replicas for stage in stages]
        if len(set(counts)) > 1:
            raise PlanError(
                f"stages: {', '.join(map(str, stages))} are on one device of schedule {schedule.name}, and have "
                f"{', '.join(map(str, counts))} replicas; stages of one device must have equally many"
            )
        if len(plan.placement[device]) != plan.dp * counts[0]:
            raise PlanError(
                f"placement: {list(plan.placement[device])} are the ranks of device {device}, which must be "
                f"dp × replicas = {plan.dp} × {counts[0]} = {plan.dp * counts[0]}"
            )
        found.append(counts[0])
    return tuple(found)


def resplit_dimensions(captured: CapturedModel, plan: Plan, stages: Sequence[Stage]) -> dict[str, int]:
    """The dimension of the samples in each value that crosses between stages with other numbers of replicas.

    A value without one is made from weights alone, so that all replicas of its stage have it alike. Raises PlanError
    where a value is neither: its samples are not in equal slices, or it is one of all samples, such as a loss, of which
    no replica has the whole.
    """
    replicas = [stage.replicas for stage in plan.stages]
    transfers = [
        transfer
        for stage in stages
        for transfer in stage.received
        if replicas[transfer.source] != replicas[transfer.target]
    ]
    if not transfers:
        return {}
    graph = captured.graph
    smaller = captured.at(graph.micro_batch_size // max(replicas)).graph
    dimensions, from_samples = sample_dimensions(graph, smaller), made_from_samples(graph)
    for transfer in transfers:
        name = transfer.value.name
        alike = name not in from_samples and transfer.value.shape == smaller.value(name).shape
        if name not in dimensions and not alike:
            source, target = transfer.source, transfer.target
            raise PlanError(
                f"stages: {source} has {_times(replicas[source])} and sends {name}, of shape "
                f"{list(transfer.value.shape)}, to stage {target} with {_times(replicas[target])}; it cannot be split "
                "by samples, so both must have equally many"
            )
    return {t.value.name: dimensions[t.value.name] for t in transfers if t.value.name in dimensions}


def _times(replicas: int) -> str:
    return f"{replicas} replica{'s' if replicas > 1 else ''}"
