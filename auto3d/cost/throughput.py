"""Throughput as papers print it: samples, tokens and FLOPs per second, and the part of the devices' peak that is used.

docs/cost.md defines these figures. FLOPs are counted in matrix products and convolutions, as in a Graph; a product of
[m, k] and [k, n] has 2 m k n FLOPs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from auto3d.capture.graph import Graph
from auto3d.cluster import Cluster
from auto3d.cost.tables import without
from auto3d.plan import Plan, StagePlan
from auto3d.schedule import samples_at_once
from auto3d.schedule.shape import shape_of


@dataclass(frozen=True, kw_only=True)
class IterationFlops:
    """FLOPs of one iteration, over the whole global batch and all devices."""

    model: float  # the forward and the backward of each sample
    recomputed: float = 0.0  # forwards that the Plan runs a second time

    @property
    def hardware(self) -> float:
        """FLOPs that the devices compute: the model's and the recomputed FLOPs."""
        return self.model + self.recomputed


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Rates of a training. What is not known is None."""

    samples_per_s: float
    tokens_per_s: float | None
    model_flops_per_s: float | None  # per device
    hardware_flops_per_s: float | None  # per device, with recomputation
    mfu: float | None  # model FLOPs utilisation: fraction of the devices' peak, without recomputation
    hfu: float | None  # hardware FLOPs utilisation: fraction of the devices' peak, with recomputation


def throughput(
    plan: Plan,
    iteration_s: float,
    *,
    flops: IterationFlops | None = None,
    tokens_per_sample: int = 0,
    peak_flops: float | None = None,
) -> Throughput:
    """The throughput of a training under ``plan`` whose iterations take ``iteration_s`` seconds.

    ``tokens_per_sample`` is 0 for a model that reads no tokens. ``peak_flops`` is the sum of the peaks of the plan's
    devices per second, in the precision of the training (``peak_flops_of``); None where a peak is not known.
    """
    samples_per_s = plan.global_batch / iteration_s
    rates: dict[str, float | None] = dict.fromkeys(("model_flops_per_s", "hardware_flops_per_s", "mfu", "hfu"))
    if flops is not None:
        rates["model_flops_per_s"] = flops.model / iteration_s / plan.ranks
        rates["hardware_flops_per_s"] = flops.hardware / iteration_s / plan.ranks
        if peak_flops is not None:
            rates["mfu"] = flops.model / iteration_s / peak_flops
            rates["hfu"] = flops.hardware / iteration_s / peak_flops
    return Throughput(
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * tokens_per_sample if tokens_per_sample else None,
        **rates,
    )


def peak_flops_of(plan: Plan, cluster: Cluster) -> float:
    """Sum of the peaks of the devices that ``plan`` uses, in FLOPs per second.

    An Accelerator that nobody described has a peak too, a round figure: the caller knows whether devices were
    described.
    """
    return sum(cluster.accelerator(rank).peak_flops for mesh in plan.meshes for rank in mesh.ranks)


def flops_of_graph(plan: Plan, graph: Graph) -> IterationFlops:
    """The FLOPs of an iteration of ``plan``; ``graph`` is its model at the samples that one operation runs.

    Operations that depend only on inputs, such as masks, do not count.
    """
    forward = [0 if node.from_inputs else node.flops for node in graph.nodes]
    backward = [0 if node.from_inputs else node.backward_flops for node in graph.nodes]
    return iteration_flops(plan, forward, backward)


def iteration_flops(
    plan: Plan,
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    kept: Callable[[StagePlan], Sequence[tuple[int, int]]] = lambda stage: stage.kept,
) -> IterationFlops:
    """The FLOPs of an iteration of ``plan``, from the FLOPs of each operation of the model without tensor parallelism.

    ``forward`` and ``backward`` are for ``samples_at_once(plan)`` samples. ``kept`` gives the operations of a
    stage that are not recomputed where the stage recomputes.
    """
    passes = plan.global_batch / samples_at_once(plan)
    again = [
        span
        for number in shape_of(plan).recompute
        for span in without(plan.stages[number].operations, kept(plan.stages[number]))
    ]
    return IterationFlops(
        model=passes * float(sum(forward) + sum(backward)),
        recomputed=passes * float(sum(sum(forward[first:last]) for first, last in again)),
    )
