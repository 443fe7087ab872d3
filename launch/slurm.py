"""Trials as jobs of SLURM, through submitit: submit what does not run yet, follow all to their ends.

The manifest tells which job is which trial's, so that any process, at any time, can follow. The trial's measurement
file is its end; where a job ends without one, SLURM's state tells why.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import clean_env

from auto3d.runtime.measurement import Measurement, Status
from launch.files import private_folder
from launch.job import nodes_needed, run_on_node
from launch.jobs import STATES_S, JobState, cancel, find_lost, job_states, listed_states, max_array_size
from launch.manifest import Entry, History, Manifest, State, histories, names_of_jobs
from launch.recipe import LoadedRecipe
from launch.sbatch import check_folder, parameters, python, text
from launch.slurm_commands import SlurmError, run
from launch.store import Trial, job_folder, log_files, manifest_of
from launch.watcher import Ended, Watcher, interrupts_noted, write_failure

POLL_S = 1.0  # of the trials' files
LONGEST_STATES_S = 60.0  # at most, between two looks at the states of jobs
SPARED = 20  # times as long as it took to answer, it is not asked again
TEST_ONLY_S = 120.0  # the scheduler looks at the whole queue
SETTLE_S = 20.0  # from the end of a job until its last file is seen here
UNKNOWN_S = 120.0  # until a job that SLURM does not know is given up
SILENCE_S = 1800.0  # until we give up on a SLURM that does not answer; its jobs are not given up

# Ends that are not the trial's fault.
RETRIED = ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED")
STATUSES = {"OUT_OF_MEMORY": Status.OOM, "TIMEOUT": Status.TIMEOUT, "DEADLINE": Status.TIMEOUT}


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


# Submitting


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
            jobs |= _submit(recipe, manifest, submission)
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


def _submit(recipe: LoadedRecipe, manifest: Manifest, submission: Submission) -> dict[Trial, str]:
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


# Following


@dataclass
class _Followed:
    """A trial whose job is under way, and since when (time.monotonic()) something about it is not as it should be."""

    job: str
    shown: str = ""  # the last state that was told
    waits_since: float | None = None
    ended_since: float | None = None
    unknown_since: float | None = None
    refused_since: float | None = None  # to be submitted again

    def is_late(self, now: float) -> bool:
        """Its measurement should have come, if ever."""
        ended = self.ended_since is not None and now - self.ended_since > SETTLE_S
        return ended or (self.unknown_since is not None and now - self.unknown_since > UNKNOWN_S)

    def follow_another(self, job: str) -> None:
        self.job, self.shown = job, ""
        self.waits_since = self.ended_since = self.unknown_since = self.refused_since = None


def follow(recipe: LoadedRecipe, jobs: Mapping[Trial, str], watcher: Watcher) -> None:
    """Until each trial has ended; those that lost their nodes are submitted again, up to launch.attempts.

    On SIGINT or SIGTERM KeyboardInterrupt is raised, and the jobs go on.
    """
    followed = {trial: _Followed(job) for trial, job in jobs.items()}
    number, answered, asked, pause_s = 0, time.monotonic(), -STATES_S, STATES_S
    states: dict[str, JobState] = {}
    with interrupts_noted() as interrupted:
        while followed:
            if interrupted():
                raise KeyboardInterrupt
            looks = time.monotonic() - asked >= pause_s
            if looks:
                asked = time.monotonic()
                try:
                    names, wanted = names_of_jobs(manifest_of(recipe).entries()), {one.job for one in followed.values()}
                    states = job_states({job: name for job, name in names.items() if job in wanted})
                    answered = time.monotonic()
                except SlurmError as error:
                    if time.monotonic() - answered > SILENCE_S:
                        again = recipe.follow_up("resume")
                        raise SlurmError(
                            f"{error}, for {SILENCE_S:g} s; jobs may still run: to follow them again: {again}"
                        ) from None
                else:
                    pause_s = min(max(STATES_S, SPARED * (answered - asked)), LONGEST_STATES_S)
                    for trial, one in followed.items():
                        _look(recipe, trial, one, states.get(one.job), watcher)
            ended = _ended(recipe, followed, states, watcher, all_files=looks)
            note_ends(recipe, ended)
            for trial, measurement in ended.items():
                number += 1
                del followed[trial]
                watcher.end(Ended(trial, measurement, number, len(jobs)))
            if followed:
                time.sleep(POLL_S)
    with suppress(SlurmError):
        cancel_listed_again(recipe)
    if interrupted():  # just when the last trial had ended
        raise KeyboardInterrupt


def _look(recipe: LoadedRecipe, trial: Trial, one: _Followed, state: JobState | None, watcher: Watcher) -> None:
    """Note what SLURM says of the trial's job now."""
    now = time.monotonic()
    known, ended, waits = state is not None, state is not None and state.ended, state is not None and state.waits
    one.unknown_since = None if known else one.unknown_since or now
    one.ended_since = (one.ended_since or now) if ended else None
    one.waits_since = (one.waits_since or now) if waits else None
    if known and state.running and one.shown != "running":
        watcher.start(trial)
        one.shown = "running"
    if waits and one.shown == "running":
        watcher.tell(f"{trial.name}: SLURM sent job {one.job} back to the queue; it will start again")
        one.shown = "waiting"
    limit = recipe.values.launch.queue_timeout_s
    if waits and now - one.waits_since > limit:
        with suppress(SlurmError):  # it has ended just now
            cancel([one.job])
        reason = f"job {one.job} waited {limit:g} s for its nodes ({state.why})"
        with manifest_of(recipe).decided_alone():
            if trial.measurement() is None:
                write_failure(recipe, trial, Status.TIMEOUT, reason)


