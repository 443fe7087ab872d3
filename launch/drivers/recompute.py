"""`auto3d recompute`: the largest share of a plan that need not be recomputed, found by real trials."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from auto3d.capture.graph import Graph
from auto3d.partition.merak import shard
from auto3d.partition.recompute import subgraph_starts
from auto3d.runtime.measurement import Measurement, Status
from auto3d.runtime.settings import optimizer_copies
from auto3d.schedule import samples_at_once
from auto3d.search.recompute import FULL, KeptFractions
from launch.drivers.sweep import Retry, check_place, check_ranks, held, measured
from launch.drivers.train import plan_of
from launch.model import candidates
from launch.model.build import captured_model
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import cluster, optimizer_settings
from launch.store.trials import Trial, trials_of
from launch.store.watcher import FINAL, Ended


@dataclass(frozen=True)
class Tried:
    """A share of the first stage that was tried, and what became of it."""

    share: float
    measurement: Measurement

    @property
    def fits(self) -> bool:
        return self.measurement.status is Status.OK


def try_shares(recipe: LoadedRecipe, report: Callable[[Tried], None]) -> float | None:
    """The largest α₁ whose trial does not run out of memory, by bisection; None where none fits, or a trial failed.

    The first try is the largest that the estimate has room for, where a device's memory is known. Each is a trial
    of the recipe's plan: kept in the store, never run twice. That more memory is needed the more is kept, is assumed.
    """
    check_place(recipe)

    @cache
    def graph_at(micro_batch_size: int) -> Graph:
        return captured_model(recipe, micro_batch_size).graph

    base = candidates.of_plan(recipe, replace(plan_of(recipe), recompute=FULL), graph_at)
    graph = graph_at(samples_at_once(base))
    check_ranks(recipe, base.ranks)
    bounds = shard(graph).bounds
    shares = KeptFractions(base, lambda stage: subgraph_starts(graph, stage, bounds))
    plans = [(share, shares.plan(share)) for share in shares.first]
    machine = cluster(recipe)
    copies = optimizer_copies(optimizer_settings(recipe.values), recipe.values.cluster.device)
    low, high = -1, len(plans)  # the largest that is known to fit, the smallest that is known not to
    probe = (low + high) // 2
    if machine.memory_bytes is not None:
        fitting = [n for n, (_, plan) in enumerate(plans) if not candidates.shortage(graph, plan, machine, **copies)]
        probe = max(fitting, default=0)
    with held(recipe):
        while high - low > 1:
            share, plan = plans[probe]
            (trial,) = trials_of(recipe, [plan])
            tried = Tried(share, measured(recipe, trial, _Unwatched(), retry=Retry.ALL))
            report(tried)
            if tried.measurement.status not in FINAL:
                return None
            low, high = (probe, high) if tried.fits else (low, probe)
            probe = (low + high) // 2
    return plans[low][0] if low >= 0 else None


class _Unwatched:
    def tell(self, line: str) -> None: ...

    def start(self, trial: Trial) -> None: ...

    def end(self, ended: Ended) -> None: ...
