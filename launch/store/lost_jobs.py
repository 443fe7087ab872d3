"""Jobs whose numbers were never recorded, because the submitting process died first."""

from collections.abc import Sequence
from dataclasses import replace

from launch.slurm.jobs import jobs_called
from launch.store.manifest import Entry, Manifest, State, histories


def find_lost(manifest: Manifest, names: Sequence[str]) -> None:
    """Complete the manifest where a process died between asking SLURM for a job and writing down which it is.

    Only within ``manifest.decided_alone()``, when nobody is asking.
    """
    entries = manifest.entries()
    known = histories(entries)
    last = [known[name].last for name in names if name in known]
    for submission in sorted({one.submission for one in last if one.state is State.SUBMITTING}):
        asked = [one.trial for one in entries if one.submission == submission and one.state is State.SUBMITTING]
        asked = list(dict.fromkeys(asked))  # they were asked for before if SLURM had refused them
        found = jobs_called(submission)
        if not found:
            entry = Entry(trial="", state=State.REFUSED, submission=submission, told="whoever asked for it died before")
            manifest.append([replace(entry, trial=name) for name in asked])
            continue
        job = max((one.split("_")[0] for one in found), key=int)
        ids = [f"{job}_{index}" for index in range(len(asked))] if len(asked) > 1 else [job]
        entry = Entry(trial="", state=State.SUBMITTED, submission=submission)
        manifest.append([replace(entry, trial=name, job=one) for name, one in zip(asked, ids, strict=True)])