def _ended(
    recipe: LoadedRecipe,
    followed: Mapping[Trial, _Followed],
    states: Mapping[str, JobState],
    watcher: Watcher,
    *,
    all_files: bool,
) -> dict[Trial, Measurement]:
    """The measurements of those that have ended.

    Many wait for hours: the files of those that never ran are looked at only if it is to be ``all_files``. They have
    some if SLURM forgot that it had started them.
    """
    ended, late = {}, {}
    for trial, one in followed.items():
        state = states.get(one.job)
        if state is not None and state.waits and not one.shown and not all_files:
            continue
        if (measurement := trial.measurement()) is not None:
            ended[trial] = measurement
        elif one.is_late(time.monotonic()):
            late[trial] = one
    return ended | _settled(recipe, late, states, watcher)


def _settled(
    recipe: LoadedRecipe, late: Mapping[Trial, _Followed], states: Mapping[str, JobState], watcher: Watcher
) -> dict[Trial, Measurement]:
    """The measurements of trials whose jobs ended without one, but for those that start again."""
    if not late:
        return {}
    manifest = manifest_of(recipe)
    settled: dict[Trial, Measurement] = {}
    again: dict[Trial, int] = {}  # how often they were started
    with manifest.decided_alone():
        find_lost(manifest, [trial.name for trial in late])
        known = histories(manifest.entries())
        for trial, one in late.items():
            history = known[trial.name]
            name = states[one.job].name if one.job in states else ""
            if (measurement := trial.measurement()) is not None:
                settled[trial] = measurement
            elif history.last.job not in ("", one.job):  # another process started it again
                one.follow_another(history.last.job)
            elif (name in RETRIED or one.refused_since) and history.starts < recipe.values.launch.attempts:
                again[trial] = history.starts
            else:
                why = _why(recipe, history.last, name)
                settled[trial] = write_failure(recipe, trial, STATUSES.get(name, Status.FAILED), why)
        starts = {trial.name: count for trial, count in again.items()}
        for submission in submissions(recipe, list(again), starts):
            try:
                jobs = _submit(recipe, manifest, submission)
            except SlurmError as error:
                settled |= _refused(recipe, {trial: late[trial] for trial in submission.trials}, error, watcher)
                continue
            for trial, job in jobs.items():
                lost = late[trial].job
                name = states[lost].name if lost in states else "lost"
                watcher.tell(f"{trial.name}: job {lost} ended as {name}; submitted again: job {job}")
                late[trial].follow_another(job)
    return settled


def _refused(
    recipe: LoadedRecipe, lost: Mapping[Trial, _Followed], error: SlurmError, watcher: Watcher
) -> dict[Trial, Measurement]:
    """The measurements of those whose jobs SLURM has not taken again for too long; the others are tried once more."""
    now = time.monotonic()
    settled = {}
    for trial, one in lost.items():
        if one.refused_since is None:
            watcher.tell(f"{trial.name}: job {one.job} was lost, and cannot be submitted again yet: {error}")
            one.refused_since = now
        one.ended_since, one.unknown_since = now, None  # so that it is late again after SETTLE_S
        if now - one.refused_since > SILENCE_S:
            told = f"job {one.job} was lost, and could not be submitted again for {SILENCE_S:g} s: {error}"
            settled[trial] = write_failure(recipe, trial, Status.FAILED, told)
    return settled


def _why(recipe: LoadedRecipe, entry: Entry, state: str) -> str:
    """What a trial's task printed last, then how SLURM says that its job ended."""
    if not state:
        return f"SLURM no longer knows job {entry.job}, which left no measurement"
    said = f"job {entry.job} ended as {state} and left no measurement"
    printed = [line for file in log_files(recipe, entry) if file.suffix == ".err" for line in _lines(file)]
    return "\n".join([*printed, said])


def note_ends(recipe: LoadedRecipe, ended: Mapping[Trial, Measurement]) -> None:
    """In the manifest, each once; not of a trial that another process has started again since."""
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
    """When; empty if it has not."""
    measurement = trial.measurement()
    return "" if measurement is None else measurement.finished


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").rstrip().splitlines()
