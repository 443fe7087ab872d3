"""RaNNC: automatic hybrid parallelism by three phases of graph partitioning (Tanaka et al. 2021, section III).

Atomic level (``atomic``): subcomponents of one non-constant operation each, with clones of the constant operations
that it needs. Block level (``units``, ``dag``, ``blocks``): k balanced blocks in sequence. Stage level
(``operation_profile``, ``runs``, ``stages``): stages of consecutive blocks, their replicas, parallel pipelines and
micro-batches. Where the paper is wrong or silent, a comment says what is done instead.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf

from auto3d.capture.graph import Graph
from auto3d.capture.interpolate import interpolate
from auto3d.partition.cost import PartitionCosts
from auto3d.partition.methods.rannc.atomic import Subcomponent, atomic_subcomponents, stage_of_operations
from auto3d.partition.methods.rannc.blocks import form_blocks
from auto3d.partition.methods.rannc.operation_profile import OperationProfiles
from auto3d.partition.methods.rannc.stages import StageSearch
from auto3d.partition.methods.rannc.units import Units, find_units
from auto3d.partition.request import BLOCKS, Partition, PartitionRequest, StageSeconds
from auto3d.partition.stage import PartitionError, same_stages
from auto3d.plan import StagePlan, stages_of_operations

LEAST_CAPTURED = 2  # samples: at 1 a model may have fewer operations than at all other sizes


@dataclass(frozen=True, kw_only=True)
class RanncPartition:
    """Stages and what each would cost. Every tuple has one entry for each stage."""

    stages: tuple[StagePlan, ...]
    replicas: tuple[int, ...]  # devices that hold the stage, counted over all pipelines
    pipelines: int  # copies of the whole pipeline, each with its own slice of the batch
    micro_batches: int  # micro-batches of each pipeline
    samples: tuple[int, ...]  # samples of a micro-batch in one replica, rounded up
    blocks: tuple[int, ...]  # number of blocks in the stage
    forward_s: tuple[float, ...]  # forward of one micro-batch in one replica, including its message
    backward_s: tuple[float, ...]  # backward, including recomputation and its message
    memory_bytes: tuple[float, ...]  # memory that each device of the stage needs
    iteration_s: float
    candidates: int  # runs of blocks that could be a stage
    measured_candidates: int  # candidates whose times were measured


def choose_partition(request: PartitionRequest) -> Partition:
    """RaNNC's answer to ``request``; raises PartitionError where nothing fits."""
    graph_at = _interpolated(request)
    partition = rannc(
        graph_at,
        lambda micro_batch_size: request.costs_of(graph_at(micro_batch_size)),
        nodes=request.nodes,
        devices_per_node=request.devices_per_node,
        global_batch=request.global_batch,
        blocks=request.blocks,
        smallest_micro_batch=request.smallest_micro_batch,
        equal_slices=request.equal_slices,
        any_depth=request.any_depth,
        stage_seconds=request.stage_seconds,
    )
    first, several = _first(request), len(partition.stages) > 1
    return Partition(
        stages=same_stages(partition.stages, first, request.graph),
        replicas=partition.replicas,
        pipelines=partition.pipelines,
        micro_batches=partition.micro_batches,
        schedule="gpipe" if several else "1f1b",  # a single stage does one micro-batch after the other
        schedule_options={"recompute": "full" if several else "none"},
        candidates=partition.candidates,
        measured_candidates=partition.measured_candidates,
    )


def candidate_blocks(request: PartitionRequest) -> tuple[OperationProfiles, list[tuple[Subcomponent, ...]]]:
    """The blocks that RaNNC would make stages of for ``request``, and the costs of their operations."""
    graph_at, devices = _interpolated(request), request.nodes * request.devices_per_node
    profiles = OperationProfiles(
        graph_at,
        lambda size: request.costs_of(graph_at(size)),
        smallest=request.smallest_micro_batch,
        largest=request.global_batch,
    )
    return profiles, form_blocks(_units(profiles, devices, request.global_batch), request.blocks)


