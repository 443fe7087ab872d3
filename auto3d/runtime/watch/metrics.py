"""The numbers that users watch, of one iteration: one record, made once, which every outlet shows."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from auto3d.cost.throughput import IterationFlops, throughput
from auto3d.plan import Plan
from auto3d.runtime.executor import IterationResult
from auto3d.runtime.watch.of_rank import Watched
from auto3d.runtime.watch.slow_data import SlowData
from auto3d.runtime.watch.slow_rank import SlowRank

RUNNING = 10  # iterations whose median time the rates are of, so that one slow iteration does not hide them


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is known after one iteration. None: not known, or not computed, as on emulated devices."""

    iteration: int  # from 1, counted through all runs of the training
    loss: float | None
    learning_rate: float
    grad_norm: float | None
    iteration_s: float  # time of this iteration on rank 0
    samples_per_s: float  # this and the following: at the median time of the last RUNNING iterations
    tokens_per_s: float | None
    model_flops_per_s_per_device: float | None
    hardware_flops_per_s_per_device: float | None  # with recomputation
    mfu: float | None
    peak_bytes: int | None  # largest peak memory of a rank so far
    peak_rank: int | None  # the rank that has it
    slow: tuple[SlowRank, ...] = ()
    slow_data: SlowData | None = None  # the rank that waits longest for data, if it waits long


def metrics_of(
    plan: Plan, *, flops: IterationFlops | None, tokens_per_sample: int, peak_flops: float | None, emulated: bool
) -> Callable[[int, IterationResult, Watched], Metrics]:
    """A function that makes the Metrics of each iteration (number from 0) of one run, in order.

    The arguments are as for ``auto3d.cost.throughput.throughput``; nothing computes on ``emulated`` devices.
    """
    recent: deque[float] = deque(maxlen=RUNNING)

    def make(iteration: int, result: IterationResult, watched: Watched) -> Metrics:
        recent.append(result.seconds)
        rates = throughput(
            plan, median(recent), flops=flops, tokens_per_sample=tokens_per_sample, peak_flops=peak_flops
        )
        return Metrics(
            iteration=iteration + 1,
            loss=None if emulated else result.loss,
            learning_rate=result.learning_rate,
            grad_norm=None if emulated else result.grad_norm,
            iteration_s=result.seconds,
            samples_per_s=rates.samples_per_s,
            tokens_per_s=rates.tokens_per_s,
            model_flops_per_s_per_device=rates.model_flops_per_s,
            hardware_flops_per_s_per_device=rates.hardware_flops_per_s,
            mfu=rates.mfu,
            peak_bytes=None if emulated else watched.peak_bytes,
            peak_rank=None if emulated else watched.peak_rank,
            slow=watched.slow,
            slow_data=watched.slow_data,
        )

    return make
