"""No plan is faster than its hosts, by hand: passes of 30 launches of 60 µs, and 154 µs for each operation."""

from dataclasses import replace

import numpy as np
import pytest

from auto3d.cluster import Accelerator, Cluster, Link, Node, place_ranks
from auto3d.cost.layers import Layer, work_of_layers
from auto3d.cost.model import CostModel
from auto3d.cost.system_times import OWN
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import Work
from auto3d.plan import Plan, stages_between
from auto3d.share import Share

LAUNCHES, LAUNCH_S, COLLECTIVE_LAUNCH_S = 30, 60e-6, 10e-6
LAYERS = [Layer(flops=1e9, output=1e4, reductions=2)] * 4
DEVICE = Accelerator(
    peak_flops=1e12,  # 1 ms for the forward of a layer and a sample, 2 ms for its backward
    matrix_efficiency=1.0,
    half_flops=0.0,
    launch_s=LAUNCH_S,
    collective_launch_s=COLLECTIVE_LAUNCH_S,
    operation_s=OWN.operation_s or 0.0,
)


def work(samples: int, share: Share) -> Work:
    found, each = work_of_layers(LAYERS, samples, share.tp, precision="float32"), np.full(len(LAYERS), LAUNCHES)
    return replace(found, launches=each, backward_launches=2 * each)


def model(device: Accelerator = DEVICE) -> CostModel:
    node = Node(devices=8, accelerator=device, inside=Link(latency_s=0.0, bandwidth=1e15))
    return CostModel(Cluster(nodes=(node,), device="cuda"), TrainingOptions(), work)


def plan(**changes) -> Plan:
    sizes = {"dp": 1, "tp": 1, "pp": 1, "micro_batch_size": 1} | changes
    return Plan(
        graph="",
        global_batch=16,
        schedule="1f1b",
        schedule_options={},
        stages=stages_between([0, 4] if sizes["pp"] == 1 else [0, 2, 4]),
        placement=place_ranks(**{name: sizes[name] for name in ("dp", "pp", "tp")}),
        seed=1,
        **sizes,
    )


@pytest.mark.parametrize(("tp", "micro_batch", "pp"), [(1, 1, 1), (8, 1, 1), (4, 2, 2), (1, 4, 2), (1, 1, 2)])
def test_a_pass_takes_the_longer_of_device_and_host(tp: int, micro_batch: int, pp: int):
    """A stage of n layers: n ms a sample over tp devices, or n × 30 launches with 2 n collectives, and an operation.

    A backward has twice the arithmetic and twice the launches, but no more collectives.
    """
    layers = 4 // pp
    found = model().costs(plan(tp=tp, micro_batch_size=micro_batch, pp=pp))
    for seconds, passes in ((found.forward[0], 1), (found.backward[0], 2)):
        device = passes * layers * micro_batch * 1e-3 / tp
        host = layers * (passes * LAUNCHES * LAUNCH_S + 2 * (tp - 1) * COLLECTIVE_LAUNCH_S) + 154e-6
        assert seconds == pytest.approx(max(device, host), rel=1e-3)


def test_eight_tensor_parallel_devices_do_not_help_a_host():
    """Eight samples on eight devices: each alone, or one after the other on all of them, with 1/8 of the arithmetic.

    Both wait for the hosts: 12 × 30 × 60 µs and 2 × 154 µs of a micro-batch, against 12 ms on the device alone.
    """
    apart, together = (model().seconds(plan(**degrees)) for degrees in ({"dp": 8}, {"tp": 8}))
    assert apart == pytest.approx(2 * (12 * LAUNCHES * LAUNCH_S + 2 * 154e-6), rel=0.01)
    assert together > 8 * apart
    fast = model(DEVICE.without_host())
    assert fast.seconds(plan(tp=8)) == pytest.approx(fast.seconds(plan(dp=8)), rel=0.01)


def test_an_estimate_says_how_long_the_host_makes_the_device_wait():
    """Two micro-batches on each of eight devices: 12 ms of compute each, the rest of 21.9 ms is the host's."""
    bound = model().estimate(plan(dp=8))
    assert bound.compute_s == pytest.approx(2 * 12e-3, rel=1e-3)
    assert bound.host_s == pytest.approx(2 * (12 * LAUNCHES * LAUNCH_S + 2 * 154e-6 - 12e-3), rel=1e-3)
    parts = (bound.compute_s, bound.host_s, bound.bubble_s, bound.tensor_s, bound.message_s, bound.sync_s)
    assert sum(parts) + bound.update_s == pytest.approx(bound.seconds)
    assert model().estimate(plan(dp=8, micro_batch_size=2)).host_s == 0, "the device is the slower one"
