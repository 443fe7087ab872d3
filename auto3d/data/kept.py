"""Folders of results that are made once and read by every process: complete, or not there at all.

The name of a folder is a digest of everything that its content depends on. One process makes it, which holds a lock
that the kernel releases however that process ends; the others wait as long as it makes progress.
"""

import fcntl
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from auto3d.capture.cache import default_folder
from auto3d.data.interface import DataError

_ABOUT = "about.json"  # written last, so that a folder with it is complete
_POLL_S = 0.05
Tick = Callable[[], None]  # says that there is progress; call it every few seconds


def kept(
    folder: Path | None,
    identity: Mapping[str, Any],
    make: Callable[[Path, Tick], Mapping[str, Any]],
    *,
    wait_s: float,
) -> tuple[Path, dict[str, Any]]:
    """The folder of ``identity``, and what ``make`` returned, which filled it now or earlier.

    It is in ``folder``, which only this user may write to (None: in the user's cache). Raises DataError if another
    process makes it and makes no progress for ``wait_s``.
    """
    folder = _private(folder or default_folder() / "data")
    whole = folder / sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    if (about := _read(whole)) is not None:
        return whole, about
    with (folder / f"{whole.name}.lock").open("a+") as lock:
        _acquire(lock, wait_s, what=f"prepare the data in {whole}")
        if (about := _read(whole)) is None:
            about = _make(whole, make, tick=lambda: os.utime(lock.fileno()))
    return whole, about


def identity_of(files: Sequence[str]) -> list[tuple[str, int, int]]:
    """The path, size and time of modification (ns) of each file, and of each file in a folder.

    Raises DataError for a file that cannot be read.
    """
    try:
        return [(str(path), (state := path.stat()).st_size, state.st_mtime_ns) for path in files_in(files)]
    except OSError as error:
        raise DataError(f"files: {error.filename}: {error.strerror}") from None


def files_in(names: Sequence[str]) -> list[Path]:
    """The resolved paths of the files ``names``, and of all files in the folders among them."""
    files = []
    for path in (Path(name).resolve() for name in names):
        files += sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return files


def _private(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise DataError(f"{folder}: other users could change the data; it takes a folder that only you write to")
    except OSError as error:
        raise DataError(f"{folder}: prepared data cannot be kept there: {error.strerror}") from None
    return folder


def _read(whole: Path) -> dict[str, Any] | None:
    try:
        about: dict[str, Any] = json.loads((whole / _ABOUT).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{whole}: not readable: {error}; remove the folder, and it is made again") from None
    return about


def _acquire(lock: Any, wait_s: float, *, what: str) -> None:
    """Lock ``lock``. Raises DataError if its holder reports no progress for ``wait_s``."""
    since = monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            idle_s = min(monotonic() - since, time() - os.fstat(lock.fileno()).st_mtime)
            if idle_s > wait_s:
                raise DataError(f"waited {wait_s:g} s for another process to {what}, which made no progress") from None
            sleep(_POLL_S)
        except OSError as error:
            raise DataError(f"{lock.name}: this file system has no locks: {error.strerror}") from None
        else:
            return


def _make(whole: Path, make: Callable[[Path, Tick], Mapping[str, Any]], *, tick: Tick) -> dict[str, Any]:
    """Fill a new folder and rename it to ``whole``, unless a process of another machine did so meanwhile."""
    ours = f"{whole.name}.partial.{socket.gethostname()}"
    for left in whole.parent.glob(f"{ours}.*"):  # its process is gone: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    partial = whole.with_name(f"{ours}.{os.getpid()}")
    try:
        tick()
        partial.mkdir(mode=0o700)
        about = json.loads(json.dumps(make(partial, tick)))
        with (partial / _ABOUT).open("w") as stream:
            json.dump(about, stream)
        for file in partial.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        partial.rename(whole)
    except OSError as error:
        if (theirs := _read(whole)) is not None:
            return theirs
        raise DataError(f"{partial}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return about
