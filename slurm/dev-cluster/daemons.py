"""The cluster's daemons.

A process belongs to the cluster if it runs in one of the cluster's network namespaces; this includes jobs. So all of
them can be found without any record, and no other process is ever touched.
"""

import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic

from commands import ENVIRONMENT, run, succeeds, wait_until
from configuration import CLUSTER_NAME, Paths
from description import CONTROL
from errors import DevClusterError
from network import NAMESPACES, namespace, namespaces

START_TIMEOUT_S = 60
DATABASE_TIMEOUT_S = 120
CLIENTS = ("srun", "sbatch", "salloc")
ANSWER_TIMEOUT_S = 15  # time-out for a daemon that already runs

# The database listens only on its socket, in a private folder, and has a single user: root of this machine.
DATABASE_OPTIONS = (
    "--no-defaults",
    "--user=root",
    "--skip-networking",
    "--skip-log-bin",
    "--performance-schema=off",
    "--innodb-buffer-pool-size=64M",
    "--innodb-log-file-size=16M",
    "--innodb-lock-wait-timeout=900",
    "--innodb-flush-log-at-trx-commit=0",
)


def start_munge(paths: Paths) -> None:
    if not paths.munge_key.exists():
        run("mungekey", "--create", f"--keyfile={paths.munge_key}")
    munged = [
        "munged",
        "--foreground",
        "--force",  # needed to run as root
        f"--socket={paths.munge_socket}",
        f"--key-file={paths.munge_key}",
        f"--pid-file={paths.private}/munged.pid",
        f"--seed-file={paths.private}/munged.seed",
        f"--log-file={paths.logs}/munged.log",
    ]
    _ensure(paths, CONTROL, munged, ask=["munge", f"--socket={paths.munge_socket}", "--no-input"])


def start_database(paths: Paths) -> None:
    if not paths.database.exists():
        unfinished = paths.database.with_name("database.new")
        run("rm", "-rf", str(unfinished))
        install = ["mariadb-install-db", *DATABASE_OPTIONS, f"--datadir={unfinished}", "--skip-test-db"]
        run(*_inside(CONTROL), *install, "--auth-root-authentication-method=socket", timeout_s=DATABASE_TIMEOUT_S)
        unfinished.rename(paths.database)
    socket = f"--socket={paths.database_socket}"
    pid_file = f"--pid-file={paths.private}/mariadbd.pid"
    mariadbd = ["mariadbd", *DATABASE_OPTIONS, f"--datadir={paths.database}", socket, pid_file]
    _ensure(paths, CONTROL, mariadbd, ask=["mariadb", "--no-defaults", socket, "--execute=SELECT 1"])


def start_accounting(paths: Paths) -> None:
    sacctmgr = ["sacctmgr", "--immediate", "--noheader", "--parsable2"]
    list_clusters = [*sacctmgr, "show", "cluster", "format=cluster"]
    slurmdbd = ["slurmdbd", "-D"]
    _ensure(paths, CONTROL, slurmdbd, ask=list_clusters, environment={"MYSQL_UNIX_PORT": str(paths.database_socket)})
    if CLUSTER_NAME not in run(*list_clusters, environment=paths.client_environment).split():
        run(*sacctmgr, "add", "cluster", CLUSTER_NAME, environment=paths.client_environment)


def start_controller(paths: Paths) -> None:
    _ensure(paths, CONTROL, ["slurmctld", "-D"], ask=["scontrol", "ping"])


def start_nodes(paths: Paths, nodes: Iterable[str]) -> None:
    """Start a slurmd on each node, and wait until the controller can schedule jobs on all of them."""
    nodes = list(nodes)
    for node in nodes:
        if not running(node, "slurmd"):
            _start(paths, node, ["slurmd", "-D", "-N", node])
    resume_after = monotonic() + 5  # until then a node may recover by itself

    def all_usable() -> bool:
        unusable = [node for node, state in node_states(paths).items() if not usable(state)]
        if unusable and monotonic() > resume_after:
            resume = ["scontrol", "update", f"NodeName={','.join(unusable)}", "State=RESUME"]
            succeeds(*resume, environment=paths.client_environment)  # fails while a node is still starting
        return not unusable

    if not wait_until(all_usable, timeout_s=START_TIMEOUT_S):
        states = ", ".join(f"{node} is {state}" for node, state in node_states(paths).items() if not usable(state))
        raise DevClusterError(f"waited {START_TIMEOUT_S} s for all nodes to be idle; {states}; see {paths.logs}")


