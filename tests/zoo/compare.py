"""Train one entry with the engine and with plain PyTorch, and compare them."""

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from auto3d.capture.model import CapturedModel, capture
from auto3d.runtime.verify.eager import check_against_eager
from tests.zoo.engine import engine
from tests.zoo.entry import Entry
from tests.zoo.outcome import PLANS, Outcome, Result, failure, one_line, worst
from tests.zoo.reference import reference
from tests.zoo.trained import ITERATIONS, MICRO_BATCH, SEED, Trained

ABSOLUTE = 1e-7  # the same as in assert_close of tests/distributed/parity.py
MOST_SENSITIVE = 100  # largest difference, in units of the bound, that sensitivity to rounding can excuse


def run(entry: Entry, *, timeout_s: float, spoil: Callable[[nn.Module], None] = lambda module: None) -> Outcome:
    """Train ``entry`` under both plans and with plain PyTorch; for tests, ``spoil`` changes the reference's module."""
    found = []
    runs: dict[str, list[Trained]] = {}
    captured = None
    try:
        model = capture(entry.build, entry.data.input_specs(), MICRO_BATCH)
        check_against_eager(model, entry.data, seed=SEED, device=torch.device("cpu"))
        captured = model
    except Exception as error:
        found.append(failure(error))
    for name, dp in PLANS.items() if captured else ():
        try:
            runs[name] = engine(entry, captured, dp, timeout_s=timeout_s)
        except Exception as error:
            outcome = failure(error)
            found.append(replace(outcome, reason=f"{name}: {outcome.reason}"))
    try:
        expected = reference(entry, captured, spoil)
    except Exception as error:
        return Outcome(Result.BROKEN, one_line(error), traceback.format_exc())
    for name, ranks in runs.items():
        difference = compare(entry, captured, ranks, expected, PLANS[name], spoil)
        found.append(replace(difference, reason=f"{name}: {difference.reason}" if difference.reason else ""))
    return worst(found, entry)


def compare(
    entry: Entry,
    captured: CapturedModel,
    ranks: list[Trained],
    expected: Trained,
    dp: int,
    spoil: Callable[[nn.Module], None] = lambda module: None,
) -> Outcome:
    """RIGHT or WRONG; a wrong outcome names the first and the largest difference."""
    if not expected.gradients or not any(np.abs(gradient).max(initial=0) for gradient in expected.gradients.values()):
        return Outcome(Result.BROKEN, "plain PyTorch trains no parameter of this entry")
    for stage, rank in enumerate(ranks[::dp]):  # the ranks of the first pipeline
        if not rank.gradients:
            return Outcome(Result.WRONG, f"stage {stage} trains no parameter")
    if dp > 1 and captured.graph.written_buffers:
        expected = reference(entry, captured, spoil, pipelines=dp)
    differences = _differences(ranks, expected, dp, entry.relative)
    if not differences:
        return Outcome(Result.RIGHT)
    worst = max(excess for _, excess in differences)
    if worst <= MOST_SENSITIVE:
        pipelines = dp if captured.graph.written_buffers else 1
        nudged = reference(entry, captured, spoil, pipelines=pipelines, nudge=1e-7)
        moved = _differences([nudged], expected, 1, entry.relative)
        sensitivity = max((excess for _, excess in moved), default=0.0)
        if worst <= 3 * sensitivity:
            return Outcome(
                Result.RIGHT,
                f"differs by {worst:.1f} times the bound; one process itself by {sensitivity:.1f} times where its "
                "initial weights change by 1e-7",
            )
    first, excess = differences[0]
    most = max(differences, key=lambda difference: difference[1])
    more = f"; most: {most[0]}, {most[1]:.3g} times" if most[0] != first else ""
    return Outcome(Result.WRONG, f"{len(differences)} differ; first: {first}, {excess:.3g} times the bound{more}")


def _differences(ranks: list[Trained], expected: Trained, dp: int, relative: float) -> list[tuple[str, float]]:
    """(name, difference in units of the bound) of all that exceeds it. Buffers: only those of the first pipeline."""
    found: list[tuple[str, float]] = []

    def check(what: str, ours: Any, theirs: Any) -> None:
        excess = _excess(np.asarray(ours), np.asarray(theirs), relative)
        if excess > 1:
            found.append((what, excess))

    for number, rank in enumerate(ranks):
        for iteration in range(ITERATIONS):
            check(f"loss of iteration {iteration}, rank {number}", rank.losses[iteration], expected.losses[iteration])
            check(f"norm of iteration {iteration}, rank {number}", rank.norms[iteration], expected.norms[iteration])
        zero = np.zeros(())
        for name, gradient in rank.gradients.items():
            check(f"gradient of {name}, rank {number}", gradient, expected.gradients.get(name, zero))
        for name, value in rank.parameters.items():
            check(f"parameter {name}, rank {number}", value, expected.parameters[name])
    for rank in ranks[::dp]:
        for name, value in rank.buffers.items():
            check(f"buffer {name}", value, expected.buffers[name])
    held = {name for rank in ranks for name in rank.parameters}
    trained = {name for rank in ranks for name in rank.gradients}
    for name, gradient in expected.gradients.items():
        if name not in held or (name not in trained and np.abs(gradient).max(initial=0) > 0):
            found.append((f"gradient of {name}, which the engine does not train", float("inf")))
    return found


def _excess(ours: np.ndarray, theirs: np.ndarray, relative: float) -> float:
    """The difference in units of the bound."""
    if ours.size == 0 or theirs.size == 0:
        return 0.0
    if not np.array_equal(np.isfinite(ours), np.isfinite(theirs) & np.ones(ours.shape, bool)):
        return float("inf")
    ours, theirs = np.nan_to_num(ours), np.nan_to_num(theirs)
    wide = np.complex128 if np.iscomplexobj(ours) else np.float64
    difference = np.abs(ours.astype(wide) - theirs.astype(wide)).max()
    return float(difference / (relative * np.abs(theirs).max() + ABSOLUTE))
