"""Files and folders of runs/: the user's alone, each file written whole or not at all."""

import os
import stat
from pathlib import Path

from auto3d.errors import InputError

RUNS = Path("runs")


class FolderError(InputError):
    """A folder in which others could change what is run."""


def private_folder(path: Path) -> Path:
    """Make ``path``, and what leads to it in runs/, this user's alone: there are pickled calls in it.

    Raises FolderError where others could put other files in their place.
    """
    runs, whole = RUNS.resolve(), path.resolve()
    if runs in whole.parents:
        RUNS.mkdir(mode=0o755, exist_ok=True)
        mode = runs.stat().st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
            raise FolderError(f"{runs}: others can put files there that you would run; this ends it: chmod go-w {RUNS}")
    for folder in reversed([whole, *(parent for parent in whole.parents if runs in parent.parents)]):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise FolderError(f"{folder}: belongs to another user, who could change what is run from it")
        folder.chmod(0o700)
    return path


def write_whole(file: Path, text: str) -> None:
    """Write so that a reader sees the old content or the new, never half of it, even after a crash."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with partial.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    except OSError as error:  # such as a full disk, of which the error itself does not name the file
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(file)) from error
