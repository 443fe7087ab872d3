"""Jobs whose ids were never recorded, because the submitting process died first."""

from collections.abc import Sequence
from dataclasses import replace

from launch.slurm.jobs import jobs_called
from launch.store.manifest import Entry, Manifest, State, histories


def find_lost(manifest: Manifest, names: Sequence[str]) -> None:
    """Complete the manifest where a process died between submitting a job and recording its id.

    ``names`` are trials. Call this only within ``manifest.decided_alone()``, when no other process submits.
    """
    entries = manifest.entries()
    known = histories(entries)
    last = [known[name].last for name in names if name in known]
    for submission in sorted({recorded.submission for recorded in last if recorded.state is State.SUBMITTING}):
        trials = [
            recorded.trial
            for recorded in entries
            if recorded.submission == submission and recorded.state is State.SUBMITTING
        ]
        trials = list(dict.fromkeys(trials))  # a submission that SLURM refused earlier lists them more than once
        jobs = jobs_called(submission)
        if not jobs:
            reason = "the submitting process died before it submitted"
            entry = Entry(trial="", state=State.REFUSED, submission=submission, told=reason)
            manifest.append([replace(entry, trial=name) for name in trials])
            continue
        job = max((job_id.split("_")[0] for job_id in jobs), key=int)
        ids = [f"{job}_{index}" for index in range(len(trials))] if len(trials) > 1 else [job]
        entry = Entry(trial="", state=State.SUBMITTED, submission=submission)
        manifest.append([replace(entry, trial=name, job=job_id) for name, job_id in zip(trials, ids, strict=True)])
