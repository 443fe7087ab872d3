"""What the replicas and the shards of a plan's stages require of its schedule, its placement and its model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from auto3d.capture.model import CapturedModel
from auto3d.derived.model import Derived
from auto3d.derived.of_share import derived
from auto3d.partition.samples import dimensions_between_replicas
from auto3d.partition.stage import Stage, same_stages
from auto3d.plan import SUB_PIPELINED, Plan, PlanError, StagePlan
from auto3d.schedule import without_slices
from auto3d.schedule.combinations import check_together, divisions_of
from auto3d.schedule.operation import Schedule
from auto3d.schedule.shape import shares_of
from auto3d.share import WHOLE, Share


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """The model and the plan as ranks run them: for their slice of a micro-batch, with their shard of the weights."""

    captured: CapturedModel
    plan: Plan  # its stages cut the graph of ``captured``
    whole_stages: tuple[StagePlan, ...]  # the same stages of the model that ``captured`` was derived from
    derived: Derived | None = None  # None: the rank runs all of the model; else ``captured`` is its program


def rank_program(captured: CapturedModel, plan: Plan, replicas: int) -> RankProgram:
    """What each rank of a stage with ``replicas`` runs of ``captured``, the model for all samples of a micro-batch.

    A process derives each program once; processes forked later share it. Raises InputError if the model cannot run a
    slice of its samples or of its sequence, or if the plan's split does not fit it.
    """
    of_all, share = captured, shares_of(plan)[0]
    check_together(divisions_of(plan))
    captured, plan = captured_slice(captured, plan, replicas)
    if share == WHOLE:
        return RankProgram(captured=captured, plan=plan, whole_stages=plan.stages)
    model = _derived_once(captured, plan, share)
    if replicas > 1 and not _same_operations(_derived_once(of_all, plan, share), model):
        key = "schedule: it" if share.slices > 1 else "split: tensor parallelism"
        raise PlanError(
            f"{key} runs other operations on {captured.graph.micro_batch_size} samples, which each "
            f"of {replicas} replicas takes, than on {of_all.graph.micro_batch_size}; use stages without replicas"
        )
    of_rank = replace(plan, graph=model.program.graph.fingerprint, stages=model.stages(plan.stages))
    return RankProgram(captured=model.program, plan=of_rank, whole_stages=plan.stages, derived=model)


def _same_operations(model: Derived, other: Derived) -> bool:
    pairs = zip(model.programs, other.programs, strict=True)
    return all(here.graph.same_operations(there.graph) for here, there in pairs)


def _derived_once(captured: CapturedModel, plan: Plan, share: Share) -> Derived:
    key = share, frozenset(plan.split.items()), plan.tensor_overlap
    if key not in captured.derived:
        halves = plan.tensor_overlap == SUB_PIPELINED
        captured.derived[key] = derived(captured, share, split=plan.split, halves=halves)
    model: Derived = captured.derived[key]
    return model


def captured_slice(captured: CapturedModel, plan: Plan, replicas: int) -> tuple[CapturedModel, Plan]:
    """The model and ``plan`` as each of ``replicas`` of a stage runs them, for its slice of a micro-batch."""
    if replicas == 1:
        return captured, plan
    smaller = captured.at(captured.graph.micro_batch_size // replicas)
    stages = same_stages(plan.stages, captured.graph, smaller.graph)
    return smaller, replace(plan, graph=smaller.graph.fingerprint, stages=stages)


def capture_slices(captured: CapturedModel, plan: Plan) -> None:
    """Make the program of every size that a replica of ``plan`` runs; processes forked later share the results.

    For shards of slices also the program of whole sequences, by which their memory is estimated.
    """
    for replicas in sorted({1, *(stage.replicas for stage in plan.stages)}):
        rank_program(captured, plan, replicas)
        if plan.tp > 1 and shares_of(plan)[0].slices > 1:
            rank_program(captured, without_slices(plan), replicas)


def replicas_of_devices(plan: Plan, schedule: Schedule) -> tuple[int, ...]:
    """How many replicas the stages of each pipeline device have.

    Raises PlanError if ``schedule`` has other sizes than the plan, if the stages of one device have different numbers
    of replicas, or if the placement has another number of ranks for them.
    """
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
        if len(plan.placement[device]) != (needed := plan.dp * counts[0] * plan.tp):
            product = ("dp × replicas", f"{plan.dp} × {counts[0]}")
            names, numbers = product if plan.tp == 1 else (f"{product[0]} × tp", f"{product[1]} × {plan.tp}")
            raise PlanError(
                f"placement: {list(plan.placement[device])} are the ranks of device {device}, which must be "
                f"{names} = {numbers} = {needed}"
            )
        replicas.append(counts[0])
    return tuple(replicas)


def resplit_dimensions(captured: CapturedModel, plan: Plan, stages: Sequence[Stage]) -> dict[str, int]:
    """Value -> its dimension of samples, for values that cross between stages with different numbers of replicas.

    ``stages`` are the stages of the ranks' program. A value without such a dimension is computed from weights only, so
    all replicas of its stage have the same copy. Raises PlanError for a value that is neither: its samples are not in
    equal slices, or it combines all samples, as a loss does, so that no replica has the whole of it.
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
    program = rank_program(captured, plan, 1)
    graph = program.captured.graph
    smaller = rank_program(captured, plan, max(replicas)).captured.graph
    half_of = {} if program.derived is None else program.derived.half_of
    dimensions = dimensions_between_replicas(stages, replicas, graph, smaller, halved=half_of.keys())
    crossing = {(transfer.source, transfer.target, transfer.value.name) for transfer in transfers}
    for transfer in transfers:
        name = transfer.value.name
        other = name if (half := half_of.get(name)) is None else f"{name.removesuffix(str(half))}{1 - half}"
        if (transfer.source, transfer.target, other) not in crossing:
            raise PlanError(
                f"stages: {transfer.source} sends {name} to stage {transfer.target}, which has another number of "
                "replicas, without the other half of its samples; both must have equally many"
            )
        placed = None if program.derived is None else program.derived.placements.get(name)
        if placed is not None and placed.split is not None and placed.split.dim == dimensions.get(name):
            raise PlanError(
                f"stages: {transfer.source} sends {name} to stage {transfer.target}, which has another number of "
                "replicas; tensor parallelism splits it by samples too, so both must have equally many"
            )
    return dimensions
