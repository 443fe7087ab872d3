"""Submit trials as jobs of SLURM through submitit: each trial without a job gets a job, which may be part of an array.

The manifest records which job belongs to which trial, so that any process can follow the jobs at any time.
"""

import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from io import StringIO
from itertools import groupby
from json import dumps
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import clean_env

from auto3d.runtime.measurement import Measurement, Status
from auto3d.words import counted
from launch.executors.job import run_on_node
from launch.model.stored_programs import copy_programs
from launch.recipe.load import LoadedRecipe
from launch.slurm.client import JobLimitError, SlurmError, run
from launch.slurm.jobs import answers, any_job, cancel, job_states, listed_states, max_array_size
from launch.slurm.sbatch import check_folder, nodes_needed, parameters, python, text
from launch.store.files import private_folder
from launch.store.lost_jobs import find_lost
from launch.store.manifest import Entry, History, Manifest, State, histories, names_of_jobs
from launch.store.trials import Trial, job_folder, manifest_of
from launch.store.watcher import Watcher, interrupts_noted, write_failure

TEST_ONLY_S = 120.0  # limit of `sbatch --test-only`; the scheduler examines the whole queue
# The reason that sbatch prints where an association or a quality of service limits the number of submitted jobs.
_JOB_LIMIT = re.compile(r"(Assoc|QOS)(Max|Grp)Submit\w*Limit")
_ANY_LIMIT = re.compile(r"(Assoc|QOS)\w+Limit")


@dataclass(frozen=True)
class Submission:
    """Trials that are submitted together, as one job or one job array."""

    name: str
    folder: Path
    nodes: int
    trials: Sequence[Trial]

    @property
    def training(self) -> bool:
        """Whether this is one training rather than trials."""
        return self.trials[0].checkpoints is not None

    @property
    def recipe(self) -> LoadedRecipe:
        """The recipe of the first trial; the other trials' recipes ask SLURM for the same."""
        return self.trials[0].recipe

    @property
    def text(self) -> str:
        """The exact sbatch script."""
        return text(
            self.recipe, self.folder, nodes=self.nodes, name=self.name, trials=len(self.trials), training=self.training
        )


def most_at_once(recipe: LoadedRecipe) -> int:
    """The largest number of trials that may be submitted together."""
    largest = max_array_size()
    return min(largest, recipe.values.launch.max_submitted or largest)


def submissions(
    recipe: LoadedRecipe, trials: Sequence[Trial], starts: Mapping[str, int], at_most: int
) -> list[Submission]:
    """Group ``trials``, of the store of ``recipe``, by what they ask SLURM for, in arrays of ``at_most`` trials.

    The name of a submission has a digest of its trials and of how many times each was started before, ``starts``.
    """
    result = []
    for (nodes, _), group in groupby(sorted(trials, key=_asked), key=_asked):
        together = list(group)
        for first in range(0, len(together), at_most):
            chunk = together[first : first + at_most]
            started = [f"{trial.name} {starts.get(trial.name, 0)}" for trial in chunk]
            here = str(job_folder(recipe, ""))  # the same recipe in another folder has the same trials
            digest = sha256("\n".join([here, *started]).encode()).hexdigest()[:12]
            name = f"auto3d-{re.sub(r'[^A-Za-z0-9_.-]', '_', recipe.name)[:40]}-{digest}"
            folder = job_folder(recipe, name)
            check_folder(folder)
            result.append(Submission(name, folder, nodes, chunk))
    return result


def _asked(trial: Trial) -> tuple[int, str]:
    """The number of nodes of a trial's job, and its other options for sbatch."""
    nodes = nodes_needed(trial.recipe, trial.plan)
    options = parameters(trial.recipe, nodes=nodes, name="", training=trial.checkpoints is not None)
    return nodes, dumps(options, sort_keys=True)


def starts_of(recipe: LoadedRecipe) -> dict[str, int]:
    """How many times each trial was started, by name."""
    return {name: history.starts for name, history in histories(manifest_of(recipe).entries()).items()}


def ask(submission: Submission) -> str:
    """The scheduler's answer to `sbatch --test-only`; raises SlurmError if it refuses."""
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file, _own_environment():
        file.write(submission.text)
        file.flush()
        done = run(["sbatch", "--test-only", file.name], limit_s=TEST_ONLY_S)
    return "; ".join((done.stderr + done.stdout).strip().splitlines())


