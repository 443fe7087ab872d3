"""Graph -> stages. Each method is one file; ``METHODS`` is the only place that knows them by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, partial

from auto3d.capture.graph import Graph
from auto3d.capture.interpolate import interpolate
from auto3d.errors import InputError
from auto3d.partition.autopipe import autopipe
from auto3d.partition.cost import PartitionCosts
from auto3d.partition.layer_assignment import layer_assignment
from auto3d.partition.merak import Sharding
from auto3d.partition.stage import same_stages
from auto3d.partition.uniform import uniform
from auto3d.plan import StagePlan


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be cut, and for which devices: each method takes of it what it needs."""

    graph_at: Callable[[int], Graph]  # by micro-batch size
    costs_of: Callable[[Graph], PartitionCosts]
    sharding: Sharding
    stages: int | None  # None: the method chooses
    micro_batch_size: int
    global_batch: int
    nodes: int
    devices_per_node: int
    equal_shares: bool = False  # whether replicas must get equally many samples, as in a Plan

    @property
    def graph(self) -> Graph:
        return self.graph_at(self.micro_batch_size)

    @property
    def costs(self) -> PartitionCosts:
        return self.costs_of(self.graph)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Stages of a Graph, and on how many devices each runs, every one with its share of the samples."""

    stages: tuple[StagePlan, ...]
    replicas: tuple[int, ...]  # of each stage, over all pipelines
    pipelines: int = 1  # copies of the whole pipeline
    micro_batches: int | None = None  # of each pipeline, where the method chooses that too
    schedule: str = "1f1b"  # that the method has in mind
    schedule_options: dict[str, int | str] = field(default_factory=dict)


def _uniform(request: Request) -> Partition:
    return _single(uniform(request.graph, request.stages))


def _autopipe(request: Request) -> Partition:
    return _single(autopipe(request.graph, request.costs, request.stages, cuts=request.sharding.bounds))


def _layer_assignment(request: Request) -> Partition:
    micro_batches = max(1, request.global_batch // request.micro_batch_size)
    found = layer_assignment(
        request.graph, request.costs, request.stages, micro_batches=micro_batches, cuts=request.sharding.bounds
    )
    return _single(found)


def _rannc(request: Request) -> Partition:
    from auto3d.partition.rannc import rannc  # it needs numpy, which is slow to import

    # It asks for about ten sizes, and two tell of all. At 1 there may be fewer operations than at all others.
    first = request.graph_at(max(2, request.micro_batch_size))
    second = request.graph_at(max(request.global_batch, first.micro_batch_size + 1))
    graph_at = cache(partial(interpolate, first, second))
    found = rannc(
        graph_at,
        lambda micro_batch_size: request.costs_of(graph_at(micro_batch_size)),
        nodes=request.nodes,
        devices_per_node=request.devices_per_node,
        global_batch=request.global_batch,
        equal_shares=request.equal_shares,
    )
    several = len(found.stages) > 1
    return Partition(
        stages=same_stages(found.stages, first, request.graph),
        replicas=found.replicas,
        pipelines=found.pipelines,
        micro_batches=found.micro_batches,
        schedule="gpipe" if several else "1f1b",  # a single stage does one micro-batch after the other
        schedule_options={"recompute": "full" if several else "none"},
    )


METHODS: dict[str, Callable[[Request], Partition]] = {
    "uniform": _uniform,
    "autopipe": _autopipe,
    "layer-assignment": _layer_assignment,
    "rannc": _rannc,
}
CHOOSE_STAGES = ("rannc",)  # methods that find the number of stages themselves


def partition(method: str, request: Request) -> Partition:
    """Stages by ``method``; raises InputError where the name or a number is not possible."""
    if method not in METHODS:
        near = get_close_matches(method, METHODS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"method: {method!r} is not known; there are {', '.join(METHODS)}{hint}")
    if method in CHOOSE_STAGES and request.stages is not None:
        raise InputError(f"stages: {request.stages} is given; {method} finds the number of stages itself")
    if method not in CHOOSE_STAGES and (request.stages is None or request.stages < 1):
        raise InputError(f"stages: {request.stages or 'none'} given; {method} takes a number of 1 or more")
    return METHODS[method](request)


def _single(stages: tuple[StagePlan, ...]) -> Partition:
    return Partition(stages=stages, replicas=(1,) * len(stages))
