"""SLURM's own commands: what they print, or one line that says why they do not answer."""

import os
import subprocess
from collections.abc import Sequence

from auto3d.errors import InputError

COMMAND_S = 60.0
# Of the user's environment, what would have them list or cancel only some jobs.
_FILTERS = ("SACCT_", "SCANCEL_", "SINFO_", "SQUEUE_")


class SlurmError(InputError):
    """SLURM does not answer, or refuses."""


def run(command: Sequence[str], *, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
    """What came of ``command``; raises SlurmError where it is not there, fails, or takes longer than that."""
    name = command[0]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_FILTERS)}
    streams = {"capture_output": True, "text": True}
    try:
        done = subprocess.run(command, env=environment, timeout=timeout_s, check=False, **streams)
    except FileNotFoundError:
        raise SlurmError(f"there is no {name} here") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{name} did not answer within {timeout_s:g} s") from None
    if done.returncode:
        said = "; ".join((done.stderr + done.stdout).strip().splitlines())
        raise SlurmError(f"{name} failed: {said or 'it printed nothing'}")
    return done
