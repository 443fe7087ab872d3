"""Follow jobs of SLURM to their ends: a trial has ended when its measurement file appears.

If a job ends without a measurement, SLURM's state of the job says why; a trial that lost its nodes is submitted again.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from auto3d.runtime.measurement import Measurement, Status
from auto3d.words import counted
from launch.executors.submit import cancel_listed_again, most_at_once, submissions, submit, submit_one
from launch.recipe.load import LoadedRecipe
from launch.slurm.client import SlurmError
from launch.slurm.jobs import STATES_S, JobState, cancel, job_states
from launch.store.ends import record_ends
from launch.store.lost_jobs import find_lost
from launch.store.manifest import WITH_ALL, Entry, histories, names_of_jobs
from launch.store.trials import Trial, log_files, manifest_of
from launch.store.watcher import Ended, Watcher, interrupts_noted, write_failure

POLL_S = 1.0  # time between two looks for measurement files
LONGEST_STATES_S = 60.0  # longest time between two polls of job states
POLL_BACKOFF = 20  # wait 20 times as long as SLURM's last answer took
MORE_S = 60.0  # longest time between two attempts to submit trials that SLURM had no room for
SETTLE_S = 20.0  # how long the files of an ended job may take to appear on this node
UNKNOWN_S = 120.0  # a job that SLURM does not know for this long counts as lost
SILENCE_S = 1800.0  # stop following if SLURM does not answer for this long; its jobs may go on

# Ends of jobs that are not the trial's fault.
RETRIED = ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED")
STATUSES = {"OUT_OF_MEMORY": Status.OOM, "TIMEOUT": Status.TIMEOUT, "DEADLINE": Status.TIMEOUT}


@dataclass
class _Followed:
    """The job of a trial, and since when (time.monotonic(); None: not) it has been in a state that must not last."""

    job: str
    shown: str = ""  # the last state that the watcher was shown
    pending_since: float | None = None
    ended_since: float | None = None
    unknown_since: float | None = None
    refused_since: float | None = None  # SLURM has refused to take the trial again since then

    def is_late(self, now: float) -> bool:
        """Whether a measurement would have appeared by now, so that none will."""
        ended = self.ended_since is not None and now - self.ended_since > SETTLE_S
        return ended or (self.unknown_since is not None and now - self.unknown_since > UNKNOWN_S)

    def follow_another(self, job: str) -> None:
        self.job, self.shown = job, ""
        self.pending_since = self.ended_since = self.unknown_since = self.refused_since = None


def follow_jobs(
    recipe: LoadedRecipe,
    jobs: Mapping[Trial, str],
    watcher: Watcher,
    *,
    waiting: Sequence[Trial] = (),
    known: Mapping[Trial, Measurement],
) -> None:
    """Follow ``jobs`` until each trial has ended; trials that lost their nodes start up to launch.attempts times.

    Trials that are ``waiting`` are submitted as others end; they may have the measurements ``known``, of earlier runs.
    SIGINT and SIGTERM raise KeyboardInterrupt; the jobs go on.
    """
    followed = {trial: _Followed(job) for trial, job in jobs.items()}
    waiting, total, room = list(waiting), len(jobs) + len(waiting), _Room()
    begun = len(manifest_of(recipe).entries())
    number, answered_at, asked_at, pause_s = 0, time.monotonic(), -STATES_S, STATES_S
    states: dict[str, JobState] = {}
    told: set[str] = set()  # lines about pending jobs
    with interrupts_noted() as interrupted:
        while followed or waiting:
            if interrupted():
                raise KeyboardInterrupt
            polls = time.monotonic() - asked_at >= pause_s
            if polls:
                asked_at = time.monotonic()
                try:
                    names, wanted = (
                        names_of_jobs(manifest_of(recipe).entries()),
                        {followed_job.job for followed_job in followed.values()},
                    )
                    states = job_states({job: name for job, name in names.items() if job in wanted})
                    answered_at = time.monotonic()
                except SlurmError as error:
                    if time.monotonic() - answered_at > SILENCE_S:
                        again = recipe.follow_up("resume")
                        raise SlurmError(
                            f"{error}, for {SILENCE_S:g} s; jobs may still run; to follow them again: {again}"
                        ) from None
                else:
                    pause_s = min(max(STATES_S, POLL_BACKOFF * (answered_at - asked_at)), LONGEST_STATES_S)
                    for trial, followed_job in followed.items():
                        _look(recipe, trial, followed_job, states.get(followed_job.job), watcher)
                    _tell_why_pending(followed.values(), states, told, watcher)
            ended = _ended(recipe, followed, states, watcher, all_files=polls)
            record_ends(recipe, ended)
            for trial, measurement in ended.items():
                number += 1
                del followed[trial]
                watcher.end(Ended(trial, measurement, number, total))
            due = room.is_due(len(ended))
            if waiting and due and _all_cancelled(recipe, begun):
                watcher.tell(f"{counted(len(waiting), 'trial')} will not be submitted, since all were cancelled")
                total, waiting = total - len(waiting), []
            if waiting and due:
                more = room.submit(recipe, waiting, known, watcher, live=len(followed))
                followed |= {trial: _Followed(job) for trial, job in more.items()}
                waiting = [trial for trial in waiting if trial not in more]
            if followed or waiting:
                time.sleep(POLL_S)
    with suppress(SlurmError):
        cancel_listed_again(recipe)
    if interrupted():  # the signal came just after the last trial ended
        raise KeyboardInterrupt


class _Room:
    """When to try again to submit what SLURM had no room for: soon after a job has ended, and then less and less often.

    A job stays in SLURM's queue for some seconds after the end of its trial.
    """

    def __init__(self) -> None:
        self._ended = 0  # jobs that have ended since trials were last submitted
        self._pause_s = STATES_S
        self._tried_at = self._submitted_at = time.monotonic()

    def is_due(self, ended: int) -> bool:
        """Whether to try now; ``ended`` jobs have just ended."""
        self._ended += ended
        if ended:
            self._pause_s = 0.0
        return time.monotonic() - self._tried_at >= self._pause_s

    def submit(
        self,
        recipe: LoadedRecipe,
        waiting: Sequence[Trial],
        known: Mapping[Trial, Measurement],
        watcher: Watcher,
        *,
        live: int,
    ) -> dict[Trial, str]:
        """The jobs of those ``waiting`` trials that SLURM takes now; raises SlurmError if it has not for too long."""
        jobs: dict[Trial, str] = {}
        problem = "SLURM takes no more jobs"
        try:
            jobs = submit(recipe, waiting, known, watcher, live=live, portion=max(1, self._ended))
        except SlurmError as error:
            problem = str(error)
        self._tried_at = time.monotonic()
        if jobs:
            self._ended, self._pause_s, self._submitted_at = 0, STATES_S, self._tried_at
        else:
            self._pause_s = min(max(STATES_S, 2 * self._pause_s), MORE_S)
        if live or jobs:
            self._submitted_at = self._tried_at
        elif self._tried_at - self._submitted_at > SILENCE_S:
            again = recipe.follow_up("resume")
            raise SlurmError(
                f"{problem}, for {SILENCE_S:g} s; {counted(len(waiting), 'trial')} not submitted; to go on: {again}"
            )
        return jobs


def _all_cancelled(recipe: LoadedRecipe, begun: int) -> bool:
    """Whether the user has cancelled all trials since the manifest had ``begun`` entries."""
    return any(entry.told == WITH_ALL for entry in manifest_of(recipe).entries()[begun:])


def _look(
    recipe: LoadedRecipe, trial: Trial, followed_job: _Followed, state: JobState | None, watcher: Watcher
) -> None:
    """Update ``followed_job`` with the job's ``state``, and cancel a job that has been pending for too long."""
    now = time.monotonic()
    followed_job.unknown_since = (followed_job.unknown_since or now) if state is None else None
    followed_job.ended_since = (followed_job.ended_since or now) if state is not None and state.ended else None
    followed_job.pending_since = (followed_job.pending_since or now) if state is not None and state.pending else None
    if state is None:
        return
    if state.running and followed_job.shown != "running":
        watcher.start(trial)
        followed_job.shown = "running"
    if state.pending and followed_job.shown == "running":
        watcher.tell(f"{trial.name}: SLURM requeued job {followed_job.job}; it will start again")
        followed_job.shown = "pending"
    limit_s = recipe.values.launch.queue_timeout_s
    if followed_job.pending_since is not None and now - followed_job.pending_since > limit_s:
        with suppress(SlurmError):  # the job may have ended just now
            cancel([followed_job.job])
        reason = f"job {followed_job.job} was pending for {limit_s:g} s ({state.why})"
        with manifest_of(recipe).decided_alone():
            if trial.measurement() is None:
                write_failure(trial, Status.TIMEOUT, reason)


