"""Trials as jobs of SLURM, submitted through submitit: each trial that has no job yet gets one, alone or in an array.

The manifest records which job belongs to which trial, so that any process can follow the jobs at any time.
"""

import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import clean_env

from auto3d.runtime.measurement import Measurement
from launch.executors.job import run_on_node
from launch.recipe.load import LoadedRecipe
from launch.slurm.client import SlurmError, run
from launch.slurm.jobs import cancel, job_states, listed_states, max_array_size
from launch.slurm.sbatch import check_folder, nodes_needed, parameters, python, text
from launch.store.files import private_folder
from launch.store.lost_jobs import find_lost
from launch.store.manifest import Entry, History, Manifest, State, histories, names_of_jobs
from launch.store.trials import Trial, job_folder, manifest_of
from launch.store.watcher import Watcher, interrupts_noted

TEST_ONLY_S = 120.0  # limit of `sbatch --test-only`; the scheduler examines the whole queue


@dataclass(frozen=True)
class Submission:
    """Trials that go to SLURM together: one job, or one job array."""

    name: str
    folder: Path
    nodes: int
    trials: Sequence[Trial]

    @property
    def training(self) -> bool:
        """It is one training, not trials."""
        return self.trials[0].checkpoints is not None

    def text(self, recipe: LoadedRecipe) -> str:
        """The sbatch text, exactly."""
        kind = {"trials": len(self.trials), "training": self.training}
        return text(recipe, self.folder, nodes=self.nodes, name=self.name, **kind)


def submissions(recipe: LoadedRecipe, trials: Sequence[Trial], starts: Mapping[str, int]) -> list[Submission]:
    """Trials of equal numbers of nodes together, no more than an array may have; a name tells what is started."""
    most = max_array_size()
    found = []
    by_nodes = sorted(trials, key=lambda trial: nodes_needed(recipe, trial.plan))
    for nodes, group in groupby(by_nodes, key=lambda trial: nodes_needed(recipe, trial.plan)):
        together = list(group)
        for first in range(0, len(together), most):
            chunk = together[first : first + most]
            started = [f"{trial.name} {starts.get(trial.name, 0)}" for trial in chunk]
            here = str(job_folder(recipe, ""))  # the same recipe elsewhere has the same trials
            digest = sha256("\n".join([here, *started]).encode()).hexdigest()[:12]
            name = f"auto3d-{re.sub(r'[^A-Za-z0-9_.-]', '_', recipe.name)[:40]}-{digest}"
            folder = job_folder(recipe, name)
            check_folder(folder)
            found.append(Submission(name, folder, nodes, chunk))
    return found


def starts_of(recipe: LoadedRecipe) -> dict[str, int]:
    """How often each trial was started."""
    return {name: history.starts for name, history in histories(manifest_of(recipe).entries()).items()}


def ask(recipe: LoadedRecipe, submission: Submission) -> str:
    """What the scheduler says to `sbatch --test-only`; raises SlurmError where it refuses."""
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file, _own_environment():
        file.write(submission.text(recipe))
        file.flush()
        done = run(["sbatch", "--test-only", file.name], timeout_s=TEST_ONLY_S)
    return "; ".join((done.stderr + done.stdout).strip().splitlines())


def submit(
    recipe: LoadedRecipe, pending: Sequence[Trial], known: Mapping[Trial, Measurement], watcher: Watcher
) -> dict[Trial, str]:
    """The job of each of ``pending``: that which is on its way, or else a new one.

    A trial that has another measurement than the ``known`` one was ended by another process: it has an empty job.
    """
    manifest = manifest_of(recipe)
    with manifest.decided_alone(), interrupts_noted() as interrupted:
        jobs = {trial: "" for trial in pending if trial.measurement() != known.get(trial)}
        left = [trial for trial in pending if trial not in jobs]
        cancel_listed_again(recipe, [trial.name for trial in left if trial in known])
        jobs |= _on_their_way(manifest, [trial for trial in left if trial not in known])
        starts = starts_of(recipe)
        new = [trial for trial in left if trial not in jobs]
        for submission in submissions(recipe, new, starts):
            jobs |= submit_one(recipe, manifest, submission)
            ids = [jobs[trial] for trial in submission.trials]
            nodes = f"{submission.nodes} node{'s' if submission.nodes > 1 else ''}"
            what = "the training" if submission.training else f"{len(ids)} trials"
            watcher.tell(f"submitted {what} on {nodes}: job {ids[0].split('_')[0]}")
            if interrupted():
                break
        if interrupted():
            raise KeyboardInterrupt
    return jobs


