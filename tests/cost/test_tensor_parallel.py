"""The costs of tensor parallelism, read off local Graphs: every byte and FLOP against the Graph that a rank runs."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from auto3d.capture.model import CapturedModel, capture
from auto3d.cluster import Accelerator, Cluster, Link, Node, place_ranks
from auto3d.conversions import Collective
from auto3d.cost.collectives import Traffic, ring_s
from auto3d.cost.layers import Layer, work_of_layers
from auto3d.cost.model import CostModel
from auto3d.cost.sub_pipelined import sub_pipelined_s
from auto3d.cost.times import times_of
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import SUMMED, Work, work_of, work_of_local, work_scaled
from auto3d.derived.local_graph import local_graph_from_json, local_graph_to_json, local_graphs
from auto3d.derived.model import Derived
from auto3d.derived.planned_split import planned_split
from auto3d.derived.shards import tensor_parallel
from auto3d.partition.merak import shard
from auto3d.partition.methods.uniform import uniform
from auto3d.partition.stage import cut
from auto3d.plan import Plan, PlanError, StagePlan, stages_between
from auto3d.share import Share
from auto3d.tensor_placement import Split
from tests.cost.test_model import gpt2, tokens
from tests.models import FEATURES, captured
from tests.soak import soak

LINK = Link(latency_s=1e-5, bandwidth=1e10)


class _FeedForward(nn.Module):
    """Two products with weights, as Megatron-LM splits them, then a head that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.norm = (
            nn.Linear(16, 64, bias=False),
            nn.Linear(64, 16, bias=False),
            nn.LayerNorm(16),
        )

    def forward(self, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        again = features * self.norm.weight  # the input of the first product has a gradient, too
        return nn.functional.cross_entropy(again + self.narrow(torch.relu(self.wide(again))), label)


def feed_forward() -> tuple[CapturedModel, Derived]:
    whole = capture(_FeedForward, FEATURES.input_specs(), 8)
    split = {"wide.weight": Split(0, (64,)), "narrow.weight": Split(1, (64,))}
    return whole, tensor_parallel(whole, Share(tp=2), split=split)


def works(model: Derived, **keywords) -> tuple[Work, Work]:
    graph = model.whole.graph
    whole = work_of(graph, shard(graph).bounds, **keywords)
    return whole, work_of_local(whole, local_graphs(model)[0], **keywords)


@pytest.mark.parametrize("shards", [2, 4])
def test_gpt2_by_its_known_rules_has_megatrons_split(shards):
    """Per layer two all-reduces forward and two backward, one more for the embedding and one for the head."""
    specs = tokens(256, 32).input_specs()
    whole = capture(lambda: gpt2(2, 64), specs, 2)
    model = tensor_parallel(whole, Share(tp=shards), split=planned_split(whole, Share(tp=shards), rules={}))
    alone, one = works(model)
    graph = whole.graph
    products = [p for p, node in enumerate(graph.nodes) if node.flops]
    assert all(one.flops[p] == alone.flops[p] / shards for p in products)
    norms = [p for p, node in enumerate(graph.nodes) if "layer_norm" in node.operator]
    assert all(one.moved[p] == alone.moved[p] > 0 for p in norms)
    activation = 2 * 32 * 64 * 4
    forward, backward = ([each.size for each in one.exchanges if each.forward == way] for way in (True, False))
    loss = 2 * 32 * 4  # the largest logit of each token; then, at once, a sum and the logit of the label
    assert forward == [activation] * 5 + [loss, 2 * loss]
    assert backward == [activation] * 5
    assert not one.copied.any()
    host = Accelerator(launch_s=0.0, collective_launch_s=1e-3)
    assert times_of(one, host).forward_launch[-1] == pytest.approx(len(forward) * (shards - 1) * 1e-3)
    assert times_of(one, host).backward_launch[-1] == pytest.approx(len(backward) * (shards - 1) * 1e-3)


def test_sequence_parallelism_gathers_and_scatters_and_sums_its_norms():
    """LLaMA: each all-reduce is a reduce-scatter and an all-gather (Korthikanti et al. 2022), and all norms copied."""
    _, half = works(tensor_parallel(captured("llama", 2), Share(tp=2, sequence_parallel=True)))
    activation, layers = 2 * 32 * 32 * 4, 4
    found = Counter((one.collective, one.forward) for one in half.exchanges if one.size == activation)
    assert found == {
        (Collective.ALL_GATHER, True): 2 * layers + 1,
        (Collective.REDUCE_SCATTER, True): 2 * layers,
        (Collective.REDUCE_SCATTER, False): 2 * layers + 1,
        (Collective.ALL_GATHER, False): 2 * layers,
    }
    assert half.copied.sum() == (2 * layers + 1) * 32


def test_a_rank_has_the_same_part_of_a_larger_micro_batch():
    """Work at one size, scaled to another, against what follows from the local Graph of that size."""
    split = tensor_parallel(captured("gpt2", 2), Share(tp=2)).split
    small, large = (works(tensor_parallel(captured("gpt2", n), Share(tp=2), split=split)) for n in (2, 8))
    found = work_scaled(small[1], small[0], large[0], 4.0)
    for name in (*SUMMED, "crossing"):
        mine, truth = getattr(found, name), getattr(large[1], name)
        assert mine.sum() == pytest.approx(truth.sum(), rel=0.02), name
        if name in ("flops", "parameters", "saved"):
            assert mine == pytest.approx(truth, rel=0.02, abs=1.0), name
    assert sum(each.size for each in found.exchanges) == pytest.approx(
        sum(each.size for each in large[1].exchanges), rel=0.02
    )


def test_a_feed_forward_has_megatrons_split_and_collectives():
    whole, model = feed_forward()
    alone, half = works(model, precision="float16")
    first, last = (p for p, node in enumerate(whole.graph.nodes) if node.flops)
    assert (half.flops, half.backward_flops) == (
        pytest.approx(alone.flops / 2),
        pytest.approx(alone.backward_flops / 2),
    )
    assert half.products.tolist() == alone.products.tolist()
    assert half.parameters.sum() == 2 * 16 * 64 / 2 + 16
    assert not half.copied.any()
    relu = next(p for p, node in enumerate(whole.graph.nodes) if "relu" in node.operator)
    assert half.moved[relu] == alone.moved[relu] / 2 > 0
    size = 8 * 16 * 2  # samples × features × bytes
    found = [(one.collective, one.forward, one.size) for one in half.exchanges]
    assert found == [(Collective.ALL_REDUCE, False, size), (Collective.ALL_REDUCE, True, size)]
    backward, forward = half.exchanges
    assert backward.boundary == first, "the gradient of the input is summed after the first product's backward"
    assert last < forward.boundary < len(whole.graph.nodes)


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        ("gpt2", True),
        ("bert", False),
        ("llama", True),
        ("t5", False),
        ("vit", True),
        *soak(("gpt2", False), ("bert", True), ("llama", False), ("t5", True), ("vit", False)),
    ],
)
def test_the_work_is_that_of_the_local_graph(name, sequence_parallel):
    """Sums, the parameters of a rank, and at every cut the bytes that the stages of the local Graph really send."""
    model = tensor_parallel(captured(name, 2), Share(tp=2, sequence_parallel=sequence_parallel))
    whole, graph = model.whole.graph, model.program.graph
    alone, half = works(model)
    assert len(half) == len(alone) == len(whole.nodes)
    assert half.flops.sum() == sum(node.flops for node in graph.nodes)
    assert half.flops.sum() < 0.75 * alone.flops.sum()
    elements = {n: v.bytes / v.item_bytes for n, v in graph.parameters.items()}
    assert half.parameters.sum() == sum(elements[n] for n in graph.trained)
    copied = [n for n in graph.parameters if model.placements[n].kind.value == "copied"]
    assert half.copied.sum() == sum(elements[n] for n in copied)
    for position in range(1, len(whole.nodes)):
        halves = model.stages(stages_between((0, position, len(whole.nodes))))
        if all(stage.operations for stage in halves):
            received = cut(graph, halves)[1].received
            assert half.crossing[position] == sum(transfer.value.bytes for transfer in received)
    assert [one.boundary for one in half.exchanges] == sorted(one.boundary for one in half.exchanges)


