"""What other systems spend beside the operators of a model, against numbers worked by hand."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from auto3d.cluster import Accelerator, Cluster, Link, Node, place_ranks
from auto3d.cost.layers import Layer, MeasuredPasses, times_of_passes, work_of_layers
from auto3d.cost.model import CostModel
from auto3d.cost.system_times import SystemTimes
from auto3d.cost.training_options import TrainingOptions
from auto3d.errors import InputError
from auto3d.plan import Plan, stages_between

LAYERS = [Layer(parameters=3e6, output=1.0), Layer(parameters=1e6, flops=4e9, products=1, output=1.0)]
DEVICE = Accelerator(memory_bandwidth=1e9, memory_efficiency=1.0, launch_s=0.0)
LINK = Link(latency_s=0.0, bandwidth=1e9)


def model(times: SystemTimes, **device) -> CostModel:
    node = Node(devices=2, accelerator=replace(DEVICE, **device), inside=LINK, outside=LINK)
    return CostModel(
        Cluster(nodes=(node, node), device="cuda"),
        TrainingOptions(times=times),
        lambda samples, share: work_of_layers(LAYERS, samples, share.tp, precision="float32"),
    )


def plan(**changes) -> Plan:
    values = {"dp": 2, "tp": 1, "pp": 1, "schedule": "1f1b"} | changes
    return Plan(
        graph="",
        global_batch=4,
        micro_batch_size=1,
        schedule_options={},
        stages=stages_between([0, 2] if values["pp"] == 1 else [0, 1, 2]),
        placement=place_ranks(dp=values["dp"], pp=values["pp"], tp=values["tp"]),
        seed=1,
        **values,
    )


def test_gradients_are_added_to_their_buffers_after_each_backward():
    """4 million parameters of 10 bytes at 1 GB/s: 40 ms, in the half of the backward that computes their gradients."""
    own, other = (model(SystemTimes(accumulated_bytes=each)).costs(plan()) for each in (0.0, 10.0))
    assert other.backward[0] - own.backward[0] == pytest.approx(0.04)
    assert other.backward_input == pytest.approx(own.backward_input)
    assert other.forward == own.forward


def test_without_a_reduce_scatter_zero_1_sums_all_gradients():
    """16 MB on a ring of two at 1 GB/s: 16 ms for all gradients, half of that for the sum of a shard."""
    seconds = [
        model(SystemTimes(reduce_shards=reduce)).costs(plan(shard_optimizer=True)).sync[0] for reduce in (True, False)
    ]
    assert seconds == pytest.approx([0.008, 0.016])


def test_the_last_backward_hides_gradient_sums_but_for_the_gradients_that_come_last():
    """The first layer, with three quarters of the parameters, has its gradients at the end of the backward."""
    times = SystemTimes(sync_in_backward=True)
    long, short = (model(times, peak_flops=peak) for peak in (1e10, 20e12))
    assert long.costs(plan()).sync[0] == pytest.approx(0.75 * 0.016)
    assert long.costs(plan(shard_optimizer=True)).sync[0] == pytest.approx(0.008), "ZeRO-1 sums after the backward"
    found = short.costs(plan())
    assert found.backward[0] < 0.001
    assert found.sync[0] == pytest.approx(0.016 - found.backward[0])


def test_a_system_that_hides_sharded_sums_exposes_those_of_a_stage_s_first_operation():
    """8 ms for the reduce-scatter and for the all-gather of 16 MB; three quarters of the parameters are the first's."""
    long, short = (model(SystemTimes(hides_sharded_sums=True), peak_flops=peak) for peak in (1e10, 20e12))
    plain = model(SystemTimes(), peak_flops=1e10).costs(plan(shard_optimizer=True))
    found = long.costs(plan(shard_optimizer=True))
    assert (plain.sync[0], found.sync[0]) == pytest.approx((0.008, 0.75 * 0.008))
    assert plain.update[0] - found.update[0] == pytest.approx(0.25 * 0.008)
    assert long.costs(plan()).sync[0] == pytest.approx(0.016), "without ZeRO-1 another figure hides them"
    little = short.costs(plan(shard_optimizer=True))
    assert little.sync[0] == pytest.approx(0.008 - little.backward[0])


def test_a_system_that_hides_collectives_exposes_one_piece_of_each():
    """An all-reduce of 4 bytes of 1 sample among two ranks: pieces of half its size, beside long or little compute."""
    layers = [Layer(parameters=1.0, flops=1e9, products=0, output=1e8, reductions=1)]

    def forward(hides: bool, peak: float) -> float:
        found = model(SystemTimes(hides_collectives=hides), peak_flops=peak, matrix_efficiency=1.0)
        costs = CostModel(
            found.cluster,
            found.training,
            lambda samples, share: work_of_layers(layers, samples, share.tp, precision="float32"),
        ).costs(Plan(**(vars(plan(dp=1, tp=2)) | {"stages": stages_between([0, 1])})))
        return costs.forward[0]

    exchanged = forward(False, 1e30)
    compute = forward(False, 1e9) - exchanged
    assert compute == pytest.approx(0.5), "half of the FLOPs on each rank"
    assert forward(True, 1e9) == pytest.approx(compute + exchanged / 2)
    assert forward(True, 1e30) == pytest.approx(exchanged), "no compute hides a piece"


