"""Running programs and waiting for things, never without a time-out that says what was waited for."""

import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from time import monotonic, sleep

from errors import DevClusterError

POLL_S = 0.1
# Nothing of the caller's environment: a stray SLURM_CONF or MYSQL_HOST would lead to somebody else's cluster.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}


def run(*command: str, timeout_s: float = 20, environment: Mapping[str, str] = {}) -> str:
    """The standard output of ``command``; raises DevClusterError with its last words if it fails or takes too long."""
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
        raise DevClusterError(f"`{shlex.join(command)}` was not done after {timeout_s:g} s") from None
    except FileNotFoundError:
        raise DevClusterError(f"{command[0]} is not installed") from None
    if done.returncode != 0:
        words = "; ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise DevClusterError(f"`{shlex.join(command)}` ended with exit code {done.returncode}: {words}")
    return done.stdout


def succeeds(*command: str, timeout_s: float = 10, environment: Mapping[str, str] = {}) -> bool:
    try:
        run(*command, timeout_s=timeout_s, environment=environment)
    except DevClusterError:
        return False
    return True


def wait_until(true: Callable[[], bool], *, timeout_s: float) -> bool:
    """Whether ``true()`` became true within ``timeout_s``."""
    deadline = monotonic() + timeout_s
    while not true():
        if monotonic() > deadline:
            return False
        sleep(POLL_S)
    return True


def require_root() -> None:
    if os.geteuid() != 0:
        raise DevClusterError("network namespaces and daemons need root; run it as root")
