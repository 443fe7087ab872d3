"""A model that is known only by its layers: the size of each layer, and the measured time of its passes.

Passes that were measured at several micro-batch sizes are interpolated. If only the forward of one sample was
measured, it includes launches, arithmetic and, under tensor parallelism, all-reduces. A micro-batch of more samples
takes the device longer but not the host. So a forward takes the longer of its measured time and of the arithmetic and
collectives of all samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from auto3d.cluster import Accelerator
from auto3d.conversions import Collective
from auto3d.cost.tensors import tensors_of_layers
from auto3d.cost.times import Times, before, times_of
from auto3d.cost.work import ALIGNED, PRECISION_BYTES, TensorExchange, Work, repeated_range
from auto3d.errors import InputError

BACKWARD_TRAFFIC = 1.75  # traffic of the backward over the forward's, for the operations of a transformer block

MeasuredLayers = Mapping[tuple[str, int], Sequence[float]]
"""(kind of device, tensor-parallel degree) -> seconds of each layer's forward of one sample."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPasses:
    """Measured seconds of the passes of each layer, [sizes][layers], with launches and tensor-parallel collectives."""

    samples: tuple[int, ...]  # rising micro-batch sizes
    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]

    def interpolate(self, rows: Sequence[Sequence[float]], samples: int) -> np.ndarray:
        """[layers]: seconds of ``samples`` by ``rows``: linear between measured sizes, in proportion above them.

        A layer that is measured alone waits for its launches, which in a training overlap with the layer before. So a
        small micro-batch takes no longer than a larger micro-batch.
        """
        least = np.minimum.accumulate(np.array(rows)[::-1])[::-1]
        beyond = max(1.0, samples / self.samples[-1])
        return beyond * np.array([np.interp(samples, self.samples, seconds) for seconds in least.T])


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: its parameters, and the elements and FLOPs of its forward of one sample."""

    parameters: float = 0.0
    tied: float = 0.0  # additional parameters that the layer shares with the first layer
    flops: float = 0.0
    products: int = 1  # number of matrix products that do these FLOPs
    traffic: float = 0.0  # elements that the forward reads and writes outside of matrix products
    undivided: float = 0.0  # the part of ``traffic`` that tensor parallelism does not divide
    saved: float = 0.0  # elements of the activations kept for the backward
    output: float = 0.0
    reductions: int = 0  # tensor-parallel all-reduces of the output in the forward, and as many in the backward


def work_of_layers(layers: Sequence[Layer], samples: int, tp: int = 1, *, precision: str) -> Work:
    """The work of a micro-batch on one of ``tp`` devices, one position per layer.

    Tensor parallelism divides the layers with parameters or FLOPs, except for ``undivided`` traffic. Launches are zero
    because the measured times include them.
    """
    size = samples * PRECISION_BYTES[precision]

    def column(name: str) -> np.ndarray:
        return np.array([getattr(layer, name) for layer in layers], dtype=float)

    fraction = np.where((column("flops") > 0) | (column("parameters") > 0), 1 / tp, 1.0)
    flops, none = fraction * samples * column("flops"), np.zeros(len(layers))
    traffic = size * (fraction * (column("traffic") - column("undivided")) + column("undivided"))
    crossing = np.concatenate([[0.0], size * column("output")])
    crossing[-1] = 0.0
    products = np.where(flops > 0, column("products"), 0.0)
    exchanges = [
        TensorExchange(
            collective=Collective.ALL_REDUCE,
            position=position,
            before=not forward,
            forward=forward,
            size=size * layer.output,
        )
        for position, layer in enumerate(layers)
        for forward in ([False, True] if layer.flops else [True])
        for _ in range(layer.reductions)
    ]
    return Work(
        flops=flops,
        backward_flops=2 * flops,
        weight_flops=flops,
        float8_flops=none,
        products=products,
        backward_products=2 * products,
        moved=traffic,
        backward_moved=BACKWARD_TRAFFIC * traffic,
        launches=none,
        backward_launches=none,
        alignment=np.full(len(layers), ALIGNED),
        softmaxes=none,
        parameters=fraction * column("parameters"),
        copied=none,
        saved=fraction * size * column("saved"),
        deferred=fraction * size * column("saved"),
        fixed=none,
        working=none,
        blocks=np.where(flops > 0, column("reductions") / 2, 0.0),
        crossing=crossing,
        repeated=repeated_range(
            list(np.flatnonzero(column("reductions"))),
            np.flatnonzero((flops > 0) & (column("reductions") > 0)),
            len(layers),
        ),
        tensors=tensors_of_layers(fraction * size * column("saved"), size * column("output")),
        tied=tuple((fraction[0] * layer.tied, (0, position)) for position, layer in enumerate(layers) if layer.tied),
        shards=tp,
        exchanges=tuple(exchanges) if tp > 1 else (),
    )


def times_of_passes(
    layers: Sequence[Layer],
    measured: Mapping[tuple[str, int], MeasuredPasses],
    samples: int,
    accelerator: Accelerator,
    tp: int,
) -> Times:
    """The measured times of a micro-batch of ``samples`` on one of ``tp`` devices. Half of a backward that computes
    FLOPs is for the gradients of the weights.

    Raises InputError where the layers were not measured on this kind of device at this degree.
    """
    _check_measured(measured, accelerator, tp)
    passes = measured[accelerator.name, tp]
    backward = passes.interpolate(passes.backward, samples)
    none = np.zeros(len(layers) + 1)
    return Times(
        forward=before(passes.interpolate(passes.forward, samples)),
        forward_launch=none,
        backward=before(backward),
        backward_launch=none,
        backward_weight=before(np.where([layer.flops > 0 for layer in layers], backward / 2, 0.0)),
    )


def _check_measured(measured: Mapping[tuple[str, int], object], accelerator: Accelerator, tp: int) -> None:
    if (accelerator.name, tp) not in measured:
        known = ", ".join(f"{name} at tp {degree}" for name, degree in measured)
        raise InputError(
            f"layers: there are no times for {accelerator.name} at tp {tp}, only for {known}; measure them there too, "
            "or choose one of these"
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
    """The times of a micro-batch of ``samples`` on one of ``tp`` devices.

    Raises InputError where the layers were not measured on this kind of device at this degree.
    """
    _check_measured(measured, accelerator, tp)
    measured_s = np.array(measured[accelerator.name, 1])
    work = work_of_layers(layers, 1, precision=precision)
    single, many = (
        times_of(work_of_layers(layers, count, tp, precision=precision), accelerator) for count in (1, samples)
    )
    # The device cannot be busy for longer than the measured time. Where the estimate is longer, scale it down.
    busy = np.diff(times_of(work, accelerator).forward)
    scale = np.minimum(1.0, np.divide(measured_s, busy, out=np.ones_like(busy), where=busy > 0))
    return Times(
        forward=before(scale * np.diff(many.forward)),
        forward_launch=before(np.maximum(measured[accelerator.name, tp], scale * np.diff(single.forward))),
        backward=before(scale * np.diff(many.backward)),
        backward_launch=np.zeros(len(layers) + 1),
        backward_weight=before(scale * np.diff(many.backward_weight)),
    )
