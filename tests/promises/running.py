"""Runs commands as a user does: in a process of their own, in a folder of their own; preloaded.py makes them quick."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import cache as cached
from pathlib import Path
from tempfile import TemporaryFile

from tests.promises.preloaded import Preloaded

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
TIMEOUT_S = 280


preloaded = cached(Preloaded.of)


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
    captures (default: the one that all tests share), and ``variables`` are added to the environment. The command may
    also be a script of Python.
    """
    environment = {**os.environ, **(variables or {}), "PATH": f"{programs}:{os.environ['PATH']}"}
    if cache is not None:
        environment["AUTO3D_CACHE"] = str(cache)
    words = shlex.split(command.replace("PROGRAMS/", f"{programs}/"), comments=True)
    with TemporaryFile() as output:
        is_script = words[0].endswith(".py")
        if is_script or words[0] in ("auto3d", "torchrun"):
            if not is_script:
                words[0] = str(programs / words[0])
            ended = preloaded(programs).run(words, folder, environment, output.fileno(), timeout_s)
        else:
            ended = subprocess.run(
                words,
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
                check=False,
            ).returncode
        output.seek(0)
        printed = output.read().decode()
    assert ended == code, f"{command}: exit code {ended}\n{printed[-3000:]}"
    return printed