def _tell_why_pending(
    followed: Collection[_Followed], states: Mapping[str, JobState], told: set[str], watcher: Watcher
) -> None:
    """Tell once of each reason for which jobs of an array have been pending since the last look or longer."""
    now = time.monotonic()
    for followed_job in followed:
        state = states.get(followed_job.job)
        if state is None or followed_job.pending_since is None or now - followed_job.pending_since < STATES_S:
            continue
        line = f"job {followed_job.job.split('_')[0]} is pending; SLURM's reason: {state.why}"
        if line not in told:
            told.add(line)
            watcher.tell(line)


def _ended(
    recipe: LoadedRecipe,
    followed: Mapping[Trial, _Followed],
    states: Mapping[str, JobState],
    watcher: Watcher,
    *,
    all_files: bool,
) -> dict[Trial, Measurement]:
    """The measurements of the trials that have ended.

    Jobs may be pending for hours, so the files of those that never ran are read only with ``all_files``. They exist if
    SLURM forgot that it had started the job.
    """
    ended, late = {}, {}
    for trial, followed_job in followed.items():
        state = states.get(followed_job.job)
        if state is not None and state.pending and not followed_job.shown and not all_files:
            continue
        if (measurement := trial.measurement()) is not None:
            ended[trial] = measurement
        elif followed_job.is_late(time.monotonic()):
            late[trial] = followed_job
    return ended | _settled(recipe, late, states, watcher)