def test_every_conversion_is_one_exchange_for_each_direction_in_which_it_communicates():
    model = tensor_parallel(captured("llama", 2), Share(tp=2))
    _, half = works(model)
    names = [node.operator.split(".")[1] for node in model.program.graph.nodes if node.operator.startswith("auto3d.")]
    losses = names.count("vocabulary_cross_entropy")
    forward = [one for one in half.exchanges if one.forward]
    assert len(forward) == 2 * losses + sum(
        name in ("reduce", "reduce_copy", "gather", "gather_copy", "reduce_scatter") for name in names
    )
    backward = [one for one in half.exchanges if not one.forward]
    assert len(backward) <= sum(
        name in ("copy", "reduce_copy", "gather_copy", "scatter", "reduce_scatter") for name in names
    )
    assert backward


def test_a_local_graph_is_stored():
    (local,) = local_graphs(tensor_parallel(captured("gpt2", 2), Share(tp=2, sequence_parallel=True)))
    assert local_graph_from_json(local_graph_to_json(local)) == local


def plan_for(graph_stages: tuple[StagePlan, ...], *, tp: int, pp: int, **changes) -> Plan:
    plan = Plan(
        graph="", dp=1, tp=tp, pp=pp, global_batch=64, micro_batch_size=2, schedule="1f1b", stages=graph_stages,
        placement=place_ranks(dp=1, tp=tp, pp=pp), seed=0,
    )  # fmt: skip
    return replace(plan, **changes)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_the_memory_of_a_search_agrees_with_that_of_the_local_graph(name, sequence_parallel):
    """To a thousandth on every device, with and without recomputation; and less than without tensor parallelism."""
    model = tensor_parallel(captured(name, 2), Share(tp=2, sequence_parallel=sequence_parallel))
    graph, local = model.whole.graph, model.program.graph
    alone, half = works(model)
    of_rank = work_of(local, (0, len(local.nodes)))
    cluster = Cluster(nodes=(Node(devices=8),), device="cpu")
    costs = CostModel(cluster, TrainingOptions(), lambda samples, share: half if share.tp == 2 else alone)
    finer = CostModel(cluster, TrainingOptions(), lambda *_: of_rank)
    for pp in (1, 2):
        for options in ({}, {"recompute": "full"}):
            whole_plan = plan_for(
                uniform(graph, pp), tp=2, pp=pp, schedule_options=options, sequence_parallel=sequence_parallel
            )
            local_plan = replace(whole_plan, stages=model.stages(whole_plan.stages))
            found = costs.memory.of(whole_plan)
            assert found == pytest.approx(finer.memory.of(local_plan), rel=1e-3), f"{options} pp={pp}"
            one = replace(whole_plan, tp=1, sequence_parallel=False, placement=place_ranks(dp=1, pp=pp))
            assert all(mine < all_ for mine, all_ in zip(found, costs.memory.of(one), strict=True))


