"""The manifest of a recipe: every start of a trial and every end, a line each, only ever appended.

A line is one write under a lock, so writers do not mix; a line that a crash left half written is no entry.
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

LOCK_S = 600.0  # longer than any submission, also where SLURM's commands do not answer
POLL_S = 0.1


class ManifestError(InputError):
    """A manifest that another process holds for too long."""


class State(StrEnum):
    SUBMITTING = "submitting"  # written before SLURM is asked, so that no job can be unknown to us
    SUBMITTED = "submitted"  # as ``job``
    REFUSED = "refused"  # by SLURM: there is no job
    STARTED = "started"  # here, without SLURM
    ENDED = "ended"  # with the status ``told``
    CANCELLED = "cancelled"  # as the user asked; SLURM's own word follows


@dataclass(frozen=True, kw_only=True)
class Entry:
    trial: str
    state: State
    job: str = ""  # SLURM's, as 123 or 123_4
    submission: str = ""  # names the job and its folder
    told: str = ""
    at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


_adapter = TypeAdapter(Entry)


@dataclass(frozen=True)
class Manifest:
    file: Path

    def entries(self) -> list[Entry]:
        try:
            lines = self.file.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        return [entry for line in lines if (entry := _entry(line)) is not None]

    def append(self, entries: Sequence[Entry]) -> None:
        """Write all of ``entries`` so that they outlive a crash from then on."""
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
        """While one process decides what to start and starts it, others wait; raises ManifestError after LOCK_S."""
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
                            f"{lock.name}: another process has been starting trials for {LOCK_S:g} s; try again"
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
    """What the manifest knows of one trial."""

    last: Entry
    starts: int  # how often it was started


def histories(entries: Sequence[Entry]) -> dict[str, History]:
    """By the name of the trial."""
    found: dict[str, History] = {}
    for entry in entries:
        known = found.get(entry.trial)
        started = entry.state in (State.SUBMITTED, State.STARTED)
        found[entry.trial] = History(entry, (known.starts if known else 0) + started)
    return found


def names_of_jobs(entries: Iterable[Entry]) -> dict[str, str]:
    """By their ids: a job is called as its submission."""
    return {entry.job: entry.submission for entry in entries if entry.job}
