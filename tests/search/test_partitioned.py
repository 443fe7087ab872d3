"""Plans made from the partitions of partition methods."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from auto3d.capture.export import InputSpec
from auto3d.capture.model import capture
from auto3d.partition import Partition, PartitionRequest, partition
from auto3d.partition.cost import analytic
from auto3d.partition.merak import shard
from auto3d.partition.stage import cut
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


class Expands(nn.Module):
    """Has one operation more, on an input alone, where a micro-batch has more than two samples."""

    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, tokens):
        weight = torch.ones_like(tokens[:1], dtype=torch.float32)
        hidden = self.body(self.table(tokens))
        if len(tokens) > 2:
            weight = weight.expand(len(tokens), -1)
        return (self.head(torch.relu(hidden)) * weight[..., None]).square().mean()


def test_stages_hold_the_same_layers_at_the_micro_batch_size_that_a_method_chooses():
    inputs = {"tokens": InputSpec(shape=(4,), dtype=torch.int64)}
    at = {size: capture(Expands, inputs, size).graph for size in (2, 4)}
    assert len(at[4].nodes) > len(at[2].nodes)
    uses = [next(n for n, node in enumerate(at[2].nodes) if "head.weight" in node.state), len(at[2].nodes)]
    found = Partition(stages=stages_between([0, *uses]), replicas=(1, 1), pipelines=1, micro_batches=4)
    request = replace(request_of(16), graph_at=at.__getitem__)
    plan = plan_of(found, request, seed=1)
    assert plan.micro_batch_size == 4
    states = [stage.state for stage in cut(at[4], plan.stages)]
    assert states == [stage.state for stage in cut(at[2], found.stages)]
    assert states[1] == ("head.weight", "head.bias")


def test_other_methods_leave_the_micro_batches_to_the_request():
    request = request_of(8, stages=2)
    plan = plan_of(partition("uniform", request), request, seed=1)
    assert (plan.dp, plan.pp, plan.ranks, plan.micro_batch_size, plan.micro_batches) == (1, 2, 2, 2, 4)
    with pytest.raises(PlanError, match="global_batch: 7 does not divide"):
        plan_of(partition("uniform", request), request_of(7), seed=1)
