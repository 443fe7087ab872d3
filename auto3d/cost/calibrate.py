"""Fit the few physical parameters of a cluster to measured iterations, and say how far off they are.

The parameters are those of its kind of device and of its links; each is the same for all iterations. Fitted is the
logarithm of predicted to measured, so that short iterations count as much as long ones, with a loss that outliers do
not rule. Scored is by cross-validation: no iteration is predicted by parameters that it took part in fitting.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from auto3d.cluster import Accelerator, Cluster, Link
from auto3d.cost.model import CostModel
from auto3d.errors import InputError
from auto3d.plan import Plan

OUTLIER = 0.02  # of the logarithm: beyond this an error counts less than its square
SAMPLE = 240  # iterations that a fit looks at; more tell little more, and take longer
STEP = 1e-3  # of a logarithm, for the slope

# What may be fitted, between which bounds: fields of Accelerator, and of the links.
BOUNDS: dict[str, tuple[float, float]] = {
    "matrix_efficiency": (0.1, 0.8),  # what large products sustain on devices whose power is limited
    "half_flops": (1e7, 1e12),
    "memory_efficiency": (0.1, 1.0),
    "launch_s": (1e-7, 1e-2),
    "collective_launch_s": (1e-7, 1e-2),
    "micro_batch_s": (1e-6, 1.0),
    "iteration_s": (1e-6, 10.0),
    "inside.latency_s": (1e-8, 1e-2),
    "inside.bandwidth": (1e7, 1e12),
    "outside.latency_s": (1e-8, 1e-1),
    "outside.bandwidth": (1e6, 1e12),
}

# Fitted where nothing else is said: what iterations inside a node tell of. Bandwidths are better measured themselves.
COMPUTE = (
    "matrix_efficiency", "half_flops", "memory_efficiency", "launch_s", "collective_launch_s", "micro_batch_s",
    "iteration_s", "inside.latency_s",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MeasuredIteration:
    """An iteration of ``plan`` on the cluster of ``model``, and the seconds that it took."""

    model: CostModel
    plan: Plan
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    parameters: dict[str, float]  # in seconds, bytes per second, FLOPs and shares
    errors: tuple[float, ...]  # of each iteration, cross-validated: predicted / measured - 1

    @property
    def mean_error(self) -> float:
        return float(np.mean(np.abs(self.errors)))


def calibrate(
    iterations: Sequence[MeasuredIteration],
    names: Sequence[str],
    *,
    folds: int = 5,
    seed: int = 1,
    progress: Callable[[str], None] = lambda words: None,
) -> Calibration:
    """Fit the parameters ``names`` to all ``iterations``; cross-validate them in ``folds`` parts.

    Raises InputError where a name is not known, or where there are fewer iterations than parameters in a fold.
    """
    for name in names:
        if name not in BOUNDS:
            raise InputError(f"parameter {name!r} is not known; there are {', '.join(BOUNDS)}")
    order = list(range(len(iterations)))
    random.Random(seed).shuffle(order)
    parts = [order[fold::folds] for fold in range(folds)]
    if len(iterations) - max(map(len, parts)) < 2 * len(names):
        raise InputError(f"{len(iterations)} iterations are too few to fit {len(names)} parameters in {folds} parts")
    errors = [0.0] * len(iterations)
    for fold, part in enumerate(parts):
        progress(f"part {fold + 1} of {folds}")
        rest = [iterations[index] for index in order if index not in set(part)]
        found = fit(rest, names)
        for index, error in zip(part, _errors([iterations[index] for index in part], found), strict=True):
            errors[index] = error
    progress("all")
    return Calibration(parameters=fit([iterations[index] for index in order], names), errors=tuple(errors))


def fit(iterations: Sequence[MeasuredIteration], names: Sequence[str]) -> dict[str, float]:
    """The parameters under which ``iterations`` are predicted best, from those of their cluster on."""
    few = iterations[:: max(1, len(iterations) // SAMPLE)]
    start = np.log([np.clip(_present(few[0].model.cluster, name), *BOUNDS[name]) for name in names])
    low, high = (np.log([BOUNDS[name][side] for name in names]) for side in (0, 1))

    def residuals(values: np.ndarray) -> np.ndarray:
        return np.log1p(_errors(few, dict(zip(names, np.exp(values), strict=True))))

    margin = 1e-6 * (high - low)
    found = least_squares(
        residuals,
        np.clip(start, low + margin, high - margin),
        bounds=(low, high),
        loss="soft_l1",
        f_scale=OUTLIER,
        diff_step=STEP,
        x_scale=0.3,
        max_nfev=30,
    )
    return dict(zip(names, map(float, np.exp(found.x)), strict=True))


def with_parameters(cluster: Cluster, parameters: Mapping[str, float]) -> Cluster:
    """``cluster`` with these in place of its own, on every node."""
    device = {name: value for name, value in parameters.items() if "." not in name}

    def link(present: Link | None, which: str) -> Link | None:
        own = {name.split(".")[1]: value for name, value in parameters.items() if name.startswith(f"{which}.")}
        return present if present is None else replace(present, **own)

    nodes = tuple(
        replace(
            node,
            accelerator=replace(node.accelerator, **device),
            inside=link(node.inside, "inside"),
            outside=link(node.outside, "outside"),
        )
        for node in cluster.nodes
    )
    return Cluster(nodes=nodes, device=cluster.device)


def _present(cluster: Cluster, name: str) -> float:
    group, _, field = name.rpartition(".")
    holder: Accelerator | Link = getattr(cluster.nodes[0], group) if group else cluster.nodes[0].accelerator
    return getattr(holder, field or name)


def _errors(iterations: Sequence[MeasuredIteration], parameters: Mapping[str, float]) -> list[float]:
    models: dict[int, CostModel] = {}
    found = []
    for one in iterations:
        if id(one.model) not in models:
            models[id(one.model)] = one.model.on(with_parameters(one.model.cluster, parameters))
        found.append(models[id(one.model)].seconds(one.plan) / one.seconds - 1)
    return found
