"""Run SLURM's own commands; a command that fails raises an error of one line."""

import os
import subprocess
from collections.abc import Sequence

from auto3d.errors import InputError

COMMAND_S = 60.0
# Variables of the user's environment that would restrict the commands to some jobs.
_FILTERS = ("SACCT_", "SCANCEL_", "SINFO_", "SQUEUE_")


class SlurmError(InputError):
    """SLURM does not answer, or it refuses the request."""


class JobLimitError(SlurmError):
    """SLURM accepts no more jobs of this user now: an account or a quality of service limits their number."""


def run(command: Sequence[str], *, limit_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
    """The result of ``command``; raises SlurmError if it is not installed, fails, or exceeds ``limit_s``."""
    name = command[0]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_FILTERS)}
    try:
        done = subprocess.run(command, env=environment, timeout=limit_s, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        raise SlurmError(f"{name} is not installed here") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{name} did not answer within {limit_s:g} s") from None
    if done.returncode:
        output = "; ".join((done.stderr + done.stdout).strip().splitlines())
        raise SlurmError(f"{name} failed: {output or 'it printed nothing'}")
    return done
