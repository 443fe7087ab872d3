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
    for submission in sorted({one.submission for one in last if one.state is State.SUBMITTING}):
        trials = [one.trial for one in entries if one.submission == submission and one.state is State.SUBMITTING]
        trials = list(dict.fromkeys(trials))  # a submission that SLURM refused earlier lists them more than once
        jobs = jobs_called(submission)
        if not jobs:
            reason = "the submitting process died before it submitted"
            entry = Entry(trial="", state=State.REFUSED, submission=submission, told=reason)
            manifest.append([replace(entry, trial=name) for name in trials])
            continue
        job = max((one.split("_")[0] for one in jobs), key=int)
        ids = [f"{job}_{index}" for index in range(len(trials))] if len(trials) > 1 else [job]
        entry = Entry(trial="", state=State.SUBMITTED, submission=submission)
        manifest.append([replace(entry, trial=name, job=one) for name, one in zip(trials, ids, strict=True)])
