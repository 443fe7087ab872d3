"""Chimera's equation 1 against numbers worked by hand (Li and Hoefler 2021, section 3.4, figures 3 and 6)."""

from dataclasses import replace

import pytest

from auto3d.cluster import Accelerator, Cluster, Link, Node, place_ranks
from auto3d.cost.closed_forms import chimera_s, unoverlapped_syncs
from auto3d.cost.layers import Layer, work_of_layers
from auto3d.cost.model import CostModel
from auto3d.cost.training_options import TrainingOptions
from auto3d.plan import Plan, PlanError, stages_between
from auto3d.schedule import build_schedule
from auto3d.schedule.shape import shape
from auto3d.simulate.costs import Costs, MessageCost, uniform
from auto3d.simulate.simulate import simulate


def unoverlapped(depth: int, seconds: list[float], sync: str) -> list[float]:
    """By device, with N = D, F = 1, B = 2, all-reduces of these ``seconds``, and the option ``sync``."""
    schedule = build_schedule("chimera", devices=depth, micro_batches=depth, sync=sync)
    return unoverlapped_syncs(simulate(schedule, uniform(schedule)), seconds)


@pytest.mark.parametrize(
    ("each", "outer", "inner"),
    # With D = N = 4, F = 1 and B = 2, an iteration takes 16. Figure 3, bottom right:
    #   P0  F0 F1 .  F2 B2 B2 F3 B3 B3 .  B0 B0 .  .  B1 B1
    #   P1  .  F0 F2 F1 F3 .  B2 B2 B0 B0 B3 B3 B1 B1 .  .
    # P0 has the gradients of stage 3 at 9. Its free regions are (a) 9 to 10 and (b) 12 to 14, together 3. It has those
    # of stage 0 at 16, at the end: region (c) is empty. P1 has those of stage 2 at 12, with no idle time before it has
    # those of stage 1 at 14; region (c) is 14 to 16, for both. P2 and P3 mirror P1 and P0.
    [
        (1.0, 1.0, 0.0),  # P0: (1 - 3 < 0) + 1 - 0; P1: 1 + 1 - 2
        (2.0, 2.0, 2.0),  # P0: (2 - 3 < 0) + 2 - 0; P1: 2 + 2 - 2
        (4.0, 5.0, 6.0),  # P0: (4 - 3 = 1) + 4 - 0; P1: 4 + 4 - 2
    ],
)
def test_free_regions_of_four_stages(each: float, outer: float, inner: float):
    assert unoverlapped(4, [each] * 4, "eager-opt") == pytest.approx([outer, inner, inner, outer])


@pytest.mark.parametrize(
    ("each", "by_device"),
    # Figure 6, D = N = 6, an iteration of 26. P0: stage 5 at 14, idle 14-16, 18-20, 22-24, stage 0 at 26. P1: stage 4
    # at 18, idle 20-22, stage 1 at 24, idle until 26. P2: stage 3 at 20, stage 2 at 22, idle until 26.
    [
        (3.0, [3.0, 2.0, 2.0]),  # P0: 0 + 3; P1: (3 - 2) + 3 - 2; P2: 3 + 3 - 4
        (7.0, [8.0, 10.0, 10.0]),  # P0: (7 - 6) + 7; P1: (7 - 2) + 7 - 2; P2: 7 + 7 - 4
    ],
)
def test_free_regions_of_figure_6(each: float, by_device: list[float]):
    assert unoverlapped(6, [each] * 6, "eager-opt") == pytest.approx(by_device + by_device[::-1])


def test_a_stage_with_more_weights_and_syncs_that_are_not_eager():
    """Stage 0 takes 5, the others 1. P0 hides that of stage 3 in (a) and has no time left for that of stage 0."""
    seconds = [5.0, 1.0, 1.0, 1.0]
    assert unoverlapped(4, seconds, "eager-opt") == pytest.approx([5, 0, 0, 5])
    # After all else, P0 has no free region at all, and P1 region (c) as before.
    assert unoverlapped(4, seconds, "lazy") == pytest.approx([6, 0, 0, 6])


def costs(depth: int, **changes) -> Costs:
    equal = uniform(build_schedule("chimera", devices=depth, micro_batches=depth))
    return replace(equal, messages=(MessageCost(latency=0.01, forward=0.09, backward=0.05),) * (depth - 1), **changes)


