"""The costs of slices of the sequence: their work adds up to the whole's, and so do their times and their bytes."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from auto3d.cluster import Accelerator, Cluster, Link, Node
from auto3d.cost.layers import Layer, work_of_layers
from auto3d.cost.memory.segment import Peak
from auto3d.cost.memory.segments import Segments
from auto3d.cost.memory.stage import mean_of_slices, stage_memory
from auto3d.cost.model import CostModel
from auto3d.cost.model_work import ModelWork
from auto3d.cost.stage_times import StageTimes
from auto3d.cost.times import times_of
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import Work, work_of, work_of_local, work_scaled
from auto3d.derived.local_graph import LocalGraph, local_graph_from_json, local_graph_to_json, local_graphs
from auto3d.derived.of_share import derived
from auto3d.derived.planned_split import planned_split
from auto3d.derived.slices import sliced
from auto3d.partition.merak import shard
from auto3d.plan import Plan, PlanError
from auto3d.planner import Planner
from auto3d.schedule import build_schedule
from auto3d.schedule.moments import all_moments
from auto3d.schedule.shape import shape_of, shares_of
from auto3d.search.axes import Candidate
from auto3d.search.make import PlanMaker
from auto3d.search.planned_model import PlannedGraphs, PlannedLayers
from auto3d.search.space import Workload
from auto3d.share import WHOLE, Share
from tests.cost.test_profile import made_up
from tests.distributed.parity import make_plan
from tests.models import MODELS, captured
from tests.soak import soak

SLICES = 4
NODE = Node(
    devices=2,
    accelerator=Accelerator(
        peak_flops=2e10, memory_bandwidth=2e9, half_flops=1e5, launch_s=4e-6, micro_batch_s=3e-5, memory_bytes=2e9
    ),
    inside=Link(latency_s=2e-5, bandwidth=2e8),
    handling=(1e-5, 1e-9),
)
CLUSTER = Cluster(nodes=(NODE,), device="cuda")
CAUSAL = ["gpt2-wide", "llama-wide"]


@cache
def graphs_of(model: str, samples: int, slices: int) -> tuple[LocalGraph, ...]:
    return local_graphs(sliced(captured(model, samples), slices))


@cache
def works(model: str, samples: int, slices: int) -> tuple[Work, list[Work]]:
    """The work of the whole model, and that of each slice."""
    graph = captured(model, samples).graph
    whole = work_of(graph, shard(graph).bounds)
    return whole, [work_of_local(whole, local) for local in graphs_of(model, samples, slices)]


def work_at(model: str):
    """The work of any share of a captured model but those of tensor parallelism."""

    def work(samples: int, share: Share) -> Work:
        whole, of_slices = works(model, samples, max(2, share.slices))
        return whole if share == WHOLE else of_slices[share.slice_number]

    return work


def sliced_plan(model: str, slices: int = SLICES, **choices) -> Plan:
    fixed = {"dp": 1, "pp": 2, "micro_batch_size": 4, "micro_batches": 4, "schedule": "seq1f1b"}
    return make_plan(model, **fixed, options={"slices": slices}, **choices)


@pytest.mark.parametrize("model", CAUSAL)
@pytest.mark.parametrize("slices", [2, 4, *soak(8)])
def test_the_flops_of_slices_add_up_to_those_of_the_model(model, slices):
    """No slice attends to the keys of later ones. A causal kernel's scores count in full, hidden or not, and so twice
    where a slice computes only those up to its last token.
    """
    whole, of_slices = works(model, 4, slices)
    nodes = captured(model, 4).graph.nodes
    attends = np.array(["attention" in node.operator for node in nodes])
    for name in ("flops", "backward_flops", "weight_flops"):
        total = sum(getattr(work, name) for work in of_slices)
        np.testing.assert_allclose(total[~attends], getattr(whole, name)[~attends], err_msg=name)
    for name in ("flops", "backward_flops"):
        of_attention = [getattr(work, name)[attends].sum() for work in of_slices]
        each = getattr(whole, name)[attends].sum() / slices**2
        assert of_attention == pytest.approx([each * (2 * (number + 1) if number else 1) for number in range(slices)])
    for work in of_slices:
        np.testing.assert_array_equal(work.parameters, whole.parameters)
        between = list(shard(captured(model, 4).graph).bounds[1:-1])
        np.testing.assert_allclose(slices * work.crossing[between], whole.crossing[between])
        assert not work.exchanges


def test_a_slice_does_the_same_part_of_a_larger_micro_batch():
    small, large = works("gpt2-wide", 4, SLICES), works("gpt2-wide", 8, SLICES)
    for of_small, of_large in zip(small[1], large[1], strict=True):
        found = work_scaled(of_small, small[0], large[0], 2.0)
        for name in ("flops", "backward_flops", "weight_flops", "products", "parameters"):
            np.testing.assert_allclose(getattr(found, name), getattr(of_large, name), err_msg=name)
        for name in ("moved", "backward_moved", "saved", "crossing"):  # embeddings of positions do not grow
            assert getattr(found, name).sum() == pytest.approx(getattr(of_large, name).sum(), rel=0.02), name


def test_the_graphs_of_slices_are_stored():
    graphs = graphs_of("gpt2-wide", 4, SLICES)
    assert tuple(local_graph_from_json(local_graph_to_json(graph)) for graph in graphs) == graphs


@pytest.mark.parametrize("model", CAUSAL)
def test_each_slice_is_an_operation_with_all_that_an_operation_costs(model):
    """Times are those of each slice's own work, and what a micro-batch costs beside it comes once for each."""
    cost, plan = CostModel(CLUSTER, TrainingOptions(), work_at(model)), sliced_plan(model)
    found = cost.costs(plan)
    _, of_slices = works(model, 4, SLICES)
    device = NODE.accelerator
    (first, last), *_ = plan.stages[0].operations
    handling = 1e-5 + 1e-9 * of_slices[0].crossing[last]
    for number, work in enumerate(of_slices):
        forward, forward_launch, backward, backward_launch, _ = times_of(work, device).range(first, last)
        assert found.forward_of_slice[0][number] == pytest.approx(max(forward, forward_launch) + 3e-5 + handling)
        assert found.backward_of_slice[0][number] == pytest.approx(max(backward, backward_launch) + handling)
    for stage in range(2):
        for times in (found.forward_of_slice[stage], found.backward_of_slice[stage]):
            assert all(earlier < later for earlier, later in pairwise(times)), "later slices attend to more keys"
        assert sum(found.forward_of_slice[stage]) == pytest.approx(found.forward[stage])
        assert sum(found.backward_of_slice[stage]) == pytest.approx(found.backward[stage])
    (message,) = found.messages
    assert message.forward == pytest.approx(SLICES * of_slices[0].crossing[last] / 2e8)
    assert message == cost.costs(replace(plan, schedule="1f1b", schedule_options={})).messages[0]
    assert cost.flops(plan) == cost.flops(replace(plan, schedule="1f1b", schedule_options={}))


