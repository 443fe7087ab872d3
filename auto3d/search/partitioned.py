"""Partition -> Plan: makes the stages that a partition method chose ready to run."""

from collections.abc import Callable
from dataclasses import replace

from auto3d.capture.graph import Graph
from auto3d.partition import Partition, PartitionRequest
from auto3d.partition.samples import dimensions_between_replicas
from auto3d.partition.stage import cut, same_stages
from auto3d.plan import Plan, PlanError
from auto3d.schedule import samples_at_once, schedule_of
from auto3d.schedule.carried_buffers import check_carried_buffers
from auto3d.search.placement import place_replicas


def plan_of(partition: Partition, request: PartitionRequest, *, seed: int) -> Plan:
    """The Plan of ``partition`` for ``request``: one stage per pipeline device, under the method's schedule.

    If the method does not choose the micro-batch size, the request's applies. Raises PlanError if samples do not
    divide.
    """
    pipelines, global_batch, micro_batch_size = partition.pipelines, request.global_batch, request.micro_batch_size
    if partition.micro_batches is not None:
        count = pipelines * partition.micro_batches
        if global_batch % count:
            raise PlanError(
                f"global_batch: {global_batch} does not divide into {pipelines} pipelines × {partition.micro_batches} "
                f"micro-batches; it must be a multiple of {count}"
            )
        micro_batch_size = global_batch // count
    replicas = [count // pipelines for count in partition.replicas]
    graph, stages = request.graph_at(micro_batch_size), partition.stages
    if micro_batch_size != request.micro_batch_size:  # positions may differ between the two Graphs
        stages = same_stages(stages, request.graph, graph)
    return Plan(
        graph=graph.fingerprint,
        dp=pipelines,
        tp=1,
        pp=len(partition.stages),
        global_batch=global_batch,
        micro_batch_size=micro_batch_size,
        schedule=partition.schedule,
        schedule_options=partition.schedule_options,
        stages=tuple(replace(stage, replicas=count) for stage, count in zip(stages, replicas, strict=True)),
        placement=place_replicas(replicas, dp=pipelines),
        seed=seed,
    )


def check_runs(plan: Plan, graph_at: Callable[[int], Graph]) -> None:
    """Raise InputError where ranks could not run ``plan``, which has no tensor parallelism.

    ``graph_at`` gives the model at a number of samples, also at the samples of a replica's slice, or raises InputError.
    """
    samples = samples_at_once(plan)
    graph = graph_at(samples)
    stages, replicas = cut(graph, plan.stages), [stage.replicas for stage in plan.stages]
    check_carried_buffers(graph, plan, schedule_of(plan), stages)
    slices = {count: graph_at(samples // count) for count in sorted(set(replicas))}
    for smaller in slices.values():
        same_stages(plan.stages, graph, smaller)
    if len(slices) > 1:
        dimensions_between_replicas(stages, replicas, graph, slices[max(replicas)])