def cancel_listed_again(recipe: LoadedRecipe, retried: Collection[str] = ()) -> None:
    """Cancel jobs that wait though their trials have ended, and any of trials to be ``retried``: else these ran twice.

    A job is queued again where its node died after the trial's end; and a controller that dies as a job starts forgets
    that, and holds it for ever. Raises SlurmError if SLURM does not answer.
    """
    last = [history.last for history in histories(manifest_of(recipe).entries()).values()]
    ended = [entry for entry in last if entry.trial in retried or entry.state is State.ENDED]
    again = {entry.job for entry in ended if entry.trial in retried}
    states = listed_states(names_of_jobs(ended))
    if left := [job for job, state in states.items() if state.waits or (job in again and not state.ended)]:
        cancel(left)


def on_their_way(recipe: LoadedRecipe, trials: Sequence[Trial]) -> dict[Trial, str]:
    """The jobs of those ``trials`` that SLURM has not ended."""
    manifest = manifest_of(recipe)
    with manifest.decided_alone():
        return _on_their_way(manifest, trials)


def _on_their_way(manifest: Manifest, trials: Sequence[Trial]) -> dict[Trial, str]:
    """The jobs of those trials that SLURM has not ended, by the manifest or, where a submission broke off, by name."""
    find_lost(manifest, [trial.name for trial in trials])
    known = histories(manifest.entries())
    last = {trial: known[trial.name].last for trial in trials if _has_job(known.get(trial.name))}
    states = job_states(names_of_jobs(last.values()))
    return {trial: one.job for trial, one in last.items() if one.job in states and not states[one.job].ended}


def _has_job(history: History | None) -> bool:
    return history is not None and history.last.state in (State.SUBMITTED, State.CANCELLED)


def submit_one(recipe: LoadedRecipe, manifest: Manifest, submission: Submission) -> dict[Trial, str]:
    def note(state: State, jobs: Sequence[str], told: str = "") -> None:
        pairs = zip(submission.trials, jobs, strict=True)
        name = submission.name
        manifest.append([Entry(trial=one.name, state=state, job=job, submission=name, told=told) for one, job in pairs])

    for trial in submission.trials:
        trial.prepare(recipe)
    calls = [partial(run_on_node, *_arguments(recipe, trial)) for trial in submission.trials]
    shape = {"nodes": submission.nodes, "name": submission.name, "training": submission.training}
    nobody = [""] * len(submission.trials)
    note(State.SUBMITTING, nobody)
    try:
        ids = submit_calls(recipe, submission.folder, calls, **shape)
    except SlurmError as error:
        note(State.REFUSED, nobody, str(error))
        raise SlurmError(f"sbatch refused {len(nobody)} trials on {submission.nodes} nodes: {error}") from None
    note(State.SUBMITTED, ids)
    return dict(zip(submission.trials, ids, strict=True))


def _arguments(recipe: LoadedRecipe, trial: Trial) -> list[str | None]:
    """Of ``run_on_node``."""
    files = [str(path.resolve()) for path in (trial.recipe_file, trial.plan_file, trial.measurement_file)]
    return [*files, str(recipe.folder), None if trial.checkpoints is None else str(trial.checkpoints.resolve())]


def submit_calls(
    recipe: LoadedRecipe,
    folder: Path,
    calls: Sequence[Callable[[], None]],
    *,
    nodes: int,
    name: str,
    training: bool = False,
) -> list[str]:
    """The jobs of ``calls``, each of which a task on each of its nodes makes; raises SlurmError where sbatch refuses.

    ``folder`` is of this submission alone; what its tasks print goes there.
    """
    private_folder(folder.parent)
    executor = submitit.SlurmExecutor(private_folder(folder), python=python(recipe))
    executor.update_parameters(**parameters(recipe, nodes=nodes, name=name, training=training))
    try:
        with _own_environment(), executor.batch():
            jobs = [executor.submit(call) for call in calls]
    except (FailedJobError, FailedSubmissionError) as error:
        raise SlurmError((str(error).strip().splitlines() or ["it did not say why"])[-1]) from None
    return [job.job_id for job in jobs]


@contextmanager
def _own_environment() -> Iterator[None]:
    """Without the variables of a job that we may be in, which would become options of ours; SLURM's address stays."""
    kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    with clean_env():
        os.environ.update(kept)
        yield