def test_a_schedule_with_one_slice_costs_what_1f1b_does():
    cost, plan = CostModel(CLUSTER, TrainingOptions(), work_at("gpt2-wide")), sliced_plan("gpt2-wide", slices=1)
    other = replace(plan, schedule="1f1b", schedule_options={})
    assert cost.costs(plan) == cost.costs(other)
    assert cost.estimate(plan) == cost.estimate(other)


def test_a_partition_by_time_balances_the_times_of_all_slices():
    """Those of stages alone; what each operation costs beside its work is the same for every stage."""
    node = replace(NODE, accelerator=replace(NODE.accelerator, micro_batch_s=0.0), handling=(0.0, 0.0))
    cost = CostModel(Cluster(nodes=(node,), device="cuda"), TrainingOptions(), work_at("gpt2-wide"))
    plan = sliced_plan("gpt2-wide")
    bounds = [0, *(stage.operations[-1][1] for stage in plan.stages)]
    times, found = cost.pipeline_times(plan, bounds), cost.costs(plan)
    assert np.diff(times.before[0]) == pytest.approx(np.add(found.forward, found.backward))
    assert times.before[1] is times.before[0]
    (message,) = found.messages
    assert times.messages[1] == pytest.approx(2 * (SLICES * message.latency + message.forward))


def test_a_slice_takes_a_measured_time_in_proportion_to_its_estimate():
    profile = made_up()
    graph = captured("gpt2", 4).graph
    work, bounds = work_at("gpt2"), shard(graph).bounds
    times_at = profile.times_at(work, lambda _: bounds)
    whole = times_at(4, Accelerator(), WHOLE)
    estimate = times_of(work(4, WHOLE), Accelerator())
    for number in range(2):
        share = Share(slices=2, slice_number=number)
        found, of_slice = times_at(4, Accelerator(), share), times_of(work(4, share), Accelerator())
        for first, last in pairwise(bounds):
            ratio = of_slice.range(first, last)[[0, 2]] / estimate.range(first, last)[[0, 2]]
            assert found.range(first, last)[[0, 2]] == pytest.approx(ratio * whole.range(first, last)[[0, 2]])


