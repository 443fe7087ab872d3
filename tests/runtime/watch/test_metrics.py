"""The numbers that users watch equal their closed forms."""

from math import nan

import pytest

from auto3d.cost.throughput import IterationFlops
from auto3d.plan import Plan, StagePlan
from auto3d.runtime.executor import IterationResult
from auto3d.runtime.settings import OptimizerSettings
from auto3d.runtime.watch.metrics import metrics_of
from auto3d.runtime.watch.observer import ObservedOperation
from auto3d.runtime.watch.of_rank import Watched
from auto3d.runtime.watch.slow_data import SlowData, SlowReads
from auto3d.runtime.watch.slow_rank import LEAST_SHARE, SlowRanks, lags_of, medians_of
from auto3d.schedule.operation import Kind, parse

PLAN = Plan(
    graph="",
    dp=2,
    tp=1,
    pp=1,
    global_batch=12,
    micro_batch_size=3,
    schedule="1f1b",
    stages=(StagePlan(operations=((0, 4),)),),
    placement=((0, 1),),
    seed=1,
)


def test_rates_follow_from_seconds_and_flops():
    make = metrics_of(
        PLAN, flops=IterationFlops(model=6e12, recomputed=2e12), tokens_per_sample=100, peak_flops=2e13, emulated=False
    )
    watched = Watched(peak_bytes=7, peak_rank=1)
    for iteration, seconds in enumerate([9.0, 2.0, 2.0]):  # the median hides the first, which is slow
        metrics = make(4 + iteration, IterationResult(1.5, 0.25, False, 1e-3, seconds), watched)
    assert (metrics.iteration, metrics.loss, metrics.learning_rate, metrics.grad_norm) == (7, 1.5, 1e-3, 0.25)
    assert metrics.iteration_s == 2.0
    assert metrics.samples_per_s == 12 / 2
    assert metrics.tokens_per_s == 100 * 12 / 2
    assert metrics.model_flops_per_s_per_device == 6e12 / 2 / 2
    assert metrics.hardware_flops_per_s_per_device == 8e12 / 2 / 2
    assert metrics.mfu == 6e12 / 2 / 2e13
    assert (metrics.peak_bytes, metrics.peak_rank) == (7, 1)


def test_emulated_devices_have_no_loss_and_no_memory():
    make = metrics_of(PLAN, flops=None, tokens_per_sample=0, peak_flops=None, emulated=True)
    metrics = make(0, IterationResult(nan, nan, False, 1e-3, 0.5), Watched(peak_bytes=7, peak_rank=1))
    assert metrics.samples_per_s == 24
    unknown = ("loss", "grad_norm", "tokens_per_s", "model_flops_per_s_per_device", "mfu", "peak_bytes", "peak_rank")
    assert [getattr(metrics, name) for name in unknown] == [None] * len(unknown)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_is_that_of_the_optimizer(schedule):
    import torch

    from auto3d.runtime.optimizer.build import build_optimizer, learning_rate_of

    settings = OptimizerSettings(learning_rate=0.5, learning_rate_schedule=schedule, warmup_iterations=2)
    optimizer, rate = build_optimizer([torch.nn.Parameter(torch.zeros(2))], settings, iterations=7)
    of = learning_rate_of(settings, 7)
    for iteration in range(7):
        assert of(iteration) == optimizer.param_groups[0]["lr"]
        optimizer.step()
        rate.step()


def medians(**seconds: float):
    """Two micro-batches per iteration of the operations F and B of stage 0."""
    return {(0, Kind(kind)): (each, 2.0) for kind, each in seconds.items()}


def test_medians_are_of_one_micro_batch_and_without_waits():
    def observed(text: str, seconds: float, waited: float) -> ObservedOperation:
        return ObservedOperation(parse(text), 1.0, 1.0 + seconds, waited)

    found = medians_of(
        [observed("F0+1@2", 8.0, 2.0), observed("F2+3@2", 4.0, 0.0), observed("B0@2", 5.0, 1.0), observed("U@2", 9, 0)],
        iterations=2,
    )
    assert found == {(2, Kind.FORWARD): (2.5, 2.0), (2, Kind.BACKWARD): (4.0, 0.5)}


def test_a_lag_is_the_ratio_to_the_median_of_the_others():
    ranks = [medians(F=1.0, B=2.0), medians(F=1.0, B=2.0), medians(F=1.3, B=3.0), {(1, Kind.FORWARD): (9.0, 2.0)}]
    assert lags_of(ranks, 10.0) == {2: (0, Kind.BACKWARD, 1.5)}, "the last rank alone runs its stage"
    assert lags_of(ranks, 2.01 / LEAST_SHARE) == {}, "two micro-batches lose a second each: less than the least share"


def test_stages_wait_for_data_after_two_windows_until_they_do_not():
    reads = SlowReads(["a", "b"])
    said = [reads.after(read_s, 2.0) for read_s in ([0.1, 0.3], [0.5, 0.3], [0.2, 0.2], [0, 0.3], [0, 0.3], [0, 1.0])]
    assert said == [None, SlowData(0, "a", 0.25), None, None, SlowData(1, "b", 0.15), SlowData(1, "b", 0.5)]


def test_a_rank_is_slow_after_two_windows_until_it_has_recovered():
    slow = SlowRanks(["a", "b"])
    lag, less = {1: (0, Kind.FORWARD, 1.5)}, {1: (0, Kind.FORWARD, 1.15)}
    named = [[each.rank for each in slow.after(lags)] for lags in (lag, {}, lag, lag, less, {}, less, less)]
    assert named == [[], [], [], [1], [1], [], [], []]
