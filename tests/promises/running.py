"""Runs commands as a user does: in a process of their own, in a folder of their own."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
TIMEOUT_S = 280


def run(
    command: str,
    folder: Path,
    *,
    programs: Path = PROGRAMS,
    cache: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    code: int = 0,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Standard output and standard error of ``command`` in ``folder``, which must end with the exit code ``code``.

    ``programs`` is the folder with `auto3d`, for which PROGRAMS stands in ``command`` too; ``cache`` is that of
    captures (default: the one that all tests share), and ``variables`` are added to the environment.
    """
    environment = {**os.environ, **(variables or {}), "PATH": f"{programs}:{os.environ['PATH']}"}
    if cache is not None:
        environment["AUTO3D_CACHE"] = str(cache)
    done = subprocess.run(
        shlex.split(command.replace("PROGRAMS/", f"{programs}/"), comments=True),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout[-3000:]}"
    return done.stdout
