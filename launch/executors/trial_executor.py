"""Where the trials of a driver run: on this machine, or as jobs of SLURM."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from auto3d.runtime.measurement import Measurement
from launch.executors.follow import follow_jobs
from launch.executors.local import LocalTrials
from launch.executors.submit import submit
from launch.recipe.load import LoadedRecipe
from launch.slurm.executor import on_slurm
from launch.store.trials import Trial, exclusive
from launch.store.watcher import Watcher

NONE_KNOWN: Mapping[Trial, Measurement] = MappingProxyType({})


class TrialExecutor(Protocol):
    """Runs the trials of one recipe."""

    def run(
        self,
        pending: list[Trial],
        watcher: Watcher,
        *,
        known: Mapping[Trial, Measurement] = NONE_KNOWN,
        follow: bool = True,
    ) -> None:
        """Run ``pending``; ``watcher`` hears of the start and the end of each.

        ``known`` are measurements of earlier runs that these replace. Without ``follow``, jobs are submitted only. On
        SIGINT or SIGTERM KeyboardInterrupt is raised; what has ended stays.
        """


@contextmanager
def executor_of(recipe: LoadedRecipe) -> Iterator[TrialExecutor]:
    """What runs the trials of ``recipe`` where it says.

    The recipe's store is held while trials run on this machine; jobs of SLURM may belong to several drivers.
    """
    if on_slurm(recipe):
        yield _SlurmJobs(recipe)
    else:
        with exclusive(recipe), LocalTrials(recipe) as local:
            yield _Local(local)


@dataclass(frozen=True)
class _SlurmJobs:
    recipe: LoadedRecipe

    def run(
        self,
        pending: list[Trial],
        watcher: Watcher,
        *,
        known: Mapping[Trial, Measurement] = NONE_KNOWN,
        follow: bool = True,
    ) -> None:
        jobs = submit(self.recipe, pending, known, watcher)
        if follow:
            follow_jobs(self.recipe, jobs, watcher)


@dataclass(frozen=True)
class _Local:
    trials: LocalTrials

    def run(
        self,
        pending: list[Trial],
        watcher: Watcher,
        *,
        known: Mapping[Trial, Measurement] = NONE_KNOWN,  # a trial here always replaces its earlier measurement
        follow: bool = True,
    ) -> None:
        self.trials.run(pending, watcher)
