"""A cluster for this test, broken in many ways: `up` repairs it each time, and `down` leaves nothing behind."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.slurm.conftest import ALIAS, PROGRAM, SlurmCluster

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=True).stdout


def traces() -> dict[str, list[str] | str]:
    """Everything that a cluster could leave on a machine."""
    links = sorted(line.split()[1] for line in ip("-o", "link").splitlines())
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    daemons = ("slurm", "munged", "mariadbd", "srun", "sbatch")
    # without those that have ended and whose parent has not asked for their exit code yet: they have no command line
    running = [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if _read(path)]
    names = [name for process in running if (name := _read(process / "comm")).startswith(daemons)]
    return {
        "links": links,
        "routes": ip("route"),
        "namespaces": ip("netns").split(),
        "mounts": sorted(set(mounts)),
        "control groups": sorted(str(path) for path in Path("/sys/fs/cgroup").rglob("*") if path.is_dir()),
        "hosts": Path("/etc/hosts").read_text(),
        "files": sorted(str(path) for folder in ("/run", "/etc") for path in Path(folder).rglob("*slurm*")),
        "processes": sorted(names),
    }


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def kill(host: str, program: str, number: int = signal.SIGKILL) -> None:
    pids = [int(pid) for pid in ip("netns", "pids", f"auto3d-{host}").split()]
    found = [pid for pid in pids if _read(Path(f"/proc/{pid}/comm")) == program]
    assert found, f"no {program} on {host}"
    for pid in found:
        os.kill(pid, number)


def delete_namespace(folder: Path) -> None:
    for pid in ip("netns", "pids", "auto3d-n2").split():
        os.kill(int(pid), signal.SIGKILL)
    ip("netns", "delete", "auto3d-n2")


def forget_hosts(folder: Path) -> None:
    lines = Path("/etc/hosts").read_text().splitlines(keepends=True)
    Path("/etc/hosts").write_text("".join(line for line in lines if "auto3d" not in line))


def undo_half_of_the_database(folder: Path) -> None:
    kill("control", "mariadbd")
    kill("control", "slurmdbd")
    (folder / "private" / "database").rename(folder / "private" / "database.new")


BREAKAGES = {
    "munged killed": lambda folder: kill("control", "munged"),
    "database killed": lambda folder: kill("control", "mariadbd"),
    "slurmdbd killed": lambda folder: kill("control", "slurmdbd"),
    "slurmctld killed": lambda folder: kill("control", "slurmctld"),
    "slurmctld stopped": lambda folder: kill("control", "slurmctld", signal.SIGSTOP),
    "slurmd killed": lambda folder: kill("n1", "slurmd"),
    "namespace gone": delete_namespace,
    "switch gone": lambda folder: ip("link", "delete", "auto3d"),
    "link gone": lambda folder: ip("-netns", "auto3d-n1", "link", "delete", "eth0"),
    "link down": lambda folder: ip("-netns", "auto3d-n1", "link", "set", "eth0", "down"),
    "hosts forgotten": forget_hosts,
    "database half made": undo_half_of_the_database,
    "configuration gone": lambda folder: (folder / "slurm.conf").unlink(),
}


def test_up_mends_and_down_leaves_nothing(tmp_path_factory):
    if os.geteuid() != 0 or ALIAS.exists():
        pytest.skip("needs root, and a machine without a cluster: `make cluster-down`")
    folder = tmp_path_factory.mktemp("cluster")
    program = [*PROGRAM, "--folder", str(folder)]

    def run(verb: str, *arguments: str, code: int = 0) -> None:
        done = subprocess.run([*program, verb, *arguments], capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == code, f"{verb}\n{done.stdout}\n{done.stderr}"

    if shutil.which("slurmctld") is None:  # the first `up` on a machine installs packages, which stay
        run("up", "--nodes", "1")
        run("down")
    before = traces()
    try:
        run("up", "--nodes", "2")
        cluster = SlurmCluster(folder)
        for name, break_it in BREAKAGES.items():
            break_it(folder)
            run("up")
            run("status")
            hosts = cluster.run("srun", "-N2", "hostname", timeout_s=60).split()
            assert sorted(hosts) == ["n1", "n2"], name
        run("up", "--nodes", "3", code=2)  # another cluster than the one that is up
        waiting = subprocess.Popen(["srun", "-N2", "sleep", "600"], env=cluster.environment)
        subprocess.run(["sbatch", "--wrap", "sleep 600"], env=cluster.environment, cwd=folder, check=True, timeout=20)
    finally:
        run("down")
    assert waiting.wait(timeout=30) != 0
    assert traces() == before
    assert not folder.exists()
    run("down")  # there is nothing to do

    run("up", "--nodes", "1")  # and an `up` that was interrupted, at its slowest
    run("down")
    up = subprocess.Popen([*program, "up", "--nodes", "1"], stdout=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        up.wait(timeout=1.5)
    up.kill()
    up.wait(timeout=10)
    run("down")
    assert traces() == before
