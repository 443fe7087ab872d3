"""Work -> seconds on a kind of device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from auto3d.cluster import Accelerator
from auto3d.conversions import Collective
from auto3d.cost.work import ALIGNED, Work
from auto3d.share import Share

# Megatron-LM's fused softmax needs a number of matrices per rank that divides by 4. Otherwise four more kernels run:
# the casts to and from 32 bits, the scale and the mask (is_kernel_available in its fused_softmax.py).
SOFTMAX_MULTIPLE, SOFTMAX_KERNELS = 4, 4


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of all operations before each position, so that the seconds of a range are a difference of two entries.

    An operation keeps the device busy, and its launch keeps the host busy. The host runs ahead of the device, so a
    stage takes the longer of the two sums: small layers are bound by launches.
    """

    forward: np.ndarray
    forward_launch: np.ndarray
    backward: np.ndarray
    backward_launch: np.ndarray
    backward_weight: np.ndarray  # the part of ``backward`` in which the device computes gradients of weights
    table: np.ndarray = field(init=False, repr=False)  # [5, operations + 1]: the five arrays above, in their order

    def range(self, first: int, last: int) -> np.ndarray:
        """[5]: the seconds of the operations ``first`` to ``last`` - 1, in the order of ``table``."""
        return self.table[:, last] - self.table[:, first]

    def __post_init__(self) -> None:
        rows = (self.forward, self.forward_launch, self.backward, self.backward_launch, self.backward_weight)
        object.__setattr__(self, "table", np.stack(rows))


TimesOf = Callable[[int, Accelerator, Share], Times]
"""Arguments: samples, kind of device, and the share of the work that an operation does."""

TimesOfWork = Callable[[Work, Sequence[int], int, Accelerator], Times]
"""Arguments: the work of the whole model, the bounds of its subgraphs, samples, kind of device."""


def times_of(work: Work, accelerator: Accelerator) -> Times:
    """The seconds of ``work`` on one device, without the seconds of the collectives themselves."""
    rates = _rates(work.alignment, accelerator)
    if work.float8_flops.any():
        assert accelerator.float8_flops is not None, "a recipe whose accelerator has no such peak is refused"
        rates = np.where(work.float8_flops > 0, accelerator.float8_flops * accelerator.matrix_efficiency, rates)
    small = accelerator.half_flops / _aligned_rate(accelerator)  # seconds that each product takes in addition
    bandwidth = accelerator.memory_bandwidth * accelerator.memory_efficiency

    backward_rates = rates * work.backward_rate

    def busy(flops: np.ndarray, products: np.ndarray, moved: np.ndarray, rates: np.ndarray = rates) -> np.ndarray:
        return flops / rates + products * small + moved / bandwidth

    unfused = work.softmaxes % SOFTMAX_MULTIPLE != 0

    def launched(launches: np.ndarray, exchanges: Mapping[tuple[Collective, float], np.ndarray]) -> np.ndarray:
        collectives = sum(exchanges.values(), start=np.zeros(len(work)))
        kernels = launches + SOFTMAX_KERNELS * unfused
        return kernels * accelerator.launch_s + collectives * (work.shards - 1) * accelerator.collective_launch_s

    return Times(
        forward=before(busy(work.flops, work.products, work.moved)),
        forward_launch=before(launched(work.launches, work.exchanges_of[0])),
        backward=before(busy(work.backward_flops, work.backward_products, work.backward_moved, backward_rates)),
        backward_launch=before(launched(work.backward_launches, work.exchanges_of[1])),
        backward_weight=before(work.weight_flops / backward_rates + (work.weight_flops > 0) * small),
    )


def _aligned_rate(accelerator: Accelerator) -> float:
    return accelerator.peak_flops * accelerator.matrix_efficiency


def _rates(alignment: np.ndarray, accelerator: Accelerator) -> np.ndarray:
    """FLOP/s of large products of each operation."""
    aligned = _aligned_rate(accelerator)
    rates = np.full(len(alignment), aligned)
    for size, rate in sorted(accelerator.unaligned):
        rates[(alignment >= size) & (alignment < ALIGNED)] = min(rate, aligned)
    return rates


def before(values: np.ndarray | Sequence[float]) -> np.ndarray:
    """Entry i is the sum of ``values[:i]``; the result has one entry more than ``values``."""
    return np.concatenate([[0.0], np.cumsum(values)])