def submit(
    recipe: LoadedRecipe,
    pending: Sequence[Trial],
    known: Mapping[Trial, Measurement],
    watcher: Watcher,
    *,
    live: int = 0,
    portion: int | None = None,
) -> dict[Trial, str]:
    """The jobs of the ``pending`` trials: the job that SLURM already has, or else a new one.

    The job is empty if the trial's measurement is not the ``known`` one: another process has run it meanwhile. A trial
    has no job yet where launch.max_submitted, or SLURM, allows no more jobs beside the ``live`` jobs of other trials;
    ``watcher`` hears of that. ``portion``: some were submitted before, and now so many are tried at once. What SLURM
    refuses for another reason has failed, unless it refuses all.
    """
    manifest = manifest_of(recipe)
    with manifest.decided_alone(), interrupts_noted() as interrupted:
        # An attempt that SLURM refused has removed the measurement of a trial that is retried.
        measured = {trial: measurement for trial in pending if (measurement := trial.measurement()) is not None}
        jobs = {trial: "" for trial, measurement in measured.items() if measurement != known.get(trial)}
        unended = [trial for trial in pending if trial not in jobs]
        cancel_listed_again(recipe, [trial.name for trial in unended if trial in measured])
        jobs |= _on_their_way(manifest, [trial for trial in unended if trial not in measured])
        starts = starts_of(recipe)
        new = [trial for trial in unended if trial not in jobs]
        most, at_once, limit = recipe.values.launch.max_submitted, portion or most_at_once(recipe), ""
        refused: dict[Trial, SlurmError] = {}
        while new and not interrupted():
            under_way = live + sum(map(bool, jobs.values()))
            if most is not None and under_way >= most:
                limit = f"launch.max_submitted is {most}"
                break
            allowed = at_once if most is None else min(at_once, most - under_way)
            submission = submissions(recipe, new, starts, allowed)[0]
            try:
                jobs |= submit_one(recipe, manifest, submission)
            except JobLimitError as error:
                if len(submission.trials) > 1:
                    at_once = len(submission.trials) // 2
                    continue
                if portion is None and not under_way and not any_job():
                    raise  # nothing will end that makes room
                limit = str(error)
                break
            except SlurmError as error:
                if interrupted():  # the signal has ended sbatch, too
                    raise KeyboardInterrupt from None
                if not answers():
                    raise
                refused |= dict.fromkeys(submission.trials, error)
                new = [trial for trial in new if trial not in refused]
                continue
            ids = [jobs[trial] for trial in submission.trials]
            watcher.tell(f"submitted {_contents(submission)}: job {ids[0].split('_')[0]}")
            new = [trial for trial in new if trial not in jobs]
        if interrupted():
            raise KeyboardInterrupt
        if refused and not (new or live or any(jobs.values())):
            raise next(iter(refused.values()))
        for trial, problem in refused.items():
            write_failure(trial, Status.FAILED, str(problem))
            jobs[trial] = ""
        if limit and portion is None:
            watcher.tell(f"{counted(len(new), 'trial')} will be submitted as jobs end: {limit}")
    return jobs


def cancel_listed_again(recipe: LoadedRecipe, retried: Collection[str] = ()) -> None:
    """Cancel pending jobs of trials that have ended, and all jobs of trials to be ``retried``: these would run twice.

    SLURM requeues a job whose node died after the trial's end. A controller that dies just as a job starts forgets the
    start, and keeps the job pending for ever. Raises SlurmError if SLURM does not answer.
    """
    last = [history.last for history in histories(manifest_of(recipe).entries()).values()]
    ended = [entry for entry in last if entry.trial in retried or entry.state is State.ENDED]
    again = {entry.job for entry in ended if entry.trial in retried}
    states = listed_states(names_of_jobs(ended))
    if unwanted := [job for job, state in states.items() if state.pending or (job in again and not state.ended)]:
        cancel(unwanted)


def on_their_way(recipe: LoadedRecipe, trials: Sequence[Trial]) -> dict[Trial, str]:
    """The jobs of those ``trials`` that are pending or running."""
    manifest = manifest_of(recipe)
    with manifest.decided_alone():
        return _on_their_way(manifest, trials)


