"""RaNNC as a search algorithm: the bytes and links that it counts, and plans that fit."""

import pytest

from auto3d.cluster import Accelerator, Cluster, Link, Node
from auto3d.cost.model import CostModel
from auto3d.cost.partition_costs import link_inside
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import work_of
from auto3d.errors import InputError
from auto3d.partition.merak import shard
from auto3d.plan import Plan
from auto3d.search.algorithms.rannc import rannc
from auto3d.search.make import PlanMaker, shortage_of
from auto3d.search.planned_model import PlannedGraphs
from auto3d.search.planner_options import PlannerOptions
from auto3d.search.search import Budget, Search
from auto3d.search.space import Domain, SearchSpace, Workload
from tests.models import captured

KIB = 2**10


def searched(memory_bytes: float, precision: str, **options: int) -> tuple[Plan, CostModel]:
    """RaNNC's plan of a small GPT-2 on two nodes of two devices."""
    node = Node(devices=2, accelerator=Accelerator(memory_bytes=memory_bytes))
    cluster, workload = Cluster(nodes=(node, node), device="cuda"), Workload(global_batch=32, seed=1)
    planned = PlannedGraphs(
        lambda samples: captured("gpt2", samples).graph,
        lambda graph: work_of(graph, shard(graph).bounds, precision=precision),
        lambda graph: shard(graph).bounds,
        lambda *degree: {},
    )
    model = CostModel(cluster, TrainingOptions(precision=precision), planned.work)
    maker = PlanMaker(planned, model, workload)
    search = Search(
        Domain(SearchSpace(), cluster, workload), maker, Budget(candidates=10), options=PlannerOptions(**options)
    )
    rannc(search, 1)
    (only,) = search.ranked()
    return only.plan, model


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_its_plan_fits_by_the_cost_models_count(precision):
    """In memory from enough for four stages to enough for one."""
    with pytest.raises(InputError, match=r"no stages fit 4 devices of 0.4 MiB .* the least that is enough is"):
        searched(400 * KIB, precision)
    depths = []
    for kib in (800, 1000, 1200, 1400, 1600, 2400):
        plan, model = searched(kib * KIB, precision)
        assert not shortage_of(model, plan), f"{kib} KiB"
        depths.append(plan.pp)
    assert depths == sorted(depths, reverse=True)
    assert depths[-1] == 1, "with memory enough the model is not divided"


def test_a_plan_that_is_short_of_memory_is_refused():
    """By RaNNC's count, without messages and fragments, four stages fit."""
    with pytest.raises(InputError, match=r"pipeline device 3 needs .* GiB; it has"):
        searched(650 * KIB, "float32")


def test_activations_count_in_the_precision_of_training():
    """Memory that is enough for half precision, but not for activations of twice as many bytes."""
    single, model = searched(10**9, "float16")
    needed = max(model.memory.of(single))
    assert single.pp == 1
    half, _ = searched(1.01 * needed, "float16")
    whole, _ = searched(1.01 * needed, "float32")
    assert half.pp == 1
    assert whole.pp > 1 or whole.micro_batch_size < half.micro_batch_size


def test_messages_use_the_link_inside_a_node():
    """Section III-B, footnote 3."""
    inside, slower, outside = (Link(latency_s=1e-6, bandwidth=rate) for rate in (20e9, 10e9, 1e9))
    several = [Node(devices=2, inside=link, outside=outside) for link in (inside, slower)]
    assert link_inside(Cluster(nodes=tuple(several), device="cuda")) == slower
    single = Node(devices=1, inside=inside, outside=outside)
    assert link_inside(Cluster(nodes=(single, single), device="cuda")) == outside
    assert link_inside(Cluster(nodes=(Node(devices=1, inside=inside, outside=None),), device="cuda")) == inside


def test_blocks_and_the_smallest_micro_batch_are_options():
    """In memory that needs four stages, three blocks do not fit; a larger micro-batch needs more stages."""
    assert searched(800 * KIB, "float32")[0].pp == 4
    with pytest.raises(InputError, match=r"no stages fit 4 devices .* with stages = 3"):
        searched(800 * KIB, "float32", rannc_blocks=3)
    small, _ = searched(1200 * KIB, "float32")
    larger, _ = searched(1200 * KIB, "float32", rannc_smallest_micro_batch=2)
    assert (small.micro_batch_size, larger.micro_batch_size) == (1, 2)
    assert small.pp < larger.pp
