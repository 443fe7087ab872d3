"""What the replicas of a plan's stages require of its schedule, its placement and its model."""

from collections.abc import Sequence
from dataclasses import replace

from auto3d.capture.model import CapturedModel
from auto3d.partition.samples import made_from_samples, sample_dimensions
from auto3d.partition.stage import Stage, same_stages
from auto3d.plan import Plan, PlanError
from auto3d.schedule.operation import Schedule


def captured_slice(captured: CapturedModel, plan: Plan, replicas: int) -> tuple[CapturedModel, Plan]:
    """The model and ``plan`` as each of ``replicas`` of a stage runs them, for its slice of a micro-batch."""
    if replicas == 1:
        return captured, plan
    smaller = captured.at(captured.graph.micro_batch_size // replicas)
    stages = same_stages(plan.stages, captured.graph, smaller.graph)
    return smaller, replace(plan, graph=smaller.graph.fingerprint, stages=stages)


def capture_slices(captured: CapturedModel, plan: Plan) -> None:
    """Capture the model at every size that a replica of ``plan`` runs; processes forked later share the results."""
    for replicas in sorted({stage.replicas for stage in plan.stages}):
        captured.at(captured.graph.micro_batch_size // replicas)


def replicas_of_devices(plan: Plan, schedule: Schedule) -> tuple[int, ...]:
    """How many replicas the stages of each pipeline device have.

    Raises PlanError if the plan asks for tensor parallelism, if ``schedule`` has other sizes than the plan, if the
    stages of one device have different numbers of replicas, or if the placement has another number of ranks for them.
    """
    if plan.tp != 1:
        raise PlanError(f"tp: {plan.tp} asks for tensor parallelism, which this build does not run; tp must be 1")
    sizes = (schedule.devices, schedule.stages, schedule.micro_batches)
    if sizes != (plan.pp, len(plan.stages), plan.micro_batches):
        raise PlanError(
            f"schedule: {schedule.name} has {sizes[0]} devices, {sizes[1]} stages and {sizes[2]} micro-batches; "
            f"the plan has {plan.pp}, {len(plan.stages)} and {plan.micro_batches}"
        )
    replicas = []
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
        replicas.append(counts[0])
    return tuple(replicas)


def resplit_dimensions(captured: CapturedModel, plan: Plan, stages: Sequence[Stage]) -> dict[str, int]:
    """Value -> its dimension of samples, for values that cross between stages with different numbers of replicas.

    A value without such a dimension is computed from weights only, so all replicas of its stage have the same copy.
    Raises PlanError for a value that is neither: its samples are not in equal slices, or it combines all samples, as a
    loss does, so that no replica has the whole of it.
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
        same_copy = name not in from_samples and transfer.value.shape == smaller.value(name).shape
        if name not in dimensions and not same_copy:
            source, target = transfer.source, transfer.target
            raise PlanError(
                f"stages: {source} has {_times(replicas[source])} and sends {name}, of shape "
                f"{list(transfer.value.shape)}, to stage {target} with {_times(replicas[target])}; it cannot be split "
                "by samples, so both must have equally many"
            )
    return {t.value.name: dimensions[t.value.name] for t in transfers if t.value.name in dimensions}


def _times(replicas: int) -> str:
    return f"{replicas} replica{'s' if replicas > 1 else ''}"
