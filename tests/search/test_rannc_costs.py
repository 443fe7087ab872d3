"""The costs that RaNNC's dynamic programme searches with: the cost model's, or those of a measured profile."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from auto3d.capture.interpolate import interpolate
from auto3d.cluster import Accelerator, Cluster, Link, Node
from auto3d.cost.model import CostModel
from auto3d.cost.profile import ModelTimes, Profile
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import work_of
from auto3d.partition.merak import shard
from auto3d.partition.methods.rannc import find_units, form_blocks
from auto3d.partition.methods.rannc import rannc as partition
from auto3d.partition.methods.rannc.atomic import atomic_subcomponents, stage_of_operations
from auto3d.partition.methods.rannc.operation_profile import OperationProfiles
from auto3d.partition.methods.rannc.stages import StageSearch, form_stages
from auto3d.plan import Plan, stages_of_operations
from auto3d.search.algorithms.rannc import partition_request, rannc
from auto3d.search.make import PlanMaker
from auto3d.search.placement import place_replicas
from auto3d.search.planned_model import PlannedGraphs
from auto3d.search.search import Budget, Search
from auto3d.search.space import Domain, SearchSpace, Workload
from tests.cost.test_profile import made_up
from tests.models import captured
from tests.partition.test_rannc_stages import every_way

DEVICES, BATCH = 4, 8
# Launches bound the small stages and arithmetic the large ones; messages, their handling and the host's time all count.
NODE = Node(
    devices=DEVICES,
    accelerator=Accelerator(peak_flops=2e10, memory_bandwidth=2e9, half_flops=1e5, launch_s=4e-6, micro_batch_s=3e-5),
    inside=Link(latency_s=2e-5, bandwidth=2e8),
    handling=(1e-5, 1e-9),
)


def graph_at(samples: int):
    return captured("gpt2", samples).graph if samples in (2, 4) else interpolate(graph_at(2), graph_at(4), samples)


def planned(precision: str) -> PlannedGraphs:
    def bounds(graph):
        return shard(graph_at(2)).bounds

    return PlannedGraphs(
        graph_at, lambda graph: work_of(graph, bounds(graph), precision=precision), bounds, lambda *degree: {}
    )


def profile(factor) -> Profile:
    """A made-up profile; ``factor`` gives the seconds of a subgraph for one sample by its number."""

    def measured(size: ModelTimes) -> ModelTimes:
        kinds = tuple(range(len(size.kinds)))
        one = size.subgraphs[0]
        each = (size.micro_batch_size * factor(kind) for kind in kinds)
        subgraphs = tuple(replace(one, forward_s=s, backward_s=2 * s, backward_weight_s=s) for s in each)
        return replace(size, kinds=kinds, subgraphs=subgraphs)

    found = made_up()
    return replace(found, sizes=tuple(map(measured, found.sizes)), slowdown=(), collectives=None)


def maker_of(precision: str, measured: Profile | None, node: Node = NODE, batch: int = BATCH) -> PlanMaker:
    subject, cluster = planned(precision), Cluster(nodes=(node,), device="cuda")
    training, times, work_times = TrainingOptions(precision=precision), None, None
    if measured is not None:
        times, work_times = measured.times_at(subject.work, subject.cuts), measured.times_of_work
    model = CostModel(cluster, training, subject.work, times_at=times, times_of_work=work_times)
    return PlanMaker(subject, model, Workload(global_batch=batch, seed=1))


@pytest.mark.parametrize(
    ("precision", "measured"),
    [("float32", None), ("float16", None), ("float32", lambda number: (5 + number % 3) * 1e-4)],
    ids=["float32", "float16", "measured"],
)
def test_stages_and_replicas_are_the_best_by_the_cost_model(precision, measured):
    """Brute force: every division of the blocks into stages with replicas is a Plan, and the cost model times it."""
    maker = maker_of(precision, measured and profile(measured))
    request, model = partition_request(maker, inf), maker.model
    profiles = OperationProfiles(graph_at, lambda size: request.costs_of(graph_at(size)), smallest=1, largest=BATCH)
    graph, costs = profiles.graph, profiles.costs
    units = find_units(
        graph,
        atomic_subcomponents(graph),
        times=profiles.at(2),
        sizes=profiles.at(1),
        state_factor=costs.state_factor,
        memory_bytes=inf,
    )
    blocks = form_blocks(units, 5)
    search = StageSearch(blocks, profiles, nodes=1, devices_per_node=DEVICES, global_batch=BATCH, equal_slices=True)

    def slowest(way: list[tuple[int, int, int]], micro_batches: int) -> float:
        """Longest forward and longest backward of these stages, each with the message that it sends."""
        parts = [[sub for block in blocks[first : last + 1] for sub in block] for _, first, last in way]
        replicas = [more + 1 for more, _, _ in way]
        stages = stages_of_operations(stage_of_operations(graph, parts))
        plan = Plan(
            graph="",
            dp=1,
            tp=1,
            pp=len(way),
            global_batch=BATCH,
            micro_batch_size=BATCH // micro_batches,
            schedule="gpipe",
            schedule_options={"recompute": "full"},
            stages=tuple(replace(stage, replicas=count) for stage, count in zip(stages, replicas, strict=True)),
            placement=place_replicas(replicas, dp=1),
            seed=1,
        )
        found = model.costs(plan)
        forward, backward = list(found.forward), list(np.add(found.backward, found.recompute))
        for boundary, message in enumerate(found.messages):
            fewer = min(replicas[boundary : boundary + 2])  # this side's slices are what the cost model counts
            forward[boundary] += message.latency + message.forward * fewer / replicas[boundary]
            backward[boundary + 1] += message.latency + message.backward * fewer / replicas[boundary + 1]
            each = model.cluster.nodes[0].handling[1] * message.forward * model.cluster.nodes[0].inside.bandwidth
            for stage in (boundary, boundary + 1):  # handling: likewise
                less = each * (fewer / replicas[stage] - 1)
                forward[stage] += less
                backward[stage] += less
        return max(forward) + max(backward)

    uneven = 0
    for micro_batches in (1, 2, 4):
        choices = search._choices(DEVICES, 1, micro_batches, checkpointing=True)
        for stages in (2, 3):
            found = form_stages(choices, stages, DEVICES)
            ways = every_way(len(blocks), stages, DEVICES)
            possible = {
                tuple(way): slowest(way, micro_batches)
                for way in ways
                if all(BATCH % (micro_batches * (more + 1)) == 0 for more, _, _ in way)
            }
            if found is None:
                assert not possible
                continue
            chosen = tuple((run.replicas - 1, run.first, run.last) for run in found)
            assert possible[chosen] == pytest.approx(min(possible.values()), rel=1e-9)
            objective = max(choices.forward_s[way] for way in chosen) + max(choices.backward_s[way] for way in chosen)
            assert possible[chosen] == pytest.approx(objective, rel=1e-9)
            uneven += len({run.replicas for run in found}) > 1
    assert uneven


def test_a_measured_profile_changes_the_stages():
    """Two stages, as memory demands. A stage whose subgraphs were measured slow gets fewer."""
    scarce = replace(NODE, devices=2, accelerator=replace(NODE.accelerator, memory_bytes=1200 * 2**10))

    def chosen(measured: Profile | None) -> Plan:
        maker = maker_of("float32", measured, scarce)
        search = Search(Domain(SearchSpace(), maker.model.cluster, maker.workload), maker, Budget(candidates=10))
        rannc(search, 1)
        (only,) = search.ranked()
        return only.plan

    def last_stage(plan: Plan) -> int:
        return sum(last - first for first, last in plan.stages[-1].operations)

    subgraphs = len(shard(graph_at(2)).bounds) - 1
    estimated = chosen(None)
    late = chosen(profile(lambda number: 1e-2 if number >= subgraphs - 2 else 1e-3))
    early = chosen(profile(lambda number: 1e-2 if number < 2 else 1e-3))
    assert estimated.pp == late.pp == early.pp == 2
    assert last_stage(late) < last_stage(estimated) < last_stage(early)


def test_every_number_of_stages_is_compared_where_asked():
    """The fewest stages that fit, as in the paper, or the fastest of all: without overheads, more stages are better."""
    free = Accelerator(peak_flops=2e10, memory_bandwidth=2e9, half_flops=0, launch_s=0, memory_bytes=800 * 2**10)
    node = Node(devices=DEVICES, accelerator=free, inside=Link(latency_s=0, bandwidth=1e12))
    request = partition_request(maker_of("float32", None, node, batch=32), 800 * 2**10)
    fewest, fastest = (
        partition(
            graph_at,
            lambda size: request.costs_of(graph_at(size)),
            nodes=1,
            devices_per_node=DEVICES,
            global_batch=32,
            equal_slices=True,
            any_depth=any_depth,
        )
        for any_depth in (False, True)
    )
    assert (len(fewest.stages), len(fastest.stages)) == (3, 4)
    assert fastest.iteration_s < fewest.iteration_s
    assert max(fastest.memory_bytes) <= 800 * 2**10


def test_micro_batches_limit_the_degrees():
    """One micro-batch: what a pipeline takes at once is its whole slice of the global batch."""
    cluster, workload = Cluster(nodes=(NODE,), device="cuda"), Workload(global_batch=BATCH, seed=1)
    every, one = (
        Domain(SearchSpace(tp=(1,), micro_batches=allowed), cluster, workload).degrees for allowed in ("auto", (1,))
    )
    assert one == [each for each in every if each.dp * each.micro_batch_size == BATCH]
    assert 0 < len(one) < len(every)