def test_a_stage_holds_the_mean_of_slices_and_its_peaks_are_the_largest():
    _, of_slices = works("gpt2-wide", 4, SLICES)
    each = [stage_memory(Segments(work.tensors), ((0, work.tensors.count),), (), split=False) for work in of_slices]
    found = mean_of_slices(each)
    assert found.in_flight == pytest.approx(np.mean([one.in_flight for one in each]))
    assert found.backward == max((one.backward for one in each), key=lambda peak: peak.size)
    assert isinstance(found.first_backward, Peak)
    assert max(one.in_flight for one in each) < 1.01 * min(one.in_flight for one in each)
    graph = captured("gpt2-wide", 4).graph
    keys_and_values = sum(
        sum(graph.value(name).bytes for name in node.reads[1:3]) for node in graph.nodes if "attention" in node.operator
    )
    assert found.slice_gradient == keys_and_values / SLICES


def test_a_witness_names_an_operation_of_the_model():
    cost, plan = CostModel(CLUSTER, TrainingOptions(), work_at("gpt2-wide")), sliced_plan("gpt2-wide")
    names = works("gpt2-wide", 4, 2)[0].tensors.operations
    for device, witness in enumerate(cost.memory.devices(plan)):
        (first, last), *_ = plan.stages[device].operations
        assert witness.operation in names[first:last]


@pytest.mark.parametrize(
    ("model", "held"), [("gpt2-wide", 3 / 2), ("llama-wide", 1)], ids=["of a fused product", "of products of their own"]
)
def test_a_slice_that_runs_again_takes_its_forward_and_keeps_its_keys_and_values(model, held):
    """Keys and values that are views of a fused product keep its memory, queries included."""
    cost, plan = CostModel(CLUSTER, TrainingOptions(), work_at(model)), sliced_plan(model)
    again = replace(plan, schedule_options={**plan.schedule_options, "recompute": "full"})
    found, before = cost.costs(again), cost.costs(plan)
    assert before.recompute_of_slice == ((0.0,) * SLICES,) * 2
    _, of_slices = works(model, 4, SLICES)
    (first, last), *_ = plan.stages[0].operations
    for number, work in enumerate(of_slices):
        forward, launch, *_ = times_of(work, NODE.accelerator).range(first, last)
        assert found.recompute_of_slice[0][number] == pytest.approx(max(forward, launch))
    assert (found.forward_of_slice, found.backward_of_slice) == (before.forward_of_slice, before.backward_of_slice)
    assert cost.seconds(again) > cost.seconds(plan)
    for number in range(2):
        recomputed, kept = (cost.memory.stage_if(plan, number, recompute=each, split=False) for each in (True, False))
        assert recomputed.in_flight == pytest.approx(recomputed.inputs + held * recomputed.slice_gradient)
        assert recomputed.in_flight + recomputed.recomputed == pytest.approx(kept.in_flight)


def test_gradients_of_later_slices_are_counted_from_the_first_backward_to_the_last():
    """The last slice's backward makes those of all keys as one tensor, which the next one takes apart."""
    for slices, expected in ((1, []), (2, [2, 2]), (4, [4, 4, 2, 1])):
        schedule = build_schedule("seq1f1b", devices=1, micro_batches=2, slices=slices)
        (moments,) = all_moments(schedule)
        backwards = [one.counts[0].slice_gradients for one in moments if str(one.operation).startswith("B")]
        assert backwards == (2 * expected if slices > 1 else [0, 0])
        assert moments[-1].counts[0].slice_gradients == 0


def maker_of(model: str, asked: list[Share]) -> PlanMaker:
    """A PlanMaker of a captured model; ``asked`` gets each share whose work it asks for."""

    def work(samples: int, share: Share) -> Work:
        asked.append(share)
        return work_at(model)(samples, share)

    planned = PlannedGraphs(
        lambda samples: captured(model, samples).graph,
        lambda graph: work_of(graph, shard(graph).bounds),
        lambda graph: shard(graph).bounds,
        lambda *degree: {},
        work,
    )
    return PlanMaker(planned, CostModel(CLUSTER, TrainingOptions(), planned.work), Workload(global_batch=16, seed=1))


CANDIDATE = Candidate(dp=1, tp=1, pp=2, micro_batch_size=4, schedule=f"seq1f1b:slices={SLICES}")


@pytest.mark.parametrize(
    ("partition", "recompute"), [("uniform", "none"), ("blocks", 0.5), ("autopipe", "none"), ("autopipe", "full")]
)
def test_a_plan_with_slices_is_made_and_predicted(partition, recompute):
    maker = maker_of("gpt2-wide", [])
    plan = maker.plan(replace(CANDIDATE, partition=partition, recompute=recompute))
    assert bool(shape_of(plan).recompute) == (recompute != "none")
    assert (plan.schedule, plan.schedule_options["slices"]) == ("seq1f1b", SLICES)
    assert len(shares_of(plan)) == SLICES
    assert maker.model.seconds(plan) > 0


