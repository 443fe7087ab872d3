"""Ends of trials, recorded in the manifest."""

from collections.abc import Mapping
from dataclasses import replace

from auto3d.runtime.measurement import Measurement
from launch.recipe.load import LoadedRecipe
from launch.store.manifest import State, histories
from launch.store.trials import Trial, manifest_of


def record_ends(recipe: LoadedRecipe, ended: Mapping[Trial, Measurement]) -> None:
    """Record the end of each of the ``ended`` trials once, except trials that another process has begun again."""
    if not ended:
        return
    manifest = manifest_of(recipe)
    with manifest.decided_alone():
        known = histories(manifest.entries())
        last = {trial: known[trial.name].last for trial in ended if trial.name in known}
        new = [
            replace(entry, state=State.ENDED, told=ended[trial].status, at=ended[trial].finished)
            for trial, entry in last.items()
            if entry.state is not State.ENDED and _finished(trial) == ended[trial].finished
        ]
        if new:
            manifest.append(new)


def _finished(trial: Trial) -> str:
    """When the trial ended; empty if it has not."""
    measurement = trial.measurement()
    return "" if measurement is None else measurement.finished
