"""Memory predicted by the cost model against the published table of schedules and the runtime's finer estimate."""

from dataclasses import replace

import numpy as np
import pytest

from auto3d.cluster import Cluster, Node, place_ranks
from auto3d.cost.device_memory import predict
from auto3d.cost.layers import Layer, work_of_layers
from auto3d.cost.model import CostModel
from auto3d.cost.plan_memory import FRAGMENTATION
from auto3d.cost.tables import WorkTables
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import work_of
from auto3d.errors import InputError
from auto3d.partition.merak import shard
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan, stages_between
from auto3d.runtime.optimizer_memory import state_copies
from auto3d.schedule import SCHEDULES, build_schedule, samples_at_once
from tests.distributed.parity import ADAMW, make_plan
from tests.models import captured

DEPTH = 4
TABLE_2 = {  # Li and Hoefler 2021, table 2, at D = 4 and N = 8: weights (M_theta) and activations (M_a) of each device
    "pipedream": ([4, 3, 2, 1], [4, 3, 2, 1]),
    "pipedream-2bw": ([2, 2, 2, 2], [4, 3, 2, 1]),
    "gpipe": ([1, 1, 1, 1], [8, 8, 8, 8]),
    "gems": ([2, 2, 2, 2], [1, 1, 1, 1]),
    "1f1b": ([1, 1, 1, 1], [4, 3, 2, 1]),
    "chimera": ([2, 2, 2, 2], [3, 4, 4, 3]),
}


def bytes_of(name: str, layer: Layer) -> list[float]:
    """Bytes on each of four devices under schedule ``name``, where each stage is one ``layer``."""
    plan = Plan(
        graph="", dp=1, tp=1, pp=DEPTH, global_batch=2 * DEPTH, micro_batch_size=1, schedule=name,
        stages=stages_between(range(DEPTH + 1)), placement=place_ranks(dp=1, pp=DEPTH), seed=0,
    )  # fmt: skip
    cluster = Cluster(nodes=(Node(devices=DEPTH),), device="cpu")
    layers = [layer] * DEPTH
    model = CostModel(
        cluster, TrainingOptions(), lambda samples, tp, _: work_of_layers(layers, samples, tp, precision="float32")
    )
    return [total / FRAGMENTATION for total in model.memory(plan)]


@pytest.mark.parametrize("name", TABLE_2)
def test_weights_and_activations_are_those_of_chimeras_table_2(name):
    weights, activations = TABLE_2[name]
    assert bytes_of(name, Layer(saved=1000)) == pytest.approx([4000 * sets for sets in activations])
    gradient_and_moments = 12
    copies = {"gems": 2, "chimera": 2}.get(name, 1)  # copies of a stage, each with its gradient and its moments
    state = [1000 * (4 * sets + gradient_and_moments * copies) for sets in weights]
    assert bytes_of(name, Layer(parameters=1000)) == pytest.approx(state)


@pytest.mark.parametrize("model", ["gpt2", "bert", "t5"])
def test_the_cost_model_agrees_with_the_runtimes_estimate(model):
    """Within 30 % on every device, for every schedule, with and without recomputation.

    The cost model assumes a few messages per peer; the finer estimate counts them step by step. The messages of these
    layers are large in comparison with the layers.
    """
    samples, compared = 16, set()
    graph = captured(model, samples).graph
    work = work_of(graph, shard(graph).bounds)
    for name in SCHEDULES:
        for pp, micro_batches in ((2, 4), (4, 4), (4, 8)):
            for options in ({}, {"recompute": "full"}):
                try:
                    schedule = build_schedule(name, devices=pp, micro_batches=micro_batches, **options)
                    plan = make_plan(
                        model, dp=1, pp=pp, micro_batch_size=samples, micro_batches=micro_batches, schedule=name,
                        options=options, stages=uniform(graph, schedule.stages),
                    )  # fmt: skip
                except InputError:  # the schedule does not exist at these sizes
                    continue
                assert samples_at_once(plan) == samples
                cluster = Cluster(nodes=(Node(devices=pp),), device="cpu")
                costs = CostModel(cluster, TrainingOptions(), lambda *_: work)
                finer = predict(graph, plan, schedule, optimizer_copies=state_copies(ADAMW))
                for device, (total, needed) in enumerate(zip(costs.memory(plan), finer, strict=True)):
                    ratio = total / FRAGMENTATION / needed.total
                    assert 0.75 < ratio < 1.3, f"{name} {options} pp={pp}, device {device}: {ratio:.2f} of {needed}"
                compared.add(name)
    assert compared == set(SCHEDULES)


