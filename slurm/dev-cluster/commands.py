"""Run programs and wait for conditions, always with a time-out."""

import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from time import monotonic, sleep

from errors import DevClusterError

POLL_S = 0.1
# The caller's environment is not passed on: a stray SLURM_CONF or MYSQL_HOST would lead to another cluster.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}


def run(*command: str, timeout_s: float = 20, environment: Mapping[str, str] = {}) -> str:
    """The standard output of ``command``; raises DevClusterError, with its last lines, if it fails or times out."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**ENVIRONMENT, **environment},
            cwd="/",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DevClusterError(f"`{shlex.join(command)}` had not ended after {timeout_s:g} s") from None
    except FileNotFoundError:
        raise DevClusterError(f"{command[0]} is not installed") from None
    if done.returncode != 0:
        message = "; ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise DevClusterError(f"`{shlex.join(command)}` ended with exit code {done.returncode}: {message}")
    return done.stdout


def succeeds(*command: str, timeout_s: float = 10, environment: Mapping[str, str] = {}) -> bool:
    try:
        run(*command, timeout_s=timeout_s, environment=environment)
    except DevClusterError:
        return False
    return True


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    """Whether ``condition()`` became true within ``timeout_s``."""
    deadline = monotonic() + timeout_s
    while not condition():
        if monotonic() > deadline:
            return False
        sleep(POLL_S)
    return True


def require_root() -> None:
    if os.geteuid() != 0:
        raise DevClusterError("network namespaces and daemons need root; run this as root")
