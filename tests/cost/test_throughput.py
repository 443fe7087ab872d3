"""FLOPs of an iteration against the closed form of a GPT, and throughput worked by hand."""

from dataclasses import astuple, replace

import pytest

from auto3d.cluster import Accelerator, Cluster, Node
from auto3d.cost.model import CostModel
from auto3d.cost.throughput import IterationFlops, Throughput, flops_of_graph, peak_flops_of, throughput
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import work_of
from auto3d.partition.merak import shard
from auto3d.plan import Plan
from auto3d.share import Share
from tests.distributed.parity import make_plan
from tests.models import captured

LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 4, 32, 32, 256  # sizes of the GPT-2 in tests/models.py


def gpt_plan(**choices) -> Plan:
    """Two pipelines with two micro-batches of 2 samples each."""
    return make_plan("gpt2", **{"dp": 2, "pp": 2, "micro_batch_size": 2, "micro_batches": 2} | choices)


def narayanan(batch: int, factor: int, head: int) -> float:
    """Narayanan et al. 2021, section 5.1: ``factor`` is 96 with recomputation and 72 without; ``head`` 16 and 12."""
    of_attention, of_head = SEQUENCE / (6 * HIDDEN), VOCABULARY / (head * LAYERS * HIDDEN)
    return factor * batch * SEQUENCE * LAYERS * HIDDEN**2 * (1 + of_attention + of_head)


def cost_model(*, recompute_ends: bool) -> CostModel:
    """The model on one node, where it knows what a system recomputes that keeps embedding and head."""

    def work_at(samples: int, share: Share):
        graph = captured("gpt2", samples).graph
        return work_of(graph, shard(graph).bounds)

    cluster = Cluster(nodes=(Node(devices=8),), device="cpu")
    return CostModel(cluster, TrainingOptions(recompute_ends=recompute_ends), work_at)


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "zb-h1"])
def test_model_flops_are_those_of_the_closed_form(schedule):
    plan = gpt_plan(schedule=schedule)
    flops = flops_of_graph(plan, captured("gpt2", 2).graph)
    assert flops == IterationFlops(model=pytest.approx(narayanan(8, 72, 12), rel=1e-12))
    assert cost_model(recompute_ends=True).flops(plan) == flops


def test_recomputed_flops_are_those_of_the_closed_form():
    """The paper's system recomputes the blocks and not the head; this project's runtime recomputes both."""
    plan = gpt_plan(options={"recompute": "full"})
    head = 2 * 8 * SEQUENCE * HIDDEN * VOCABULARY
    without_head = cost_model(recompute_ends=False).flops(plan)
    assert without_head.hardware == pytest.approx(narayanan(8, 96, 16), rel=1e-12)
    assert without_head.model == pytest.approx(narayanan(8, 72, 12), rel=1e-12)
    for flops in (cost_model(recompute_ends=True).flops(plan), flops_of_graph(plan, captured("gpt2", 2).graph)):
        assert flops.hardware == pytest.approx(narayanan(8, 96, 16) + head, rel=1e-12)


def test_what_a_stage_keeps_is_not_recomputed():
    plan = gpt_plan(options={"recompute": "full"})
    graph = captured("gpt2", 2).graph
    first, *others = plan.stages
    ((begin, end),) = first.operations
    kept = replace(plan, stages=(replace(first, kept=((begin + 5, end),)), *others))
    dropped = sum(node.flops for node in graph.nodes[begin + 5 : end] if not node.from_inputs)
    saved = flops_of_graph(plan, graph).recomputed - flops_of_graph(kept, graph).recomputed
    assert saved == 4 * dropped > 0  # 4 micro-batches over both pipelines


def test_throughput_by_hand():
    """8 samples of 10 tokens in 2 s on 4 devices of 5 and 15 FLOP/s: two of each kind."""
    plan = gpt_plan()
    kinds = [Node(devices=2, accelerator=Accelerator(peak_flops=peak)) for peak in (5.0, 15.0, 1000.0)]
    peak = peak_flops_of(plan, Cluster(nodes=tuple(kinds), device="cuda"))
    assert peak == 40.0  # the plan does not use the third node
    flops = IterationFlops(model=24.0, recomputed=8.0)
    found = throughput(plan, 2.0, flops=flops, tokens_per_sample=10, peak_flops=peak)
    assert astuple(found) == (4.0, 40.0, 3.0, 4.0, 0.3, 0.4)
    assert throughput(plan, 2.0, flops=flops) == replace(found, tokens_per_s=None, mfu=None, hfu=None)
    assert astuple(throughput(plan, 2.0, peak_flops=peak)) == (4.0, None, None, None, None, None)
    assert isinstance(found, Throughput)
