"""Jobs of SLURM followed to their ends: a trial ends when its measurement file appears.

Where a job ends without a measurement, SLURM's state of the job says why; a trial that lost its nodes starts again.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from auto3d.runtime.measurement import Measurement, Status
from launch.executors.submit import cancel_listed_again, submissions, submit_one
from launch.recipe.load import LoadedRecipe
from launch.slurm.client import SlurmError
from launch.slurm.jobs import STATES_S, JobState, cancel, job_states
from launch.store.lost_jobs import find_lost
from launch.store.manifest import Entry, State, histories, names_of_jobs
from launch.store.trials import Trial, log_files, manifest_of
from launch.store.watcher import Ended, Watcher, interrupts_noted, write_failure

POLL_S = 1.0  # of the trials' files
LONGEST_STATES_S = 60.0  # at most, between two looks at the states of jobs
SPARED = 20  # times as long as it took to answer, it is not asked again
SETTLE_S = 20.0  # from the end of a job until its last file is seen here
UNKNOWN_S = 120.0  # until a job that SLURM does not know is given up
SILENCE_S = 1800.0  # until we give up on a SLURM that does not answer; its jobs are not given up

# Ends that are not the trial's fault.
RETRIED = ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED")
STATUSES = {"OUT_OF_MEMORY": Status.OOM, "TIMEOUT": Status.TIMEOUT, "DEADLINE": Status.TIMEOUT}


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


def follow_jobs(recipe: LoadedRecipe, jobs: Mapping[Trial, str], watcher: Watcher) -> None:
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
