"""Fit the few physical parameters of a cluster to measured iterations, and report the remaining error.

The parameters are fields of its kind of device and of its links, each with one value for all iterations. The fit
minimises the logarithm of predicted over measured time, so that short iterations count as much as long ones, with a
loss that limits the influence of outliers. The error is cross-validated: no iteration is predicted by parameters that
were fitted to it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from auto3d.cluster import Accelerator, Cluster, Link
from auto3d.cost.model import CostModel
from auto3d.errors import InputError
from auto3d.plan import Plan

OUTLIER = 0.02  # error of the logarithm beyond which it counts less than its square
SAMPLE = 240  # iterations that one fit uses; more take longer and hardly improve it
STEP = 1e-3  # difference of a parameter's logarithm from which the slope is computed

# Parameters that can be fitted, with their bounds: fields of Accelerator, and of the links.
BOUNDS: dict[str, tuple[float, float]] = {
    "matrix_efficiency": (0.1, 0.8),  # the upper bound is what large products sustain on devices of limited power
    "half_flops": (1e7, 1e12),
    "memory_efficiency": (0.1, 1.0),
    "launch_s": (1e-7, 1e-2),
    "collective_launch_s": (1e-7, 1e-2),
    "crossing_launch_s": (1e-7, 1e-2),
    "micro_batch_s": (1e-6, 1.0),
    "iteration_s": (1e-6, 10.0),
    "inside.latency_s": (1e-8, 1e-2),
    "inside.bandwidth": (1e7, 1e12),
    "outside.latency_s": (1e-8, 1e-1),
    "outside.bandwidth": (1e6, 1e12),
}

# The default choice: parameters that iterations inside one node determine. It is better to measure bandwidths directly.
COMPUTE = (
    "matrix_efficiency", "half_flops", "memory_efficiency", "launch_s", "collective_launch_s", "micro_batch_s",
    "iteration_s", "inside.latency_s",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MeasuredIteration:
    """The measured seconds of an iteration of ``plan`` on the cluster of ``model``."""

    model: CostModel
    plan: Plan
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    parameters: dict[str, float]  # values in seconds, bytes per second, FLOPs and fractions
    errors: tuple[float, ...]  # cross-validated error of each iteration: predicted / measured - 1

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
    """Fit the parameters ``names`` to all ``iterations``, with errors from ``folds``-fold cross-validation.

    Raises InputError where a name is unknown, or where a fold leaves fewer than two iterations per parameter.
    """
    for name in names:
        if name not in BOUNDS:
            raise InputError(f"parameter {name!r} is unknown; use some of {', '.join(BOUNDS)}")
    order = list(range(len(iterations)))
    random.Random(seed).shuffle(order)
    held_out = [order[fold::folds] for fold in range(folds)]
    if len(iterations) - max(map(len, held_out)) < 2 * len(names):
        raise InputError(
            f"calibration: the number of measured iterations is {len(iterations)}, too few for {folds}-fold "
            f"cross-validation of the parameters {', '.join(names)}; measure more plans, or fit fewer parameters"
        )
    errors = [0.0] * len(iterations)
    for fold, indices in enumerate(held_out):
        progress(f"fold {fold + 1} of {folds}")
        rest = [iterations[index] for index in order if index not in set(indices)]
        fitted = fit(rest, names)
        for index, error in zip(indices, _errors([iterations[index] for index in indices], fitted), strict=True):
            errors[index] = error
    progress("all iterations")
    return Calibration(parameters=fit([iterations[index] for index in order], names), errors=tuple(errors))


def fit(iterations: Sequence[MeasuredIteration], names: Sequence[str]) -> dict[str, float]:
    """The values of ``names`` that predict ``iterations`` best. The search starts from the values of their cluster."""
    few = iterations[:: max(1, len(iterations) // SAMPLE)]
    start = np.log([np.clip(_present(few[0].model.cluster, name), *BOUNDS[name]) for name in names])
    low, high = (np.log([BOUNDS[name][side] for name in names]) for side in (0, 1))

    def residuals(values: np.ndarray) -> np.ndarray:
        return np.log1p(_errors(few, dict(zip(names, np.exp(values), strict=True))))

    margin = 1e-6 * (high - low)
    solution = least_squares(
        residuals,
        np.clip(start, low + margin, high - margin),
        bounds=(low, high),
        loss="soft_l1",
        f_scale=OUTLIER,
        diff_step=STEP,
        x_scale=0.3,
        max_nfev=30,
    )
    return dict(zip(names, map(float, np.exp(solution.x)), strict=True))


def with_parameters(cluster: Cluster, parameters: Mapping[str, float]) -> Cluster:
    """``cluster`` with ``parameters`` replaced on every node."""
    device: dict[str, Any] = {name: value for name, value in parameters.items() if "." not in name}

    def changed(link: Link, which: str) -> Link:
        changes: dict[str, Any] = {
            name.split(".")[1]: value for name, value in parameters.items() if name.startswith(f"{which}.")
        }
        return replace(link, **changes)

    nodes = tuple(
        replace(
            node,
            accelerator=replace(node.accelerator, **device),
            inside=changed(node.inside, "inside"),
            outside=None if node.outside is None else changed(node.outside, "outside"),
        )
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def _present(cluster: Cluster, name: str) -> float:
    """The value of the parameter ``name`` on the first node of ``cluster``."""
    group, _, field = name.rpartition(".")
    holder: Accelerator | Link = getattr(cluster.nodes[0], group) if group else cluster.nodes[0].accelerator
    value = getattr(holder, field or name)
    if value is None:  # crossing_launch_s, which is collective_launch_s by default
        return cluster.nodes[0].accelerator.collective_launch_s
    return value


def _errors(iterations: Sequence[MeasuredIteration], parameters: Mapping[str, float]) -> list[float]:
    """The error of each iteration's prediction under ``parameters``: predicted / measured - 1."""
    models: dict[int, CostModel] = {}
    errors = []
    for iteration in iterations:
        if id(iteration.model) not in models:
            models[id(iteration.model)] = iteration.model.on(with_parameters(iteration.model.cluster, parameters))
        errors.append(models[id(iteration.model)].seconds(iteration.plan) / iteration.seconds - 1)
    return errors