def test_all_gather_and_reduce_scatter_are_the_halves_of_an_all_reduce_on_a_ring():
    cluster = Cluster(nodes=(Node(devices=4, inside=LINK),), device="cuda")
    link = Traffic(cluster, [range(4)]).group_link(range(4))
    for size in (1e3, 1e9):
        halves = [link.seconds(each, size) for each in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)]
        assert sum(halves) == pytest.approx(ring_s(4, size, LINK))
        assert link.seconds(Collective.ALL_REDUCE, size) <= sum(halves)
    assert link.seconds(Collective.ALL_GATHER, 1e9) == pytest.approx(3e-5 + 0.75 * 1e9 / 1e10)


def model_of_blocks(compute_s: float, collective_s: float, layers: int) -> tuple[CostModel, Plan]:
    """Layers of two blocks each; on two ranks a layer takes these seconds for a micro-batch of two samples."""
    device = Accelerator(
        peak_flops=1e12,
        matrix_efficiency=1.0,
        half_flops=0.0,
        launch_s=0.0,
        collective_launch_s=0.0,
        memory_efficiency=1.0,
    )
    block = Layer(flops=compute_s / 2 * 1e12, output=collective_s / 2 * 1e9 / 4 / 2, reductions=1)
    inside = Link(latency_s=0.0, bandwidth=1e9)
    cluster = Cluster(nodes=(Node(devices=2, accelerator=device, inside=inside),), device="cuda")
    blocks = [block] * (2 * layers)
    model = CostModel(
        cluster,
        TrainingOptions(),
        lambda samples, share: work_of_layers(blocks, samples, share.tp, precision="float32"),
    )
    return model, plan_for(stages_between((0, len(blocks))), tp=2, pp=1, micro_batch_size=2)