def _on_their_way(manifest: Manifest, trials: Sequence[Trial]) -> dict[Trial, str]:
    """The same without the lock. A job is known from the manifest or, after an interrupted submission, by its name."""
    find_lost(manifest, [trial.name for trial in trials])
    known = histories(manifest.entries())
    last = {trial: known[trial.name].last for trial in trials if _has_job(known.get(trial.name))}
    states = job_states(names_of_jobs(last.values()))
    return {trial: entry.job for trial, entry in last.items() if entry.job in states and not states[entry.job].ended}


def _has_job(history: History | None) -> bool:
    return history is not None and history.last.state in (State.SUBMITTED, State.CANCELLED)


def submit_one(recipe: LoadedRecipe, manifest: Manifest, submission: Submission) -> dict[Trial, str]:
    """Submit and record it; returns the job of each trial. Raises SlurmError if sbatch refuses."""

    def record(state: State, jobs: Sequence[str], reason: str = "") -> None:
        pairs, name = zip(submission.trials, jobs, strict=True), submission.name
        entries = [Entry(trial=trial.name, state=state, job=job, submission=name, told=reason) for trial, job in pairs]
        manifest.append(entries)

    for trial in submission.trials:
        trial.prepare()
        copy_programs(trial.recipe, trial.plan, trial.folder)
    calls = [_call(trial) for trial in submission.trials]
    no_jobs = [""] * len(submission.trials)
    record(State.SUBMITTING, no_jobs)
    try:
        ids = submit_calls(
            submission.recipe,
            submission.folder,
            calls,
            nodes=submission.nodes,
            name=submission.name,
            training=submission.training,
        )
    except SlurmError as error:
        record(State.REFUSED, no_jobs, str(error))
        raise type(error)(f"sbatch refused {_contents(submission)}: {error}") from None
    record(State.SUBMITTED, ids)
    return dict(zip(submission.trials, ids, strict=True))


def _contents(submission: Submission) -> str:
    """For a person: what is submitted, and on how many nodes."""
    trials = "the training" if submission.training else counted(len(submission.trials), "trial")
    return f"{trials} on {counted(submission.nodes, 'node')}"


def _call(trial: Trial) -> Callable[[], None]:
    """What each node of the trial's job calls."""
    checkpoints = None if trial.checkpoints is None else str(trial.checkpoints.resolve())
    recipe_file, plan_file, measurement_file = (
        str(path.resolve()) for path in (trial.recipe_file, trial.plan_file, trial.measurement_file)
    )
    return partial(run_on_node, recipe_file, plan_file, measurement_file, str(trial.recipe.folder), checkpoints)


def submit_calls(
    recipe: LoadedRecipe,
    folder: Path,
    calls: Sequence[Callable[[], None]],
    *,
    nodes: int,
    name: str,
    training: bool = False,
) -> list[str]:
    """Submit ``calls``, a job per call, and return the jobs' ids; raises SlurmError if sbatch refuses.

    One task on each node of a job makes its call. ``folder``, which only this submission uses, gets the log files.
    """
    private_folder(folder.parent)
    executor = submitit.SlurmExecutor(private_folder(folder), python=python(recipe))
    executor.update_parameters(**parameters(recipe, nodes=nodes, name=name, training=training))
    try:
        with _own_environment(), redirect_stderr(StringIO()), executor.batch():  # the error has what sbatch prints
            jobs = [executor.submit(call) for call in calls]
    except (FailedJobError, FailedSubmissionError) as error:
        raise _refusal(str(error)) from None
    return [job.job_id for job in jobs]


def _refusal(printed: str) -> SlurmError:
    """The error for what sbatch has ``printed``. Its last line is the same for limits of jobs, sizes and times."""
    reason = (printed.strip().splitlines() or ["it gave no reason"])[-1].removeprefix("sbatch: error: ")
    named = _ANY_LIMIT.search(printed)
    reason += f" ({named[0]})" if named else ""
    limited = _JOB_LIMIT.search(printed) if named else "job submit limit" in printed
    return JobLimitError(reason) if limited else SlurmError(reason)


@contextmanager
def _own_environment() -> Iterator[None]:
    """Hide the variables of a job that we may be in, which would become our options; keep where SLURM's files are."""
    kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    with clean_env():
        os.environ.update(kept)
        yield
