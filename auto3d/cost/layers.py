"""A model that is known by its layers alone: what each holds, and how long its forward was measured to take.

Measured forwards of one sample hold launches, arithmetic and, under tensor parallelism, its all-reduces together. A
micro-batch of more samples takes the device longer but the host as long: so a forward takes as long as it was measured,
or as its arithmetic and its collectives for all samples, whichever is longer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from auto3d.cluster import Accelerator
from auto3d.cost.times import Times, before, times_of
from auto3d.cost.work import PRECISION_BYTES, Work
from auto3d.errors import InputError

BACKWARD_TRAFFIC = 1.75  # of the forward's: what it is for the operations of a transformer's block

MeasuredLayers = Mapping[tuple[str, int], Sequence[float]]
"""(kind of device, tensor-parallel degree) -> seconds of the forward of one sample through each layer."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Elements and FLOPs of one sample; parameters are those of the layer."""

    parameters: float = 0.0
    tied: float = 0.0  # more parameters, which are the first layer's
    flops: float = 0.0
    products: int = 1  # matrix products that these are in
    traffic: float = 0.0  # that its forward reads and writes beside matrix products
    undivided: float = 0.0  # of that, what tensor parallelism does not divide
    saved: float = 0.0
    output: float = 0.0
    reductions: int = 0  # all-reduces of its output under tensor parallelism, in the forward and in the backward


def work_of_layers(layers: Sequence[Layer], samples: int, *, precision: str) -> Work:
    """The work of a micro-batch, with a layer in the place of an operation; launches are in what was measured."""
    size = samples * PRECISION_BYTES[precision]

    def each(name: str) -> np.ndarray:
        return np.array([getattr(layer, name) for layer in layers], dtype=float)

    flops, traffic, none = samples * each("flops"), size * each("traffic"), np.zeros(len(layers))
    reduced = size * each("output") * each("reductions")
    crossing = np.concatenate([[0.0], size * each("output")])
    crossing[-1] = 0.0
    products = np.where(flops > 0, each("products"), 0.0)
    return Work(
        flops=flops,
        backward_flops=2 * flops,
        weight_flops=flops,
        products=products,
        backward_products=2 * products,
        moved=traffic,
        backward_moved=BACKWARD_TRAFFIC * traffic,
        undivided=size * each("undivided"),
        launches=none,
        backward_launches=none,
        softmaxes=none,
        parallel=(each("flops") > 0) | (each("parameters") > 0),
        reduced=reduced,
        backward_reduced=np.where(flops > 0, reduced, 0.0),
        parameters=each("parameters"),
        saved=size * each("saved"),
        deferred=size * each("saved"),
        fixed=none,
        working=none,
        crossing=crossing,
        tied=tuple((layer.tied, (0, place)) for place, layer in enumerate(layers) if layer.tied),
    )


def times_of_layers(
    layers: Sequence[Layer],
    measured: MeasuredLayers,
    samples: int,
    accelerator: Accelerator,
    tp: int,
    *,
    precision: str,
) -> Times:
    """Of a micro-batch on one of ``tp`` devices; raises InputError where none such was measured."""
    if (accelerator.name, tp) not in measured:
        known = ", ".join(f"{name} at tp {degree}" for name, degree in measured)
        raise InputError(f"layers: none were measured on {accelerator.name} at tp {tp}; there are {known}")
    alone = np.array(measured[accelerator.name, 1])
    work = work_of_layers(layers, 1, precision=precision)
    one, many = (
        times_of(work_of_layers(layers, count, precision=precision), accelerator, tp) for count in (1, samples)
    )
    # The device is never busy for longer than was measured: where the estimate says so, it is scaled.
    busy = np.diff(times_of(work, accelerator).forward)
    scale = np.minimum(1.0, np.divide(alone, busy, out=np.ones_like(busy), where=busy > 0))
    return Times(
        forward=before(scale * np.diff(many.forward)),
        forward_launch=before(np.maximum(measured[accelerator.name, tp], scale * np.diff(one.forward))),
        backward=before(scale * np.diff(many.backward)),
        backward_launch=np.zeros(len(layers) + 1),
        backward_weight=before(scale * np.diff(many.backward_weight)),
    )