def test_an_update_moves_bytes_of_all_parameters_of_a_rank():
    """16 bytes of each of 4 million parameters at 1 GB/s, whatever the shard."""
    for shard in (False, True):
        own, other = (
            model(SystemTimes(whole_update_bytes=each)).costs(plan(shard_optimizer=shard)).update[0]
            for each in (0.0, 16.0)
        )
        assert other - own == pytest.approx(0.064)


def test_pipelines_across_nodes_wait_longer_for_the_ranks_of_a_collective():
    """Two collectives with one other rank wait 1 s each, but only where the stages are on two nodes."""
    layers = [Layer(parameters=1.0, flops=1.0, output=1.0, reductions=1)] * 2
    waiting = model(SystemTimes(), collective_launch_s=0.0, crossing_launch_s=1.0)
    found = CostModel(
        waiting.cluster,
        waiting.training,
        lambda samples, share: work_of_layers(layers, samples, share.tp, precision="float32"),
    )
    inside, across = (found.costs(plan(dp=1, tp=2, pp=pp)).forward for pp in (1, 2))
    assert sum(inside) < 0.1
    assert across == pytest.approx((1.0, 1.0), rel=0.1)


def test_measured_passes_are_interpolated_and_do_not_shrink_with_the_micro_batch():
    passes = MeasuredPasses(
        samples=(1, 2, 4), forward=((5.0, 1.0), (3.0, 2.0), (4.0, 3.0)), backward=((2.0, 2.0), (2.0, 4.0), (2.0, 8.0))
    )
    assert passes.interpolate(passes.forward, 1).tolist() == [3.0, 1.0], "one sample takes no longer than two"
    assert passes.interpolate(passes.forward, 3).tolist() == [3.5, 2.5]
    assert passes.interpolate(passes.forward, 8).tolist() == [8.0, 6.0]
    times = times_of_passes(LAYERS, {("device", 1): passes}, 4, DEVICE, 1)
    assert np.diff(times.backward_weight).tolist() == [0.0, 4.0], "half of a backward that computes FLOPs"
    with pytest.raises(InputError, match="no times for device at tp 2, only for device at tp 1"):
        times_of_passes(LAYERS, {("device", 1): passes}, 4, DEVICE, 2)


def zero_1(times: SystemTimes, layers: list[Layer], **changes) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of each stage's sum, and of its update, of two stages under ZeRO-1: 16 ns for each parameter updated."""
    made = model(times, update_s=16e-9)
    work = partial(work_of_layers, layers, precision="float32")
    found = CostModel(made.cluster, made.training, lambda samples, share: work(samples, share.tp))
    costs = found.costs(plan(pp=2, shard_optimizer=True, **changes))
    return costs.sync, costs.update


def test_a_tied_weight_is_reduce_scattered_and_gathered_once_among_all_its_holders():
    """2 million parameters of the first stage, 1 million of the second and 1 million of both, of 4 bytes at 1 GB/s.

    Two ranks scatter 4 ms of the first stage's and 2 ms of the second's, four ranks 3 ms of the tied one; the gathers
    take as long. A rank updates a half of its stage's parameters and a quarter of the tied one. A system
    that sums it apart scatters it in both stages, and then all-reduces it among two ranks, in 4 ms.
    """
    layers = [LAYERS[0], replace(LAYERS[1], tied=1e6)]
    sync, update = zero_1(SystemTimes(tied_apart=False), layers)
    assert sync == pytest.approx((0.004, 0.005))
    assert update == pytest.approx((1.25 * 0.016 + 0.004, 0.75 * 0.016 + 0.005))
    sync, update = zero_1(SystemTimes(), layers)
    assert sync == pytest.approx((0.006, 0.004 + 0.004))
    assert update == pytest.approx((1.5 * 0.016 + 0.006, 0.016 + 0.004))


def test_both_devices_of_a_stage_on_two_pipes_gather_its_weights():
    """12 and 4 MB, of which each of two ranks has scattered, updates and gathers a half."""
    sync, update = zero_1(SystemTimes(), LAYERS, dp=1, schedule="chimera")
    assert sync == pytest.approx((0.006, 0.002))
    assert update == pytest.approx((1.5 * 0.016 + 0.006, 0.5 * 0.016 + 0.002))
