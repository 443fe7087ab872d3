"""The Plan of a partition: what a method of auto3d.partition found, made ready to run."""

from dataclasses import replace

from auto3d.partition import Partition, PartitionRequest
from auto3d.partition.stage import same_stages
from auto3d.plan import Plan, PlanError
from auto3d.search.placement import place_replicas


def plan_of(found: Partition, request: PartitionRequest, *, seed: int) -> Plan:
    """The Plan of what ``request`` gave: one stage on each pipeline device, under the schedule of the method.

    The request's micro-batch size counts where the method does not choose one. Raises PlanError where samples do not
    divide.
    """
    pipelines, global_batch, micro_batch_size = found.pipelines, request.global_batch, request.micro_batch_size
    if found.micro_batches is not None:
        shares = pipelines * found.micro_batches
        if global_batch % shares:
            raise PlanError(
                f"global_batch: {global_batch} does not divide into {pipelines} pipelines × {found.micro_batches} "
                f"micro-batches; it must be a multiple of {shares}"
            )
        micro_batch_size = global_batch // shares
    replicas = [count // pipelines for count in found.replicas]
    graph, stages = request.graph_at(micro_batch_size), found.stages
    if micro_batch_size != request.micro_batch_size:  # positions in one Graph need not be those in the other
        stages = same_stages(stages, request.graph, graph)
    return Plan(
        graph=graph.fingerprint,
        dp=pipelines,
        tp=1,
        pp=len(found.stages),
        global_batch=global_batch,
        micro_batch_size=micro_batch_size,
        schedule=found.schedule,
        schedule_options=found.schedule_options,
        stages=tuple(replace(stage, replicas=count) for stage, count in zip(stages, replicas, strict=True)),
        placement=place_replicas(replicas, dp=pipelines),
        seed=seed,
    )