def _first(request: PartitionRequest) -> Graph:
    return request.graph_at(max(LEAST_CAPTURED, request.micro_batch_size))


def _interpolated(request: PartitionRequest) -> Callable[[int], Graph]:
    """The model at any micro-batch size: RaNNC asks for about ten, and two captures give all of them."""
    first = _first(request)
    second = request.graph_at(max(request.global_batch, first.micro_batch_size + 1))
    return cache(partial(interpolate, first, second))


def _units(profiles: OperationProfiles, devices: int, global_batch: int) -> Units:
    graph, costs = profiles.graph, profiles.costs
    return find_units(
        graph,
        atomic_subcomponents(graph),
        times=profiles.at(max(profiles.smallest, global_batch // devices)),
        sizes=profiles.at(profiles.smallest),
        state_factor=costs.state_factor,
        memory_bytes=costs.memory_bytes,
    )


def rannc(
    graph_at: Callable[[int], Graph],
    costs_at: Callable[[int], PartitionCosts],
    *,
    nodes: int,
    devices_per_node: int,
    global_batch: int,
    blocks: int = BLOCKS,
    smallest_micro_batch: int = 1,
    equal_slices: bool = False,
    any_depth: bool = False,
    stage_seconds: StageSeconds | None = None,
) -> RanncPartition:
    """The stages of a model on a cluster, given the model's Graph and costs at any micro-batch size.

    Both functions are called with ``smallest_micro_batch`` samples (a model with batch statistics may need 2), with the
    powers of two between that and ``global_batch``, and with ``global_batch``. With ``equal_slices``, all replicas of a
    stage get equally many samples of every micro-batch. With ``any_depth``, all numbers of stages are compared.
    ``stage_seconds`` has the times of candidate stages that were run whole; the others add up their operations. If
    nothing fits, raises PartitionError that says what would.
    """
    numbers = (nodes, devices_per_node, blocks, smallest_micro_batch)
    for name, number in zip(("nodes", "devices_per_node", "blocks", "smallest_micro_batch"), numbers, strict=True):
        if number < 1:
            raise PartitionError(f"{name}: {number} is not possible; it must be 1 or more")
    if global_batch < smallest_micro_batch:
        raise PartitionError(
            f"smallest_micro_batch: {smallest_micro_batch} samples are more than the global batch of {global_batch}"
        )
    profiles = OperationProfiles(graph_at, costs_at, smallest=smallest_micro_batch, largest=global_batch)
    graph, devices = profiles.graph, nodes * devices_per_node
    units = _units(profiles, devices, global_batch)
    formed = form_blocks(units, blocks)
    search = partial(
        StageSearch,
        profiles=profiles,
        nodes=nodes,
        devices_per_node=devices_per_node,
        global_batch=global_batch,
        equal_slices=equal_slices,
        stage_seconds=stage_seconds,
    )
    # If memory leaves more than k blocks, no two neighbours fit one device, so each block needs a device of its own.
    stages = search(formed)
    form = stages.search(any_depth=any_depth) if len(formed) <= max(blocks, devices) else None
    if form is None:
        formed = form_blocks(replace(units, memory_bytes=inf), blocks)
        raise search(formed).refusal()
    parts = [[sub for block in formed[run.first : run.last + 1] for sub in block] for run in form.runs]
    return RanncPartition(
        stages=stages_of_operations(stage_of_operations(graph, parts)),
        replicas=tuple(run.replicas * form.pipelines for run in form.runs),
        pipelines=form.pipelines,
        micro_batches=form.micro_batches,
        samples=form.samples,
        blocks=tuple(run.last - run.first + 1 for run in form.runs),
        forward_s=form.forward_s,
        backward_s=form.backward_s,
        memory_bytes=form.memory_bytes,
        iteration_s=form.iteration_s,
        candidates=stages.candidates,
        measured_candidates=stages.measured_candidates,
    )
