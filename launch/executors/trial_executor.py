"""Where the trials of a driver run: on this machine, or as jobs of SLURM."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Protocol

from auto3d.runtime.measurement import Measurement
from auto3d.words import counted
from launch.executors.follow import follow_jobs
from launch.executors.local import LocalTrials
from launch.executors.submit import submit
from launch.recipe.load import LoadedRecipe
from launch.slurm.executor import on_slurm
from launch.store.trials import Trial, exclusive
from launch.store.watcher import SomeTrials, Watcher

NONE_KNOWN: Mapping[Trial, Measurement] = MappingProxyType({})


class TrialExecutor(Protocol):
    """Runs the trials of one recipe, or of several that share a store."""

    def run(
        self,
        pending: Sequence[Trial],
        watcher: Watcher,
        *,
        known: Mapping[Trial, Measurement] = NONE_KNOWN,
        follow: bool = True,
    ) -> None:
        """Run ``pending``; ``watcher`` hears of each trial's start and end.

        ``known`` are measurements of earlier runs that these replace. Without ``follow``, jobs are submitted only. On
        SIGINT or SIGTERM KeyboardInterrupt is raised; what has ended stays.
        """


@contextmanager
def executor_of(recipe: LoadedRecipe) -> Iterator[TrialExecutor]:
    """What runs trials where ``recipe`` says, in whose store they are.

    The recipe's store is held while trials run on this machine; jobs of SLURM may belong to several drivers.
    """
    if on_slurm(recipe):
        yield _SlurmJobs(recipe)
    else:
        with exclusive(recipe), ExitStack() as ends:
            yield _Local(ends)


@dataclass(frozen=True)
class _SlurmJobs:
    recipe: LoadedRecipe

    def run(
        self,
        pending: Sequence[Trial],
        watcher: Watcher,
        *,
        known: Mapping[Trial, Measurement] = NONE_KNOWN,
        follow: bool = True,
    ) -> None:
        jobs = submit(self.recipe, pending, known, watcher)
        waiting = [trial for trial in pending if trial not in jobs]
        if follow:
            follow_jobs(self.recipe, jobs, watcher, waiting=waiting, known=known)
        elif waiting:
            rest = counted(len(waiting), "trial is not submitted", "trials are not submitted")
            watcher.tell(f"{rest} yet; to submit them as jobs end: {self.recipe.follow_up('resume')}")


class _Local:
    """Trials of recipes that differ in their plans alone are forked from one process.

    It ends when trials of another recipe begin, or with ``ends``.
    """

    def __init__(self, ends: ExitStack) -> None:
        self._ends = ends
        self._recipe: LoadedRecipe | None = None
        self._trials: LocalTrials | None = None

    def run(
        self,
        pending: Sequence[Trial],
        watcher: Watcher,
        *,
        known: Mapping[Trial, Measurement] = NONE_KNOWN,  # a trial here always replaces its earlier measurement
        follow: bool = True,
    ) -> None:
        before = 0
        for _, group in groupby(pending, key=lambda trial: id(trial.recipe)):
            trials = list(group)
            self._of(trials[0].recipe).run(trials, SomeTrials(watcher, before, len(pending)))
            before += len(trials)

    def _of(self, recipe: LoadedRecipe) -> LocalTrials:
        if self._trials is None or self._recipe is None or not _run_alike(self._recipe, recipe):
            self._ends.close()
            self._recipe, self._trials = recipe, self._ends.enter_context(LocalTrials(recipe))
        return self._trials


def _run_alike(recipe: LoadedRecipe, other: LoadedRecipe) -> bool:
    """Whether plans run in the same way under both recipes: all keys but those that choose plans are equal."""
    values = replace(recipe.values, search=other.values.search, plan=other.values.plan)
    return values == other.values and recipe.folder == other.folder