def test_equation_1():
    four = shape("chimera", devices=4, micro_batches=4, options={"sync": "eager-opt"})
    # C_f = 4, C_b = 6, and P1 leaves 6 of two syncs of 4: (1 + 0.1) × 4 + (2 + 0.1) × 6 + 6
    assert chimera_s(four, costs(4, sync=(4.0,) * 4)) == pytest.approx(4.4 + 12.6 + 6)
    # The median stage and B_t = 2 F_t count, whatever the others take: (2 + 0.1) × 4 + (4 + 0.1) × 6.
    uneven = costs(4, forward=(1.0, 2.0, 2.0, 9.0), backward=(5.0,) * 4)
    assert chimera_s(four, uneven) == pytest.approx(2.1 * 4 + 4.1 * 6)
    six = shape("chimera", devices=6, micro_batches=6, options={})  # C_f = 6 and C_b = 10, as the paper says
    assert chimera_s(six, costs(6)) == pytest.approx(1.1 * 6 + 2.1 * 10)
    recomputing = shape("chimera", devices=4, micro_batches=4, options={"recompute": "full"})
    assert chimera_s(recomputing, costs(4)) == pytest.approx(1.1 * 4 + 3.1 * 6)  # B_t = 3 F_t
    again = costs(4, recompute=(0.5, 1.0, 1.0, 9.0))
    assert chimera_s(recomputing, again) == pytest.approx(1.1 * 4 + 3.1 * 6)  # the median recomputation too


def test_doubled_forwards_count_as_two():
    """D = 2, N = 4, two pairs: each device runs a doubled forward of each pipe and four backwards, without idling."""
    doubled = shape("chimera", devices=2, micro_batches=4, options={"scale": "doubling"})
    assert chimera_s(doubled, costs(2)) == pytest.approx(4 * 1.1 + 4 * 2.1)
    halved = shape("chimera", devices=2, micro_batches=2, options={"scale": "halving"})
    assert chimera_s(halved, costs(2)) == pytest.approx(2 * 1.1 + 2 * 2.1)


def test_asynchronous_schedules_are_refused():
    with pytest.raises(PlanError, match="equation 1 describes synchronous schedules; pipedream is asynchronous"):
        chimera_s(shape("pipedream", devices=2, micro_batches=4, options={}), costs(2))


@pytest.mark.parametrize("method", ["chimera", "simulated"])
def test_all_reduce_of_a_stage(method: str):
    """W = 2, D = 4, one device in each node: a stage has 2 W = 4 replicas, and 10⁶ parameters of 4 bytes.

    Rabenseifner: 2 log2(4) α + 2 (3/4) L β = 4 × 5 µs + 1.5 × 4 MB / (10 GB/s) = 20 µs + 600 µs. The ring of
    communication libraries has 2 (r - 1) = 6 latencies in place of 4. The two stages of a device are reduced one after
    the other, so that each has the whole link.
    """
    layers = [Layer(parameters=1e6, flops=4e9, saved=2e6, output=1e5, reductions=2)] * 4
    node = Node(devices=1, accelerator=Accelerator(), outside=Link(latency_s=5e-6, bandwidth=10e9, lanes=1))
    model = CostModel(
        Cluster(nodes=(node,) * 8, device="cuda"),
        TrainingOptions(),
        lambda samples, share: work_of_layers(layers, samples, share.tp, precision="float32"),
        method=method,
    )
    plan = Plan(
        graph="",
        dp=2,
        tp=1,
        pp=4,
        global_batch=8,
        micro_batch_size=1,
        schedule="chimera",
        schedule_options={"sync": "eager-opt"},
        stages=stages_between([0, 1, 2, 3, 4]),
        placement=place_ranks(dp=2, pp=4, tp=1),
        seed=0,
    )
    latencies = 4 if method == "chimera" else 6
    assert model.costs(plan).sync == pytest.approx([latencies * 5e-6 + 600e-6] * 4)
    if method == "chimera":
        forward = model.costs(plan).forward[0]
        message = 5e-6 + 4e5 / (10e9 / 2)  # a node in the middle shares its link between its two neighbours
        outer, inner = max(0, 620e-6 - 3 * forward) + 620e-6, max(0, 2 * 620e-6 - 2 * forward)  # P0 and P1, as above
        by_hand = 4 * (forward + message) + 6 * (2 * forward + message) + max(outer, inner)
        assert model.seconds(plan) == pytest.approx(by_hand + max(model.costs(plan).update))
        assert model.by("simulated").costs(plan).sync == pytest.approx([630e-6] * 4)
