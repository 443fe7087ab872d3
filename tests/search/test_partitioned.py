"""Plans made from the partitions of partition methods."""

import pytest

from auto3d.partition import Partition, PartitionRequest, partition
from auto3d.partition.cost import analytic
from auto3d.partition.merak import shard
from auto3d.plan import PlanError, stages_between
from auto3d.search.partitioned import plan_of
from tests.models import captured


def request_of(global_batch: int, **settings) -> PartitionRequest:
    graph = captured("gpt2", 1).graph
    return PartitionRequest(
        graph_at=lambda size: captured("gpt2", size).graph,
        costs_of=analytic,
        cuts=shard(graph).bounds,
        global_batch=global_batch,
        **{"stages": None, "micro_batch_size": 2, "nodes": 2, "devices_per_node": 2, "equal_slices": True} | settings,
    )


def test_pipelines_side_by_side_have_their_own_ranks():
    """Two pipelines of three ranks, as RaNNC puts them on two nodes."""
    end = len(captured("gpt2", 2).graph.nodes)
    found = Partition(stages=stages_between([0, 8, end]), replicas=(4, 2), pipelines=2, micro_batches=4)
    plan = plan_of(found, request_of(32), seed=1)
    assert (plan.dp, plan.pp, plan.micro_batch_size, plan.micro_batches) == (2, 2, 4, 4)
    assert plan.graph == captured("gpt2", 4).graph.fingerprint
    assert [stage.replicas for stage in plan.stages] == [2, 1]
    assert plan.placement == ((0, 1, 3, 4), (2, 5))
    with pytest.raises(PlanError, match="20 does not divide into 2 pipelines × 4 micro-batches; it must be a multiple"):
        plan_of(found, request_of(20), seed=1)


def test_other_methods_leave_the_micro_batches_to_the_request():
    request = request_of(8, stages=2)
    plan = plan_of(partition("uniform", request), request, seed=1)
    assert (plan.dp, plan.pp, plan.ranks, plan.micro_batch_size, plan.micro_batches) == (1, 2, 2, 2, 4)
    with pytest.raises(PlanError, match="global_batch: 7 does not divide"):
        plan_of(partition("uniform", request), request_of(7), seed=1)
