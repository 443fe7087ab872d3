"""A recipe's model cut into stages by a method, and the figures of each stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from auto3d.capture.graph import Graph
from auto3d.cluster import Cluster, Link
from auto3d.cost.partition_costs import handling_inside, link_inside, partition_costs
from auto3d.cost.profile import Profile
from auto3d.cost.times import times_of
from auto3d.cost.work import work_of
from auto3d.partition import Partition, PartitionRequest, partition
from auto3d.partition.cost import PartitionCosts, parameter_bytes
from auto3d.partition.merak import Sharding
from auto3d.partition.methods.rannc import LEAST_CAPTURED
from auto3d.partition.stage import Stage, cut
from launch.model.graphs import PlanningModel, default_micro_batch_size
from launch.model.profile import find_profile
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import UNFUSED
from launch.recipe.settings import cluster, training, with_memory


@dataclass(frozen=True)
class SentTensor:
    """A value that a stage sends to a later stage, and its bytes in the precision of training."""

    value: str
    bytes: int
    to: int


@dataclass(frozen=True)
class StageFigures:
    """Figures of one stage for one micro-batch. FLOPs include operations that several stages repeat."""

    subgraphs: list[int]
    operations: tuple[tuple[int, int], ...]
    modules: list[str]  # largest modules that lie in this stage alone
    parameters: int
    parameter_bytes: int
    inputs: tuple[str, ...]
    flops: int
    backward_flops: int
    flops_share: float  # fraction of the whole model's FLOPs
    forward_s: float
    backward_s: float
    send_bytes: int
    sent: list[SentTensor]
    replicas: int


@dataclass(frozen=True)
class PartitionFigures:
    """Figures of a partition. A balance is the largest value per replica over the mean: 1 where all are equal."""

    method: str
    graph: str  # fingerprint
    micro_batch_size: int
    device: str  # kind of device that the times are predicted for: the slowest of the cluster
    measured_in: str  # the profile behind the times; empty where they are estimated
    memory_bytes: float | None
    subgraphs: int
    micro_batches: int | None
    pipelines: int
    stages: list[StageFigures]
    balance: float  # balance of FLOPs
    time_balance: float
    candidates: int  # candidate stages that the method compared, if it is RaNNC
    measured_candidates: int  # candidates that were run whole


@dataclass(frozen=True)
class PartitionedModel:
    """A partition, the request that it answers, the model's subgraphs, and figures of the stages."""

    request: PartitionRequest
    partition: Partition
    sharding: Sharding
    figures: PartitionFigures


def partition_model(
    recipe: LoadedRecipe,
    *,
    method: str,
    stages: int | None,
    subgraphs: int | None,
    micro_batch_size: int | None,
    memory_gib: float | None,
    fresh: bool,
    equal_slices: bool,
) -> PartitionedModel:
    """Cut the recipe's model by ``method``; costs are for the slowest device of the recipe's cluster.

    Times are measured where there is a profile, as in `auto3d plan`, else estimated.
    ``memory_gib`` replaces the memory of the cluster's devices. With ``equal_slices`` the replicas of each stage get
    equally many samples, as a plan requires.
    """
    model = PlanningModel(recipe, fresh=fresh, predicted=True)
    stored = find_profile(recipe, lambda samples: model.graph(samples).fingerprint)
    measured_in, profile = ("", None) if stored is None else (str(stored[0]), stored[1])
    machine = cluster(recipe) if profile is None else profile.measured(cluster(recipe))
    if memory_gib is not None:
        machine = with_memory(machine, memory_gib * 2**30)
    size = micro_batch_size or default_micro_batch_size(recipe)
    sharding = model.sharding(model.graph(size), subgraphs)
    request = request_on(machine, model, profile, cuts=sharding.bounds, stages=stages, micro_batch_size=size)
    request = replace(request, equal_slices=equal_slices)
    result = partition(method, request)
    stage_figures = _stage_figures(request.graph, sharding, request.costs, result)
    figures = PartitionFigures(
        method=method,
        graph=request.graph.fingerprint,
        micro_batch_size=request.graph.micro_batch_size,
        device=machine.slowest(range(machine.devices)).name,
        measured_in=measured_in,
        memory_bytes=machine.memory_bytes,
        subgraphs=len(sharding.subgraphs),
        micro_batches=result.micro_batches,
        pipelines=result.pipelines,
        stages=stage_figures,
        balance=_balance([stage.flops / stage.replicas for stage in stage_figures]),
        time_balance=_balance([(stage.forward_s + stage.backward_s) / stage.replicas for stage in stage_figures]),
        candidates=result.candidates,
        measured_candidates=result.measured_candidates,
    )
    return PartitionedModel(request, result, sharding, figures)


def request_on(
    machine: Cluster,
    model: PlanningModel,
    profile: Profile | None,
    *,
    cuts: Sequence[int],
    stages: int | None,
    micro_batch_size: int,
) -> PartitionRequest:
    """What a partition method is asked for ``model`` on ``machine``, with the measured times of ``profile``."""
    recipe = model.recipe
    first = max(LEAST_CAPTURED, micro_batch_size)  # Graphs that RaNNC interpolates have the operations of this Graph
    return PartitionRequest(
        graph_at=model.graph,
        costs_of=costs_on(
            machine,
            recipe,
            stages=stages,
            profile=profile,
            bounds_of=lambda graph: model.sharding(graph if graph.fingerprint else model.graph(first)).bounds,
        ),
        cuts=cuts,
        stages=stages,
        micro_batch_size=micro_batch_size,
        global_batch=recipe.values.training.global_batch,
        nodes=len(machine.nodes),
        devices_per_node=machine.devices_per_node,
        stage_seconds=None if profile is None else profile.stage_seconds,
        blocks=recipe.values.search.rannc_blocks,
        smallest_micro_batch=recipe.values.search.rannc_smallest_micro_batch,
    )


