"""Work -> seconds on a kind of device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from auto3d.cluster import Accelerator
from auto3d.cost.work import Work

# Megatron-LM's fused softmax takes a number of matrices on each rank that divides by 4, and has four kernels more
# elsewhere: to and from 32 bits, the scale and the mask (its fused_softmax.py, is_kernel_available).
SOFTMAX_MULTIPLE, SOFTMAX_KERNELS = 4, 4


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that operations keep a device busy, and that their launches take its host: sums over all operations
    before each position, so that those of a range are a difference.

    The host runs ahead of the device, so a stage takes the longer of the two (``longer``): small layers are bound by
    launches.
    """

    forward: np.ndarray
    forward_launch: np.ndarray
    backward: np.ndarray
    backward_launch: np.ndarray
    backward_weight: np.ndarray  # of the backward, what the gradients of weights keep the device busy

    def range(self, first: int, last: int) -> np.ndarray:
        """These five, of the operations from ``first`` to before ``last``."""
        return self.table[:, last] - self.table[:, first]

    def __post_init__(self) -> None:
        rows = (self.forward, self.forward_launch, self.backward, self.backward_launch, self.backward_weight)
        object.__setattr__(self, "table", np.stack(rows))


def times_of(work: Work, accelerator: Accelerator, tp: int = 1) -> Times:
    """Of ``work`` on one of ``tp`` tensor-parallel devices, without the time of the collectives themselves."""
    share = np.where(work.parallel, 1 / tp, 1.0)
    rate = accelerator.peak_flops * accelerator.matrix_efficiency
    bandwidth = accelerator.memory_bandwidth * accelerator.memory_efficiency

    def busy(flops: np.ndarray, products: np.ndarray, moved: np.ndarray) -> np.ndarray:
        undivided = np.divide(work.undivided, work.moved, out=np.zeros(len(work)), where=work.moved > 0)
        moved = (share * (1 - undivided) + undivided) * moved
        return (share * flops + products * accelerator.half_flops) / rate + moved / bandwidth

    unfused = (work.softmaxes // tp) % SOFTMAX_MULTIPLE != 0

    def launched(launches: np.ndarray, reduced: np.ndarray) -> np.ndarray:
        kernels = launches + SOFTMAX_KERNELS * unfused
        return kernels * accelerator.launch_s + (reduced > 0) * (tp - 1) * accelerator.collective_launch_s

    return Times(
        forward=before(busy(work.flops, work.products, work.moved)),
        forward_launch=before(launched(work.launches, work.reduced)),
        backward=before(busy(work.backward_flops, work.backward_products, work.backward_moved)),
        backward_launch=before(launched(work.backward_launches, work.backward_reduced)),
        backward_weight=before((share * work.weight_flops + (work.weight_flops > 0) * accelerator.half_flops) / rate),
    )


def before(values: np.ndarray | Sequence[float]) -> np.ndarray:
    """Entry i is the sum of all before i; one longer than ``values``."""
    return np.concatenate([[0.0], np.cumsum(values)])
