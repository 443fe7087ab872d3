"""Partition -> Plan: makes the stages that a partition method chose ready to run."""

from dataclasses import replace

from auto3d.partition import Partition, PartitionRequest
from auto3d.partition.stage import same_stages
from auto3d.plan import Plan, PlanError
from auto3d.search.placement import place_replicas


def plan_of(found: Partition, request: PartitionRequest, *, seed: int) -> Plan:
    """The Plan of the partition ``found`` for ``request``: one stage per pipeline device, under the method's schedule.

    If the method does not choose the micro-batch size, the request's applies. Raises PlanError if samples do not
    divide.
    """
    pipelines, global_batch, micro_batch_size = found.pipelines, request.global_batch, request.micro_batch_size
    if found.micro_batches is not None:
        count = pipelines * found.micro_batches
        if global_batch % count:
            raise PlanError(
                f"global_batch: {global_batch} does not divide into {pipelines} pipelines × {found.micro_batches} "
                f"micro-batches; it must be a multiple of {count}"
            )
        micro_batch_size = global_batch // count
    replicas = [count // pipelines for count in found.replicas]
    graph, stages = request.graph_at(micro_batch_size), found.stages
    if micro_batch_size != request.micro_batch_size:  # positions may differ between the two Graphs
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