def costs_on(
    machine: Cluster,
    recipe: LoadedRecipe,
    *,
    stages: int | None,
    profile: Profile | None = None,
    bounds_of: Callable[[Graph], Sequence[int]] = lambda graph: (0, len(graph.nodes)),
) -> Callable[[Graph], PartitionCosts]:
    """A function that gives the costs of a Graph's operations on the slowest kind of device of ``machine``.

    The memory is the smallest of any device. The link is the slowest among the first ``stages`` devices or,
    if ``stages`` is None, inside a node. With ``profile``, times are those measured between the bounds of subgraphs
    that ``bounds_of`` gives.
    """
    accelerator, how = machine.slowest(range(machine.devices)), training(recipe.values)
    prediction = recipe.values.prediction
    link = link_inside(machine) if stages is None else _slowest_link(machine, min(stages, machine.devices))
    memory_bytes = float("inf") if machine.memory_bytes is None else machine.memory_bytes

    def costs_of(graph: Graph) -> PartitionCosts:
        everything = (0, len(graph.nodes))  # subgraphs matter only for tensor parallelism
        work = work_of(
            graph,
            everything,
            precision=how.precision,
            fused=prediction.fused,
            fused_attention=prediction.attention != UNFUSED,
        )
        if profile is None:
            times = times_of(work, accelerator)
        else:
            times = profile.times_of_work(work, bounds_of(graph), graph.micro_batch_size, accelerator)
        handling = handling_inside(machine)
        return partition_costs(times, accelerator, link, how, memory_bytes=memory_bytes, handling=handling)

    return costs_of


def _slowest_link(machine: Cluster, devices: int) -> Link:
    """The slowest link over which the first ``devices`` exchange messages with their neighbours."""
    nodes = [machine.nodes[number] for number in dict.fromkeys(machine.node_of[:devices])]
    inside = [node.inside for node in nodes if node.devices > 1]
    outside = [node.outside for node in nodes if node.outside is not None and len(nodes) > 1]
    return min([*inside, *outside] or [nodes[0].inside], key=lambda link: link.bandwidth)


def _stage_figures(graph: Graph, sharding: Sharding, costs: PartitionCosts, result: Partition) -> list[StageFigures]:
    position_of = {node.name: position for position, node in enumerate(graph.nodes)}
    positions = [[p for span in stage.operations for p in range(*span)] for stage in result.stages]
    all_flops = sum(node.flops for node in graph.nodes)
    figures = []
    for stage, operations, modules, replicas in zip(
        cut(graph, result.stages), positions, _whole_modules(graph, positions), result.replicas, strict=True
    ):
        runs = [position_of[name] for name in stage.nodes]
        sent = _sent(stage, costs.activation_factor)
        figures.append(
            StageFigures(
                subgraphs=_subgraphs(graph, sharding, operations),
                operations=result.stages[stage.index].operations,
                modules=modules,
                parameters=sum(prod(graph.parameters[n].shape) for n in stage.state if n in graph.parameters),
                parameter_bytes=parameter_bytes(graph, operations),
                inputs=stage.inputs,
                flops=stage.flops,
                backward_flops=sum(graph.nodes[p].backward_flops for p in runs),
                flops_share=stage.flops / all_flops if all_flops else 0.0,
                forward_s=sum(costs.forward_s[p] for p in runs),
                backward_s=sum(costs.backward_s[p] for p in runs),
                send_bytes=sum(tensor.bytes for tensor in sent),
                sent=sent,
                replicas=replicas,
            )
        )
    return figures


def _sent(stage: Stage, factor: float) -> list[SentTensor]:
    """What ``stage`` sends; ``factor`` is the bytes sent per byte in the Graph."""
    return [SentTensor(sent.value.name, round(factor * sent.value.bytes), sent.target) for sent in stage.sent]


def _balance(values: Sequence[float]) -> float:
    """Largest over mean: 1 where all are equal."""
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0


def _subgraphs(graph: Graph, sharding: Sharding, operations: Sequence[int]) -> list[int]:
    """The subgraphs that have operations in the stage, not counting operations that every stage may repeat."""
    in_stage = {position for position in operations if not graph.nodes[position].from_inputs}
    return [number for number, positions in enumerate(sharding.subgraphs) if not in_stage.isdisjoint(positions)]


def _whole_modules(graph: Graph, operations: Sequence[Sequence[int]]) -> list[list[str]]:
    """For each stage the largest modules that lie in it alone; a module that is cut is replaced by its submodules."""
    stages_of: dict[str, set[int]] = {}
    paths = [
        dict.fromkeys(
            graph.nodes[position].module for position in stage_operations if not graph.nodes[position].from_inputs
        )
        for stage_operations in operations
    ]
    for stage, modules in enumerate(paths):
        for path in modules:
            for prefix in _prefixes(path):
                stages_of.setdefault(prefix, set()).add(stage)
    largest = []
    for modules in paths:
        whole = (next((p for p in _prefixes(path) if len(stages_of[p]) == 1), None) for path in modules)
        largest.append(list(dict.fromkeys(path for path in whole if path)))
    return largest


def _prefixes(path: str) -> list[str]:
    """``a.b.c`` -> a, a.b, a.b.c."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