def test_uneven_replicas_run_slices():
    maker = maker_of("gpt2-wide", [])
    maker.model = maker.model.on(Cluster(nodes=(replace(NODE, devices=3),), device="cuda"))
    plan = maker.unlimited(replace(CANDIDATE, replicas="uneven"))
    assert sorted(stage.replicas for stage in plan.stages) == [1, 2]
    costs, whole = (maker.model.costs(each) for each in (plan, maker.unlimited(CANDIDATE)))
    assert max(map(sum, zip(costs.forward, costs.backward, strict=True))) < max(
        map(sum, zip(whole.forward, whole.backward, strict=True))
    )
    assert len(costs.forward_of_slice[0]) == SLICES


def test_a_model_that_cannot_run_in_slices_is_asked_once():
    asked: list[Share] = []
    maker = maker_of("bert-wide", asked)
    for _ in range(3):
        with pytest.raises(PlanError, match="schedule: this model cannot run in slices of its sequence"):
            maker.plan(CANDIDATE)
    assert asked == [Share(slices=SLICES)]


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        (
            {"tp": 2, "pp": 1, "sequence_parallel": True},
            "slices of the sequence and sequence parallelism",
        ),
        (
            {"tp": 2, "pp": 1, "tensor_overlap": "sub-pipelined"},
            "slices of the sequence and sub-pipelining",
        ),
        ({"schedule": "seq1f1b:slices=5"}, "slices: 5 does not divide a sequence of 64"),
    ],
)
def test_slices_refuse_other_divisions_of_the_model(choices, reason):
    maker = maker_of("gpt2-wide", [])
    maker.model = maker.model.on(Cluster(nodes=(replace(NODE, devices=4),), device="cuda"))
    with pytest.raises(PlanError, match=reason):
        maker.unlimited(replace(CANDIDATE, **choices))


@pytest.mark.parametrize("scattered", [False, True])
def test_messages_of_slices_in_shards_have_the_bytes_of_whole_sequences(scattered):
    """Without latency, a micro-batch then takes as long on a link in slices as at once."""
    model = captured("gpt2-wide", 4)
    whole = work_of(model.graph, shard(model.graph).bounds)
    split = planned_split(model, Share(tp=2), rules={})
    graphs = cache(lambda share: local_graphs(derived(model, share, split=split if share.tp > 1 else {})))

    def work(samples: int, share: Share) -> Work:
        return whole if share == WHOLE else work_of_local(whole, graphs(share.of_any_slice)[share.slice_number])

    link = Link(latency_s=0.0, bandwidth=2e8)
    cluster = Cluster(nodes=(replace(NODE, devices=4, inside=link, handling=(0.0, 0.0)),), device="cuda")
    costs = CostModel(cluster, TrainingOptions(scattered_messages=scattered), work)
    fixed = {"dp": 1, "tp": 2, "pp": 2, "micro_batch_size": 4, "micro_batches": 4}
    sliced = costs.costs(make_plan("gpt2-wide", **fixed, schedule="seq1f1b", options={"slices": 2}))
    at_once = costs.costs(make_plan("gpt2-wide", **fixed))
    assert sliced.messages[0].forward == pytest.approx(at_once.messages[0].forward)
    assert at_once.messages[0].forward > 0


def test_measured_layers_run_no_slices():
    work = work_of_layers([Layer()], 1, precision="float32")
    planned = PlannedLayers(layers=(Layer(),), layer_work=lambda *_: work, times=None)
    with pytest.raises(PlanError, match="schedule: a model of measured layers runs no slices of the sequence"):
        planned.work(1, Share(slices=2))


def test_the_planner_of_the_python_api_plans_slices():
    build, data = MODELS["gpt2"]
    planner = Planner(build, data.input_specs(), Cluster(nodes=(NODE,), device="cpu"), global_batch=8)
    plan = planner.plan(dp=1, tp=1, pp=2, micro_batch_size=2, schedule="seq1f1b:slices=2")
    one = planner.predict(planner.plan(dp=1, tp=1, pp=2, micro_batch_size=2, schedule="1f1b"))
    assert planner.predict(plan).seconds > 0
    assert max(planner.predict(plan).memory) < max(one.memory)


def test_stage_times_of_all_slices_are_kept_apart():
    """A cache that forgot which slice is asked for would give all slices the time of one."""
    work = ModelWork(work_at("gpt2-wide"), TrainingOptions())
    times = StageTimes(work, None)
    whole = ((0, len(work.work_at(4))),)
    found = {
        times.seconds(4, NODE.accelerator, Share(slices=SLICES, slice_number=number), None, whole, False)[0]
        for number in range(SLICES)
    }
    assert len(found) == SLICES