def _settled(
    recipe: LoadedRecipe, late: Mapping[Trial, _Followed], states: Mapping[str, JobState], watcher: Watcher
) -> dict[Trial, Measurement]:
    """Measurements for the ``late`` trials, whose jobs left none, except those that are submitted again here."""
    if not late:
        return {}
    manifest = manifest_of(recipe)
    settled: dict[Trial, Measurement] = {}
    again: dict[Trial, int] = {}  # trials to submit again, and how many times they were started
    with manifest.decided_alone():
        find_lost(manifest, [trial.name for trial in late])
        known = histories(manifest.entries())
        for trial, followed_job in late.items():
            history = known[trial.name]
            name = states[followed_job.job].name if followed_job.job in states else ""
            if (measurement := trial.measurement()) is not None:
                settled[trial] = measurement
            elif history.last.job not in ("", followed_job.job):  # another process submitted it again
                followed_job.follow_another(history.last.job)
            elif (name in RETRIED or followed_job.refused_since) and history.starts < recipe.values.launch.attempts:
                again[trial] = history.starts
            else:
                reason = _reason(recipe, history.last, name)
                settled[trial] = write_failure(trial, STATUSES.get(name, Status.FAILED), reason)
        starts = {trial.name: count for trial, count in again.items()}
        for submission in submissions(recipe, list(again), starts, most_at_once(recipe)):
            try:
                jobs = submit_one(recipe, manifest, submission)
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
    """Measurements for those ``lost`` trials that SLURM has refused for too long; the others are retried later."""
    now = time.monotonic()
    settled = {}
    for trial, followed_job in lost.items():
        if followed_job.refused_since is None:
            watcher.tell(f"{trial.name}: job {followed_job.job} was lost and cannot be submitted again yet: {error}")
            followed_job.refused_since = now
        followed_job.ended_since, followed_job.unknown_since = now, None  # the trial is late again after SETTLE_S
        if now - followed_job.refused_since > SILENCE_S:
            reason = f"job {followed_job.job} was lost and could not be submitted again for {SILENCE_S:g} s: {error}"
            settled[trial] = write_failure(trial, Status.FAILED, reason)
    return settled


def _reason(recipe: LoadedRecipe, entry: Entry, state: str) -> str:
    """Why a job left no measurement: the output of its tasks, then SLURM's state of it."""
    if not state:
        return f"SLURM no longer knows job {entry.job}, which left no measurement"
    end = f"job {entry.job} ended as {state} and left no measurement"
    printed = [line for file in log_files(recipe, entry) if file.suffix == ".err" for line in _lines(file)]
    return "\n".join([*printed, end])


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").rstrip().splitlines()
