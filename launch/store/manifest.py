"""The manifest of a recipe: an append-only file with a line for every start and every end of a trial.

A line is written at once under a lock, so writers do not mix; a line that a crash left incomplete is ignored.
"""

import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from json import dumps
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from auto3d.errors import InputError
from launch.store.files import private_folder

LOCK_S = 600.0  # longer than any submission, even if SLURM's commands do not answer
POLL_S = 0.1


class ManifestError(InputError):
    """Another process has held the manifest for too long."""


class State(StrEnum):
    SUBMITTING = "submitting"  # recorded before sbatch runs, so that we can never lose track of a job
    SUBMITTED = "submitted"  # SLURM has accepted ``job``
    REFUSED = "refused"  # SLURM has refused, so there is no job
    STARTED = "started"  # a start on this machine, without SLURM
    ENDED = "ended"  # ``told`` is the status
    CANCELLED = "cancelled"  # the user has asked for this; SLURM confirms it later


WITH_ALL = "with all"  # told of a cancelled trial: the user has cancelled all that was under way


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the manifest."""

    trial: str  # name
    state: State
    job: str = ""  # SLURM's id, such as 123 or 123_4
    submission: str = ""  # name of the job and of its folder
    told: str = ""  # why SLURM refused, the status at the end, or WITH_ALL
    at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


_adapter = TypeAdapter(Entry)


@dataclass(frozen=True)
class Manifest:
    """The manifest in ``file``, which need not exist yet."""

    file: Path

    def entries(self) -> list[Entry]:
        """All entries, the oldest first."""
        try:
            lines = self.file.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        return [entry for line in lines if (entry := _entry(line)) is not None]

    def append(self, entries: Sequence[Entry]) -> None:
        """Append ``entries``; once this returns they survive a crash."""
        private_folder(self.file.parent)
        lines = b"".join(dumps(asdict(entry)).encode() + b"\n" for entry in entries)
        descriptor = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, (b"\n" if torn else b"") + lines)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def decided_alone(self) -> Iterator[None]:
        """A lock for deciding what to start and starting it; raises ManifestError if it is not free within LOCK_S."""
        deadline = time.monotonic() + LOCK_S
        private_folder(self.file.parent)
        with self.file.with_name("deciding").open("a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise ManifestError(
                            f"{lock.name}: another process has been starting trials for {LOCK_S:g} s; try again later"
                        ) from None
                time.sleep(POLL_S)
            yield


def _entry(line: bytes) -> Entry | None:
    try:
        return _adapter.validate_json(line)
    except ValidationError:
        return None


@dataclass(frozen=True)
class History:
    """One trial in the manifest."""

    last: Entry
    starts: int  # how many times the trial was started


def histories(entries: Sequence[Entry]) -> dict[str, History]:
    """The history of each trial in ``entries``, by name."""
    known: dict[str, History] = {}
    for entry in entries:
        earlier = known.get(entry.trial)
        started = entry.state in (State.SUBMITTED, State.STARTED)
        known[entry.trial] = History(entry, (earlier.starts if earlier else 0) + started)
    return known


def names_of_jobs(entries: Iterable[Entry]) -> dict[str, str]:
    """The names of the jobs in ``entries``, by id; a job has the name of its submission."""
    return {entry.job: entry.submission for entry in entries if entry.job}