def node_states(paths: Paths) -> dict[str, str]:
    """Each node's state as `sinfo` reports it, such as ``idle``, or ``down*`` with a star if it does not answer."""
    lines = run("sinfo", "--Node", "--noheader", "--format=%N %T", environment=paths.client_environment).splitlines()
    return dict(line.split() for line in lines)


def usable(state: str) -> bool:
    return state in ("idle", "mixed", "allocated", "completing")


def running(host: str, program: str) -> bool:
    return bool(_pids(host, program))


def kill(host: str, program: str) -> None:
    """Kill ``program`` on ``host``, and wait until it has ended."""
    for pid in _pids(host, program):
        _kill(pid)
    if not wait_until(lambda: not running(host, program), timeout_s=ANSWER_TIMEOUT_S):
        raise DevClusterError(f"waited {ANSWER_TIMEOUT_S} s for {program} on {host} to end after SIGKILL")


def end_clients(paths: Paths) -> None:
    """End the users' srun, sbatch and salloc on this machine, which would poll the removed cluster for hours."""
    for signal_number, timeout_s in ((signal.SIGTERM, 2), (signal.SIGKILL, ANSWER_TIMEOUT_S)):
        for pid in _clients(paths):
            _kill(pid, signal_number)
        if wait_until(lambda: not _clients(paths), timeout_s=timeout_s):
            return
    raise DevClusterError(
        f"waited {ANSWER_TIMEOUT_S} s for clients to end after SIGKILL; still there: {_clients(paths)}"
    )


def kill_everything() -> None:
    """Kill every process in the cluster's namespaces, with SIGKILL, since their files are about to be deleted."""

    def all_gone() -> bool:
        remaining = [pid for name in namespaces() for pid in _pids_in(name)]
        for pid in remaining:
            _kill(pid)
        return not remaining

    if not wait_until(all_gone, timeout_s=START_TIMEOUT_S):
        pids = {name: _pids_in(name) for name in namespaces()}
        raise DevClusterError(f"waited {START_TIMEOUT_S} s for processes to end after SIGKILL; still there: {pids}")


def _ensure(
    paths: Paths, host: str, command: list[str], *, ask: list[str], environment: Mapping[str, str] = {}
) -> None:
    """Start a daemon unless it runs, and wait until it answers the client command ``ask``.

    A daemon that runs but does not answer is replaced.
    """
    program, output = command[0], _output(paths, host, command[0])
    problem = ""

    def answers() -> bool:
        nonlocal problem
        try:
            run(*ask, environment=paths.client_environment)
        except DevClusterError as error:
            problem = str(error)
        else:
            problem = ""
        return not problem

    if running(host, program):
        if wait_until(answers, timeout_s=ANSWER_TIMEOUT_S):
            return
        kill(host, program)
    process = _start(paths, host, command, environment)
    if not wait_until(lambda: process.poll() is not None or answers(), timeout_s=START_TIMEOUT_S):
        raise DevClusterError(f"waited {START_TIMEOUT_S} s for {program} to answer: {problem} (see {output})")
    if process.poll() is not None:
        message = "; ".join(output.read_text(errors="replace").strip().splitlines()[-3:])
        raise DevClusterError(f"{program} ended with exit code {process.returncode}: {message} (see {output})")


def _start(paths: Paths, host: str, command: list[str], environment: Mapping[str, str] = {}) -> subprocess.Popen:
    """Start ``command`` in the network namespace and with the host name of ``host``, on this machine's file system."""
    set_name = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
    with open(_output(paths, host, command[0]), "wb") as output:
        return subprocess.Popen(
            [*_inside(host), *set_name, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must not reach it
            env={**ENVIRONMENT, **paths.client_environment, **environment},
            cwd="/",
        )


def _kill(pid: int, signal_number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def _inside(host: str) -> list[str]:
    """A command prefix that enters the network of ``host``.

    `ip netns exec` would mount another /sys, in which slurmd finds no control groups.
    """
    return ["nsenter", f"--net={NAMESPACES / namespace(host)}"]


def _output(paths: Paths, host: str, program: str) -> Path:
    return paths.logs / f"{program}-{host}.out"


def _pids(host: str, program: str) -> list[int]:
    return [pid for pid in _pids_in(namespace(host)) if _name(pid) == program]


def _pids_in(name: str) -> list[int]:
    if not (NAMESPACES / name).exists():
        return []
    return [int(pid) for pid in run("ip", "netns", "pids", name).split()]


def _clients(paths: Paths) -> list[int]:
    """Process ids of SLURM clients whose SLURM_CONF names this cluster."""
    variable = b"SLURM_CONF=" + os.fsencode(paths.slurm_conf)
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if _name(pid) in CLIENTS and variable in _environment(pid).split(b"\0")]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # the process has just ended
        return b""


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # the process has just ended
        return ""
