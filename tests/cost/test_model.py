"""The cost model against closed forms worked by hand, properties of real machines, and published stage sizes."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel

from auto3d.capture.graph import Graph
from auto3d.capture.model import capture
from auto3d.cluster import Accelerator, Cluster, Link, Node, place_ranks
from auto3d.cost.calibrate import MeasuredIteration, calibrate
from auto3d.cost.closed_forms import amp_s, chimera_s
from auto3d.cost.layers import Layer, times_of_layers, work_of_layers
from auto3d.cost.model import CostModel
from auto3d.cost.times import times_of
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import work_of
from auto3d.data import DataSettings, InputField
from auto3d.partition.merak import shard
from auto3d.partition.methods.blocks import blocks
from auto3d.plan import Plan, stages_between
from auto3d.schedule.shape import shape
from auto3d.simulate.costs import Costs, MessageCost

BLOCK = Layer(parameters=1e6, flops=4e9, products=4, traffic=4e6, saved=2e6, output=1e5, reductions=2)
LAYERS = [BLOCK] * 8


def costs(**changes) -> Costs:
    """Costs of two stages: forward 1 and 2, backward 2 and 4, a message of 0.5 each way, syncs of 3 and 5."""
    defaults = {
        "forward": (1.0, 2.0),
        "backward": (2.0, 4.0),
        "backward_input": (1.0, 2.0),
        "backward_weight": (1.0, 2.0),
        "recompute": (1.0, 2.0),
        "sync": (3.0, 5.0),
        "update": (0.0, 0.25),
        "messages": (MessageCost(forward=0.5, backward=0.5),),
        "speed": (1.0, 1.0),
    }
    return Costs(**defaults | changes)


def test_amp_equations_2_to_4():
    """M = 4: (4 - 1) × 6 + (3 + 6) + 1, plus the slower sync, 5, and the slower update."""
    four = shape("1f1b", devices=2, micro_batches=4, options={})
    assert amp_s(four, costs()) == pytest.approx(18 + 9 + 1 + 5 + 0.25)
    late = costs(messages=(MessageCost(latency=0.125, forward=0.5, backward=0.5),))
    assert amp_s(four, late) - amp_s(four, costs()) == pytest.approx(2 * 0.125), "a latency there and one back"


def test_chimera_equation_1():
    """Figure 6: with N = D = 6, the critical path has 6 forwards and 10 backwards."""
    schedule = shape("chimera", devices=6, micro_batches=6, options={})
    equal = {name: (time,) * 6 for name, time in (("forward", 1.0), ("backward", 2.0), ("recompute", 0.0))}
    equal |= {"backward_input": (1.0,) * 6, "backward_weight": (1.0,) * 6, "update": (0.0,) * 6, "speed": (1.0,) * 6}
    equal_costs = costs(
        **equal, sync=(0.0,) * 6, messages=(MessageCost(latency=0.01, forward=0.09, backward=0.09),) * 5
    )
    assert chimera_s(schedule, equal_costs) == pytest.approx(6 * 1.1 + 10 * 2.1)
    slow = replace(equal_costs, sync=(7.0,) * 6)
    exposed = chimera_s(schedule, slow) - chimera_s(schedule, equal_costs)
    assert 0 < exposed <= 2 * 7.0  # each device has two stages, with lazy sync


def test_the_closed_form_is_the_simulator_where_stages_are_equal():
    model = layered(LAYERS)
    plan = plan_of(dp=2, tp=1, pp=4)
    assert model.slowest_pipeline_s(plan, amp_s) == pytest.approx(model.seconds(plan), rel=0.05)


def layered(layers: list[Layer], accelerator: Accelerator | None = None, outside: float = 5e9) -> CostModel:
    node = Node(
        devices=4,
        accelerator=accelerator or Accelerator(),
        inside=Link(latency_s=1e-9, bandwidth=1e12),
        outside=Link(latency_s=1e-9, bandwidth=outside, lanes=1),
    )
    cluster = Cluster(nodes=(node,) * 4, device="cuda")
    return CostModel(
        cluster,
        TrainingOptions(),
        lambda samples, share: work_of_layers(layers, samples, share.tp, precision="float32"),
    )


def plan_of(*, dp: int, tp: int, pp: int, layers: int = 8, micro_batch_size: int = 1, global_batch: int = 32) -> Plan:
    return Plan(
        graph="",
        dp=dp,
        tp=tp,
        pp=pp,
        global_batch=global_batch,
        micro_batch_size=micro_batch_size,
        schedule="1f1b",
        stages=stages_between([layers * stage // pp for stage in range(pp + 1)]),
        placement=place_ranks(dp=dp, pp=pp, tp=tp),
        seed=0,
    )


def test_time_is_not_linear_in_the_micro_batch():
    """Each product has a fixed cost, so twice the samples take less than twice as long, approaching a factor of two."""
    device = Accelerator(half_flops=4e9)
    works = [work_of_layers([BLOCK], samples, precision="float32") for samples in (1, 2, 4, 64)]
    seconds = [times_of(work, device).forward[-1] for work in works]
    assert 1 < seconds[1] / seconds[0] < seconds[2] / seconds[1] < 2
    assert seconds[3] < 64 * seconds[0]


def test_small_layers_are_bound_by_launches():
    """Where the host limits a stage, less arithmetic does not shorten it."""
    graph = captured_gpt2(layers=2, hidden=64, samples=2)
    work = work_of(graph, shard(graph).bounds)
    host = Accelerator(launch_s=1e-3, collective_launch_s=1e-3)
    times, less = times_of(work, host), times_of(replace(work, flops=work.flops / 4), host)
    assert times.forward_launch[-1] > 10 * times.forward[-1]
    assert less.forward[-1] < times.forward[-1]
    assert less.forward_launch[-1] == times.forward_launch[-1]


def test_every_flop_and_parameter_of_the_model_is_counted_once():
    graph = captured_gpt2(layers=2, hidden=64, samples=2)
    work = work_of(graph, shard(graph).bounds)
    assert work.flops.sum() == sum(node.flops for node in graph.nodes)
    assert work.parameters.sum() == sum(p.numel() for p in gpt2(2, 64).parameters())
    fused = work_of(graph, shard(graph).bounds, fused=True)
    assert fused.moved.sum() < work.moved.sum()
    activation = [p for p, node in enumerate(graph.nodes) if "act" in node.name]
    runs = [[p for p in activation if f"_{layer}_mlp" in graph.nodes[p].name] for layer in (0, 1)]
    for run in runs:
        assert len(run) > 1
        assert work.launches[run].tolist() == [1] * len(run)
        assert fused.launches[run].tolist() == [1] + [0] * (len(run) - 1), "one kernel, which begins at its first"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 4 + 8 + 16),  # its gradient is read, and the weight and two moments are read and written
        ({"precision": "bfloat16"}, 4 + 8 + 16 + 2),  # then the weight is written from its float32 copy
        ({"precision": "bfloat16", "sync_bytes": 2}, 2 + 8 + 16 + 2),
        ({"precision": "bfloat16", "autocast": True}, 4 + 8 + 16 + 6),  # the weight is read again for its copy
        ({"moments": 0}, 4 + 8),
    ],
)
def test_bytes_that_an_update_moves_for_a_parameter(options, expected):
    assert TrainingOptions(**options).update_traffic == expected


@pytest.mark.parametrize(
    ("classes", "hidden", "head", "layers", "attention"),
    [(104, 64, 16, 16, 16), (105, 64, 2, 16, 16), (106, 64, 4, 16, 16), (108, 64, 8, 16, 16), (104, 72, 16, 16, 4)],
)
def test_products_whose_rows_begin_at_no_multiple_of_16_bytes_are_slower(classes, hidden, head, layers, attention):
    """The head has a column for each class; 4 heads of 72 elements have rows of 18, which 2 divides."""
    graph = captured_gpt2(layers=1, hidden=hidden, samples=2, vocabulary=classes)
    work = work_of(graph, shard(graph).bounds, precision="bfloat16", fused_attention=False)
    found = {
        kind: {int(work.alignment[p]) for p, node in enumerate(graph.nodes) if node.flops and kind in node.name}
        for kind in ("lm_head", "mlp", "attention")
    }
    assert found == {"lm_head": {head}, "mlp": {layers}, "attention": {attention}}
    assert set(work_of(graph, shard(graph).bounds).alignment) == {16}  # float32 has no such kernels
    fast = Accelerator()
    rate = fast.peak_flops * fast.matrix_efficiency
    slow = replace(fast, unaligned=((2, rate / 5), (4, rate / 2)))
    factor = np.array([{16: 1, 8: 2, 4: 2, 2: 5}[each] for each in work.alignment.tolist()])
    more = np.cumsum(work.flops * (factor - 1)) / rate
    assert times_of(work, slow).forward[1:] - times_of(work, fast).forward[1:] == pytest.approx(more, abs=1e-12)


def test_only_attention_that_is_not_one_kernel_has_a_softmax_to_fuse():
    """Megatron-LM's fused softmax takes a number of matrices that divides by 4; else more kernels are launched."""
    graph = captured_gpt2(layers=2, hidden=64, samples=2)
    bounds = shard(graph).bounds
    unfused = work_of(graph, bounds, fused=True, fused_attention=False)
    attentions = [p for p, node in enumerate(graph.nodes) if "scaled_dot_product_attention" in node.operator]
    assert list(np.flatnonzero(unfused.softmaxes)) == attentions
    assert not work_of(graph, bounds, fused=True).softmaxes.any()
    host = Accelerator(launch_s=1e-3)
    few = replace(unfused, softmaxes=unfused.softmaxes // 8)
    assert times_of(few, host).forward_launch[-1] > times_of(unfused, host).forward_launch[-1]


def test_slower_links_lengthen_the_syncs_and_the_estimate_says_so():
    fast, slow = layered(LAYERS), layered(LAYERS, outside=5e8)
    spread = plan_of(dp=16, tp=1, pp=1)
    assert slow.seconds(spread) > fast.seconds(spread)
    estimate = slow.estimate(spread)
    names = ("compute_s", "tensor_s", "message_s", "sync_s", "update_s", "bubble_s")
    total = sum(getattr(estimate, name) for name in names)
    assert estimate.seconds == pytest.approx(total) == pytest.approx(slow.seconds(spread))
    assert estimate.sync_s > estimate.compute_s
    assert slow.seconds(plan_of(dp=4, tp=1, pp=4)) < slow.seconds(spread)  # these syncs stay inside the nodes


def test_the_bubble_of_an_asynchronous_schedule_is_its_fill_and_drain_spread_over_its_iterations():
    model = layered(LAYERS)

    def bubbles(iterations: int) -> float:
        options = {"iterations": iterations}
        plan = replace(plan_of(dp=4, tp=1, pp=4), schedule="pipedream-2bw", schedule_options=options)
        return iterations * model.estimate(plan).bubble_s

    assert 0 < bubbles(2) == pytest.approx(bubbles(4)) == pytest.approx(bubbles(16))


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("micro_batches", [3, 16, 600])
def test_an_asynchronous_schedule_without_its_option_counts_as_many_iterations_as_it_runs(name, micro_batches):
    model = layered(LAYERS)
    samples = 4 * micro_batches  # four pipelines
    plan = replace(plan_of(dp=4, tp=1, pp=4), schedule=name, global_batch=samples, micro_batch_size=1)
    assert plan.micro_batches == micro_batches
    given = replace(plan, schedule_options={"iterations": max(1, 1024 // micro_batches)})
    assert model.seconds(plan) == pytest.approx(model.seconds(given), rel=1e-6)


def test_each_stage_counts_on_its_own_kind_of_device():
    """The last of four nodes computes at a quarter of the speed, and only its stage takes four times as long."""
    quick = layered(LAYERS)
    node = quick.cluster.nodes[0]
    weak = replace(node, accelerator=replace(node.accelerator, peak_flops=5e12, memory_bandwidth=175e9))
    mixed = quick.on(Cluster(nodes=(node, node, node, weak), device="cuda"))
    plan = plan_of(dp=4, tp=1, pp=4)
    forward = mixed.costs(plan).forward
    assert forward[:3] == quick.costs(plan).forward[:3]
    assert forward[3] == pytest.approx(4 * forward[0])


def test_measured_layers_are_no_shorter_than_measured_and_grow_with_the_batch():
    measured = {("device", 1): (5e-3,) * 8, ("device", 2): (4e-3,) * 8}
    device = Accelerator()

    def forward(samples: int, tp: int) -> float:
        times = times_of_layers(LAYERS, measured, samples, device, tp, precision="float32")
        return float(np.maximum(times.forward, times.forward_launch)[-1])

    assert forward(1, 1) == pytest.approx(8 * 5e-3)
    assert forward(1, 2) == pytest.approx(8 * 4e-3)
    assert forward(64, 1) > forward(16, 1) > forward(1, 1)


def test_more_micro_batches_in_flight_need_more_memory_and_recomputation_less():
    model = layered(LAYERS)
    plan = plan_of(dp=1, tp=1, pp=4)
    first, *_, last = model.memory.of(plan)
    assert first > last  # the first stage has four micro-batches in flight, the last has one
    assert max(model.memory.of(replace(plan, schedule="gpipe"))) > first
    assert max(model.memory.of(replace(plan, schedule_options={"recompute": "full"}))) < first
    assert max(model.memory.of(plan_of(dp=1, tp=4, pp=4))) < first / 2


def test_calibration_finds_the_parameters_that_made_the_times():
    """The model itself times the iterations, with other parameters than the fit starts from."""
    truth = Accelerator(matrix_efficiency=0.45, half_flops=3e9, launch_s=0.0, iteration_s=2e-3)
    true, start = layered(LAYERS, truth), layered(LAYERS)
    plans = [
        plan_of(dp=dp, tp=tp, pp=pp, micro_batch_size=size, global_batch=batch)
        for dp, tp, pp in ((1, 1, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2), (4, 2, 2))
        for size in (1, 4)
        for batch in (16, 32)
    ]
    iterations = [MeasuredIteration(model=start, plan=plan, seconds=true.seconds(plan)) for plan in plans]
    found = calibrate(iterations, ["matrix_efficiency", "half_flops", "iteration_s"], folds=3)
    assert found.mean_error < 0.005
    assert found.parameters["matrix_efficiency"] == pytest.approx(0.45, rel=0.02)
    assert found.parameters["half_flops"] == pytest.approx(3e9, rel=0.05)
    assert found.parameters["iteration_s"] == pytest.approx(2e-3, rel=0.05)


def tokens(vocabulary: int, length: int, **more: InputField) -> DataSettings:
    inputs = {"input_ids": InputField(kind="tokens"), "labels": InputField(kind="tokens"), **more}
    return DataSettings(source="synthetic", files=(), sequence_length=length, vocabulary_size=vocabulary, inputs=inputs)


def gpt2(layers: int, hidden: int, vocabulary: int = 256, positions: int = 32) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers, n_embd=hidden, n_head=hidden // 16, n_positions=positions, vocab_size=vocabulary,
            use_cache=False, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


@cache
def captured_gpt2(layers: int, hidden: int, samples: int, vocabulary: int = 256, positions: int = 32):
    specs = tokens(vocabulary, 32).input_specs()
    return capture(lambda: gpt2(layers, hidden, vocabulary, positions), specs, samples).graph


def heaviest(graph: Graph, stages: int) -> int:
    work = work_of(graph, shard(graph).bounds)
    spans = [stage.operations[0] for stage in blocks(graph, stages)]
    return round(max(work.parameters[first:last].sum() for first, last in spans))


def test_published_sizes_of_the_heaviest_stage_of_bert():
    """Elements of the heaviest stage of Bert-48 in Chimera's released code; tied weights count once."""
    config = BertConfig(num_hidden_layers=48, hidden_size=1024, num_attention_heads=16, intermediate_size=4096)
    data = tokens(30522, 32, next_sentence_label=InputField(kind="integers"))
    bert = capture(lambda: BertForPreTraining(config), data.input_specs(), 2).graph
    assert [heaviest(bert, stages) for stages in (16, 8, 4)] == [69_571_584, 107_360_256, 182_937_600]


@pytest.mark.soak
def test_published_sizes_of_the_heaviest_stage_of_gpt2():
    """As in Chimera's released code, for 64 layers."""
    large = captured_gpt2(64, 1280, 2, vocabulary=50257, positions=1024)
    assert [heaviest(large, stages) for stages in (32, 8)] == [104_994_560, 223_059_200]
