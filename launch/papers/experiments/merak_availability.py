"""Which kinds of parallelism train unmodified models (Merak's table 1), by training them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isclose
from pathlib import Path
from typing import Any

from auto3d.runtime.measurement import Measurement, Status
from launch.drivers.sweep import Retry, run_sweep
from launch.papers.row import Row
from launch.recipe.load import load_groups
from launch.store.trials import Trial
from launch.store.watcher import Ended

AXES = {"Auto DP": "dp", "Auto PMP": "pp", "Auto TMP": "tp"}  # the paper's columns
WIDTH = 2  # ranks along the one axis that a row uses
TOLERANCE = 1e-5  # relative difference to the losses of one process


class _Told:
    """A watcher that only passes messages on."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell

    def begin(self, total: int, kept: Sequence[tuple[Trial, Measurement]], left_out: int) -> None: ...

    def start(self, trial: Trial) -> None: ...

    def end(self, ended: Ended) -> None: ...


def availability(
    *, tell: Callable[[str], None], system: str, base: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]
) -> Iterator[Row]:
    """One row per kind of parallelism: how many of ``models`` train under it with the losses of one process.

    Each model, given as the groups of a recipe that replace the groups of ``base``, is trained by one process and by
    two that share the batch, the layers or each operator. A model that fails or differs is named in the row's problem.
    """
    counts, problems = dict.fromkeys(AXES, 0), {name: list[str]() for name in AXES}
    for model, groups in models.items():
        tell(f"training {model}")
        recipe = load_groups(f"availability-{model}".replace(" ", "-"), Path(model), {**base, **groups})
        ended = run_sweep(recipe, retry=Retry.ALL, watcher=_Told(tell)).ended().values()
        by_degrees = {
            (measurement.plan.dp, measurement.plan.tp, measurement.plan.pp): measurement for measurement in ended
        }
        alone = by_degrees.get((1, 1, 1))
        for name, axis in AXES.items():
            degrees = {"dp": 1, "tp": 1, "pp": 1, axis: WIDTH}
            parallel = by_degrees.get((degrees["dp"], degrees["tp"], degrees["pp"]))
            if reason := difference(alone, parallel):
                problems[name].append(f"{model}: {reason}")
            else:
                counts[name] += 1
    for name, count in counts.items():
        values = {"models": float(count)}
        yield Row(setting=(system,), system=name, values=values, problem="; ".join(problems[name]))


def difference(alone: Measurement | None, parallel: Measurement | None) -> str:
    """The reason why ``parallel`` is no training that equals ``alone``; empty if it is."""
    if alone is None or parallel is None:
        return "it has no such plan"
    for measurement in (alone, parallel):
        if measurement.status is not Status.OK:
            return f"{measurement.status}: {measurement.error}"
    if all(isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(alone.loss, parallel.loss, strict=True)):
        return ""
    return f"its last loss is {parallel.loss[-1]:.6g}, that of one process {alone.loss[-1]:.6g}"