def test_frozen_parameters_count_as_weights_alone():
    graph, frozen = captured("gpt2", 2).graph, "transformer.wte.weight"
    plan = make_plan("gpt2", dp=1, pp=1)

    def total(trained: frozenset[str]) -> float:
        work = work_of(replace(graph, trained=trained), shard(graph).bounds)
        cluster = Cluster(nodes=(Node(devices=1),), device="cpu")
        return CostModel(cluster, TrainingOptions(), lambda *_: work).memory(plan)[0]

    difference = total(graph.trained) - total(graph.trained - {frozen})
    assert difference == pytest.approx(FRAGMENTATION * 3 * graph.parameters[frozen].bytes)


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}], ids=["whole", "recomputed"])
def test_memory_over_time_peaks_where_the_plan_does_and_ends_empty(options):
    """The largest value over time is the peak of the plan, which is counted without times."""
    compared = 0
    for name, family in SCHEDULES.items():
        chosen = {**options, "iterations": 4} if family.asynchronous else options  # the timeline has four
        for devices, micro_batches in ((2, 4), (4, 4), (4, 8)):
            try:
                stages = build_schedule(name, devices=devices, micro_batches=micro_batches, **chosen).stages
            except InputError:  # the schedule does not exist at these sizes
                continue
            layers = [Layer(parameters=10 * n, saved=100 + n, flops=1e9 * n, output=n) for n in range(1, stages + 1)]
            plan = Plan(
                graph="", dp=1, tp=1, pp=devices, global_batch=2 * micro_batches, micro_batch_size=2, schedule=name,
                stages=stages_between(range(stages + 1)), placement=place_ranks(dp=1, pp=devices), seed=0,
                schedule_options=chosen,
            )  # fmt: skip
            model = CostModel(
                Cluster(nodes=(Node(devices=devices),), device="cpu"),
                TrainingOptions(),
                lambda samples, tp, _, layers=layers: work_of_layers(layers, samples, tp, precision="float32"),
            )
            timeline = model.timeline(plan)
            assert timeline.makespan / timeline.schedule.iterations == pytest.approx(model.estimate(plan).seconds)
            curves = model.memory_over_time(plan, timeline, range(devices))
            assert [curve.peak for curve in curves] == pytest.approx(model.memory(plan), rel=1e-12)
            for curve in curves:
                assert curve.times == sorted(curve.times)
                assert curve.held[-1] == pytest.approx(curve.held[0])
            compared += 1
    assert compared > 20


@pytest.mark.parametrize(("name", "blocks"), [("gpt2", 4), ("bert", 4.5)])  # BERT's head has half of one more
def test_recomputation_block_by_block_keeps_the_input_of_each_block(name, blocks):
    """Each input has samples × tokens × width elements of 4 bytes, also where a residual crosses beside it."""
    graph = captured(name, 2).graph
    tables = WorkTables(work_of(graph, shard(graph).bounds))
    first, last = tables.work.repeated
    assert tables.block_inputs(((first, last),)) == blocks * (2 * 32 * 32 * 4)
    third = int(np.flatnonzero(tables.work.blocks)[4])
    assert tables.block_inputs(((first, third),)) == 2 * (2 * 32 * 32 * 4)