@pytest.mark.parametrize(("compute", "collective"), [(1.0, 0.5), (1.0, 1.0), (1.0, 1.7), (1.0, 3.0), (1.0, 0.0)])
@pytest.mark.parametrize("layers", [1, 3, 24])
def test_sub_pipelining_takes_the_time_of_meraks_formulas(compute, collective, layers):
    """Lai et al. 2023, section 5.3: the forward, the backward, and both, of K layers of two equal blocks."""
    model, plan = model_of_blocks(compute, collective, layers)
    plain, turns = (model.costs(replace(plan, tensor_overlap=way)) for way in ("none", "sub-pipelined"))
    tm, ta, k = compute, collective, layers
    assert plain.forward[0] + plain.backward[0] == pytest.approx((3 * tm + 2 * ta) * k)
    assert turns.forward[0] == pytest.approx(tm / 4 + (k - 1 / 4) * max(tm, ta) + ta / 4)
    assert turns.backward[0] == pytest.approx(tm / 2 + (k - 1 / 4) * max(2 * tm, ta) + ta / 4)
    both = 3 / 4 * tm + ta / 2 + (k - 1 / 4) * max(3 * tm, 2 * tm + ta, 2 * ta)
    assert turns.forward[0] + turns.backward[0] == pytest.approx(both)
    assert model.estimate(plan).tensor_s == pytest.approx(32 * 2 * ta * k)
    exposed = model.estimate(replace(plan, tensor_overlap="sub-pipelined")).tensor_s
    assert exposed == pytest.approx(32 * (both - 3 * tm * k))
    assert model.seconds(replace(plan, tensor_overlap="sub-pipelined", schedule_options={"recompute": "full"})) == (
        pytest.approx(32 * (both + turns.forward[0]))
    )


def test_two_halves_never_use_a_device_or_the_group_twice_at_once():
    """Against an event by event simulation of random segments, in which the half that waits longer goes first."""
    random = np.random.default_rng(1)
    for _ in range(200):
        segments = [tuple(random.uniform(0, 1, 2)) for _ in range(random.integers(1, 9))]
        seconds = sub_pipelined_s(segments)
        compute, collectives = (2 * sum(times) for times in zip(*segments, strict=True))
        assert max(compute, collectives) <= seconds <= compute + collectives
        assert seconds >= sum(map(sum, segments))
        assert seconds == pytest.approx(_replayed(segments))


def _replayed(segments: list[tuple[float, float]]) -> float:
    """The longest path over (half, segment) pairs: each waits for its half and for the one before it in turn."""
    steps = [(half, number) for number in range(len(segments)) for half in (0, 1)]
    ends: dict[tuple[str, int, int], float] = {}
    for place, (half, number) in enumerate(steps):
        earlier = steps[place - 1] if place else None
        begin = max(
            ends.get(("group", half, number - 1), 0.0), ends["device", *earlier] if earlier is not None else 0.0
        )
        ends["device", half, number] = begin + segments[number][0]
        begin = max(ends["device", half, number], ends["group", *earlier] if earlier is not None else 0.0)
        ends["group", half, number] = begin + segments[number][1]
    return max(ends.values())


def test_an_odd_number_of_samples_cannot_be_halved():
    model, plan = model_of_blocks(1.0, 1.0, 2)
    with pytest.raises(PlanError, match="sub-pipelined halves each micro-batch, and a stage runs 1 sample"):
        model.costs(replace(plan, micro_batch_size=1, tensor_overlap="sub-pipelined"))


def test_messages_are_whole_values_unless_they_are_scattered():
    """Each rank sends all it has, on the link that the ranks of a node share; scattered ones send a part and gather."""
    node = Node(
        devices=2, inside=Link(latency_s=0.0, bandwidth=1e10), outside=Link(latency_s=0.0, bandwidth=1e9, lanes=1)
    )
    cluster = Cluster(nodes=(node, node), device="cuda")
    layers = [Layer(flops=1e9, output=1e6, reductions=2)] * 4
    plan = plan_for(stages_between((0, 2, 4)), tp=2, pp=2, micro_batch_size=1)

    def seconds(**options) -> float:
        model = CostModel(
            cluster,
            TrainingOptions(**options),
            lambda samples, share: work_of_layers(layers, samples, share.tp, precision="float32"),
        )
        return model.costs(plan).messages[0].forward

    size = 4e6
    assert seconds() == pytest.approx(2 * size / 1e9)
    assert seconds(scattered_messages=True) == pytest.approx(size / 1e9 + size / 2 / 1e10)
