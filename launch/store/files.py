"""Files and folders of runs/: only the user can access them, and a file is written completely or not at all."""

import os
import stat
from pathlib import Path

from auto3d.errors import InputError

RUNS = Path("runs")


class FolderError(InputError):
    """A folder in which other users could change what we run."""


def private_folder(path: Path) -> Path:
    """Create ``path`` and its parents in runs/ with access for this user only, since pickled calls are stored there.

    Returns ``path``. Raises FolderError if other users could replace files in it.
    """
    runs, whole = RUNS.resolve(), path.resolve()
    if runs in whole.parents:
        RUNS.mkdir(mode=0o755, exist_ok=True)
        mode = runs.stat().st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
            raise FolderError(
                f"{runs}: other users can put files there that you would run; to forbid it: chmod go-w {RUNS}"
            )
    for folder in reversed([whole, *(parent for parent in whole.parents if runs in parent.parents)]):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise FolderError(f"{folder}: belongs to another user, who could change what you run from it")
        folder.chmod(0o700)
    return path


def write_whole(file: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old content or the new, never a part, even after a crash."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with partial.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    except OSError as error:  # an error such as a full disk does not name the file by itself
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(file)) from error
