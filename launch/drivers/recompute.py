"""`auto3d recompute`: real trials find the largest fraction of a plan that need not be recomputed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from auto3d.partition.merak import shard
from auto3d.partition.recompute import subgraph_starts
from auto3d.runtime.measurement import Measurement, Status
from auto3d.schedule import samples_at_once
from auto3d.search.kept_fractions import KeptFractions
from auto3d.search.recompute import FULL
from launch.drivers.planned_training import plan_of
from launch.drivers.sweep import Retry, check_place, check_ranks, measured
from launch.executors.trial_executor import executor_of
from launch.model import candidates
from launch.model.build import captured_model
from launch.model.costs import runtime_memory
from launch.model.graphs import PlanningModel
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import cluster
from launch.store.trials import Trial, trials_of
from launch.store.watcher import FINAL, Ended


@dataclass(frozen=True)
class TriedFraction:
    """A kept fraction of the first stage, and the measurement of its trial."""

    fraction: float
    measurement: Measurement

    @property
    def fits(self) -> bool:
        return self.measurement.status is Status.OK


def try_fractions(recipe: LoadedRecipe, report: Callable[[TriedFraction], None]) -> float | None:
    """The largest kept fraction α₁ of the first stage that fits into memory; None if none fits or a trial failed.

    Bisection, which assumes that memory grows with the fraction. It begins with the largest fraction that fits by the
    estimate if the memory of a device is known. Each fraction is one trial of the recipe's plan, which is stored and
    never runs twice; ``report`` receives each trial.
    """
    check_place(recipe)
    wanted = plan_of(recipe)
    check_ranks(recipe, wanted.dp * wanted.tp * wanted.pp)

    model = PlanningModel(recipe, captured_at=cache(partial(captured_model, recipe)))
    changes: dict[str, Any] = {"recompute": FULL}
    base = candidates.of_plan(model, replace(wanted, **changes))
    graph = model.graph(samples_at_once(base))
    bounds = shard(graph, recipe.values.search.subgraphs).bounds
    variants = KeptFractions(base, lambda stage: subgraph_starts(graph, stage, bounds))
    plans = [(fraction, variants.plan(fraction)) for fraction in variants.first]
    machine = cluster(recipe)
    memory = runtime_memory(model)
    low, high = -1, len(plans)  # positions of the largest fraction known to fit, and of the smallest known not to
    probe = (low + high) // 2
    if machine.memory_bytes is not None:
        fitting = [n for n, (_, plan) in enumerate(plans) if not candidates.shortage(memory, plan, machine)]
        probe = max(fitting, default=0)
    with executor_of(recipe) as executor:
        while high - low > 1:
            fraction, plan = plans[probe]
            (trial,) = trials_of(recipe, [plan])
            tried = TriedFraction(fraction, measured(recipe, trial, executor, _NoProgress(), retry=Retry.ALL))
            report(tried)
            if tried.measurement.status not in FINAL:
                return None
            low, high = (probe, high) if tried.fits else (low, probe)
            probe = (low + high) // 2
    return plans[low][0] if low >= 0 else None


class _NoProgress:
    """A Watcher that shows nothing: the caller reports each trial itself."""

    def begin(self, total: int, kept: Sequence[tuple[Trial, Measurement]], left_out: int) -> None: ...

    def tell(self, line: str) -> None: ...

    def start(self, trial: Trial) -> None: ...

    def end(self, ended: Ended) -> None: ...
