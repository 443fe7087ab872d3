"""Faults in sweeps and trainings on the four-node cluster: python -m tests.slurm.faults [times]

Writes results/slurm/faults.md. Each fault strikes at a random moment while ranks iterate; then `auto3d resume` is
called until all is done, and what is left is looked at.
"""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from safetensors.torch import load_file
from tabulate import tabulate

from launch.store.manifest import histories
from tests.slurm.conftest import PROGRAM, SlurmCluster, found_cluster, wait_for, why_no_cluster
from tests.slurm.sweeps import SAVED_S, Sweeps, ranks_on
from tests.slurm.test_dev_cluster import pids

TIMES = 2
FILE = Path("results/slurm/faults.md")
RESUMES = 3  # a sweep that needs more has a fault
DRIVER_S = 400  # a driver that runs longer hangs
SWEEP = ["search.micro_batch_size=[2,4]", "measure.iterations=2000", "training.timeout_s=10"]
ITERATIONS, EVERY = 2000, 500  # iterations of a training, and between its checkpoints
LONG = 20_000  # SLURM looks at the limits of jobs twice a minute
TRAINING = ["plan.pp=2", "plan.micro_batch_size=4", "training.timeout_s=10", f"training.checkpoint_every={EVERY}"]
HERE = ["launch.executor=local", "cluster.nodes=1", "cluster.devices_per_node=2"]
HEADING = """\
# Faults in sweeps and trainings on SLURM

    make cluster-up NODES=4
    .venv/bin/python -m tests.slurm.faults

On the development cluster: four nodes of one machine, Debian's SLURM. A sweep of two trials on two nodes each, or a
training on two nodes with a checkpoint every {every} iterations, is struck at a random moment while its
ranks iterate. Then `auto3d resume` is called until all trials are ok and no job is left. As it should be: no command
hangs; what it says before is true; at last each trial is ok, also by the manifest, and only what was lost was submitted
again; no job is left; and what a training has learnt is, to the bit, what it learns undisturbed.
"""


class Struck(Sweeps):
    """A running sweep, or a running training of ``iterations`` iterations."""

    def __init__(self, cluster: SlurmCluster, folder: Path, iterations: int | None) -> None:
        super().__init__(cluster, folder)
        self.iterations = iterations

    def command(self) -> list[str]:
        if self.iterations is None:
            return ["sweep", *SWEEP]
        return ["train", *TRAINING, f"training.iterations={self.iterations}"]

    @property
    def job_state(self) -> str:
        return self.cluster.run("squeue", "--noheader", "--states=all", f"--jobs={self.job()}", "--format=%T").strip()

    def kill(self, node: str, *programs: str) -> None:
        for program in programs:
            for pid in pids(node, program):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def start_queued_soon(self, *changes: str) -> None:
        """Wait until SLURM has requeued the job, unless it has ended by then."""
        job = self.job()
        shown = ["scontrol", "show", "job", job]

        def requeued_or_over() -> bool:
            told = self.cluster.run(*shown)
            # A trial that ends in its grace leaves a job that was PREEMPTED or, as the grace ends, at its TIMEOUT.
            ends = ("COMPLETED", "PREEMPTED", "TIMEOUT")
            return "Restarts=0" not in told or any(f"JobState={end}" in told for end in ends)

        wait_for("the job to be requeued", requeued_or_over, timeout_s=200)
        with suppress(AssertionError):  # it has started
            self.cluster.start_soon(job, *changes)

    def state(self) -> dict:
        files = self.folder.glob(f"runs/own/checkpoints/train-*/iteration-{self.iterations:08d}/*.safetensors")
        return {name: tensor for file in sorted(files) for name, tensor in load_file(file).items()}


# The faults: what is done to `driver`, or to the nodes that the last job runs on.


def rank_killed(struck: Struck, driver: subprocess.Popen, node: str) -> None:
    os.kill(ranks_on(node)[0], signal.SIGKILL)


def task_killed(struck: Struck, driver: subprocess.Popen, node: str) -> None:
    rank = ranks_on(node)[0]
    os.kill(int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)


def driver_killed(struck: Struck, driver: subprocess.Popen, node: str) -> None:
    driver.kill()


def driver_interrupted(struck: Struck, driver: subprocess.Popen, node: str) -> None:
    driver.send_signal(signal.SIGINT)


def job_cancelled(struck: Struck, driver: subprocess.Popen, node: str) -> None:
    struck.cluster.run("scancel", struck.job())


def preempted(struck: Struck, driver: subprocess.Popen, node: str) -> None:
    struck.cluster.run("srun", "--partition=high", "--exclusive", f"--nodelist={node}", "true", timeout_s=120)
    struck.start_queued_soon()


def node_killed(struck: Struck, driver: subprocess.Popen, node: str) -> None:
    struck.kill(node, "slurmd", "slurmstepd", "python")
    struck.start_queued_soon()


def link_cut(struck: Struck, driver: subprocess.Popen, node: str) -> None:
    """Wait until SLURM has given the node up."""
    link = ["ip", "-netns", f"auto3d-{node}", "link", "set", "eth0"]
    subprocess.run([*link, "down"], check=True)
    try:
        wait_for("the node to be given up", lambda: "down" in struck.cluster.node_states()[node], timeout_s=120)
    finally:
        subprocess.run([*link, "up"], check=True)


def controller_killed(struck: Struck, driver: subprocess.Popen, node: str) -> None:
    """Once it knows the job for good. If it dies before, it may give the job's number to the next one."""
    time.sleep(SAVED_S)
    struck.kill("control", "slurmctld")
    time.sleep(10)


def accounting_killed(struck: Struck, driver: subprocess.Popen, node: str) -> None:
    """Also cancel a job: then only squeue can report it."""
    struck.kill("control", "slurmdbd")
    struck.cluster.run("scancel", struck.job())


def manifest_torn(struck: Struck, driver: subprocess.Popen, node: str) -> None:
    """The driver dies while it writes."""
    driver.kill()
    driver.wait()
    with (struck.folder / "runs" / "own" / "manifest.jsonl").open("a") as file:
        file.write('{"trial": "dp1')


def time_is_over(struck: Struck, driver: subprocess.Popen, node: str) -> None:
    """The limit is less than a minute away by now; SLURM should warn the job two minutes before it."""
    struck.cluster.run("scontrol", "update", f"JobId={struck.job()}", "TimeLimit=1")
    struck.start_queued_soon("TimeLimit=60")


@dataclass(frozen=True)
class Fault:
    strike: Callable[[Struck, subprocess.Popen, str], None]
    iterations: int | None = None  # iterations of a training; None: a sweep
    says: set[str] = field(default_factory=lambda: {"ok"})  # accepted statuses if the driver ended by itself

    @property
    def loses(self) -> int:
        """Trials, at most: what else is under way is followed, and never starts again."""
        return len(self.says & {"failed", "timeout"})

    def __str__(self) -> str:
        return f"{'training' if self.iterations else 'sweep'}: {self.strike.__name__.replace('_', ' ')}"


BOTH = (None, ITERATIONS)
LOST = {"ok", "failed"}
UNTOLD = {"ok", ""}  # statuses if the driver ended before the trial
FAULTS = [
    *(Fault(rank_killed, kind, LOST) for kind in BOTH),
    *(Fault(driver_killed, kind, UNTOLD) for kind in BOTH),
    *(Fault(strike, kind) for strike in (preempted, node_killed, controller_killed) for kind in BOTH),
    *(Fault(strike, says=LOST) for strike in (task_killed, job_cancelled, accounting_killed)),
    *(Fault(strike, says=UNTOLD) for strike in (driver_interrupted, manifest_torn)),
    Fault(link_cut, says={"ok", "failed", "timeout"}),
    Fault(time_is_over, LONG),
]


@dataclass(frozen=True)
class End:
    """The result of one fault."""

    wrong: list[str]
    starts: int  # number of job starts, including the first
    resumes: int
    seconds: float


def strike(cluster: SlurmCluster, fault: Fault, seed: int) -> End:
    """Start, strike at a random moment, resume, and check the result."""
    chance = random.Random(f"{fault} {seed}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="auto3d-faults-") as folder:
        struck = Struck(cluster, Path(folder), fault.iterations)
        wrong: list[str] = []
        driver = struck.start(*struck.command())
        try:
            nodes = struck.running_on()
            time.sleep(chance.uniform(0, 2))
            fault.strike(struck, driver, chance.choice(nodes))
            if _ending(driver) is None:
                wrong.append(f"the driver did not end within {DRIVER_S} s")
        except AssertionError as error:
            wrong.append(str(error).splitlines()[0])
        finally:
            driver.kill()
            cluster.run(*PROGRAM, "up", timeout_s=120)
        said = _statuses(struck)
        wrong += [f"it said {status or 'nothing'}" for status in said - fault.says]
        resumes = 0
        while resumes < RESUMES and not (_all_ok(struck) and _no_job_left(struck)):
            resumes += 1
            struck.cluster.run(*_resume(), timeout_s=DRIVER_S, cwd=struck.folder, code=None)
        wrong += _look(struck, fault)
        for partition in ("low", "high"):
            cluster.run("scancel", f"--partition={partition}")  # what was left is told, and must not be told twice
        return End(wrong, sum(struck.starts()), resumes, time.monotonic() - started)


def _resume() -> list[str]:
    return [sys.executable, "-m", "launch.main", "resume", "own.yaml"]


def _no_job_left(struck: Struck) -> bool:
    """Within two minutes: a job whose end no controller heard is told of again that late."""
    deadline = time.monotonic() + 120
    while (listed := struck.cluster.run("squeue", "--noheader")) and time.monotonic() < deadline:
        time.sleep(0.5)
    return not listed


def _ending(driver: subprocess.Popen) -> str | None:
    try:
        return driver.communicate(timeout=DRIVER_S)[0]
    except subprocess.TimeoutExpired:
        return None


def _statuses(struck: Struck) -> set[str]:
    """The statuses that the trials wrote; empty for one that wrote nothing."""
    found = set()
    for history in histories(struck.entries()):
        file = struck.folder / "runs" / "own" / "trials" / history / "measurement.json"
        told = re.search(r'"status": "(\w+)"', file.read_text()) if file.exists() else None
        found.add(told[1] if told else "")
    return found


def _all_ok(struck: Struck) -> bool:
    return _statuses(struck) == {"ok"}


def _look(struck: Struck, fault: Fault) -> list[str]:
    """What is wrong at the end."""
    known = histories(struck.entries())
    starts = sum(struck.starts())
    trials = 1 if struck.iterations else 2
    checks = {
        f"statuses {_statuses(struck)}": _all_ok(struck),
        f"{len(known)} trials": len(known) == trials,
        f"{starts} submissions of {trials} trials": starts <= trials + fault.loses,
        "not all are in the manifest as ok": all(one.last.told == "ok" for one in known.values()),
        "a job is left": _no_job_left(struck),
    }
    if struck.iterations:
        expected, state = undisturbed(struck.cluster, struck.iterations), struck.state()
        same = state.keys() == expected.keys() and all(state[name].equal(one) for name, one in expected.items())
        checks["it did not learn what it learns undisturbed"] = same
    return [wrong for wrong, fine in checks.items() if not fine]


@cache
def undisturbed(cluster: SlurmCluster, iterations: int) -> dict:
    """The checkpoint that the same training leaves on this machine."""
    with tempfile.TemporaryDirectory(prefix="auto3d-faults-") as folder:
        here = Struck(cluster, Path(folder), iterations)
        here.auto3d(*here.command(), *HERE)
        return here.state()


def main() -> None:
    if reason := why_no_cluster():
        print(f"{reason}: no fault was tried")
        sys.exit("AUTO3D_REQUIRE_SLURM" in os.environ)
    times = int(sys.argv[1]) if len(sys.argv) > 1 else TIMES
    cluster = found_cluster()
    rows, failed = [], False
    for fault in FAULTS:
        ends = [strike(cluster, fault, seed) for seed in range(times)]
        wrong = [one for end in ends for one in end.wrong]
        failed |= bool(wrong)
        good = sum(not end.wrong for end in ends)
        figures = (max(end.starts for end in ends), max(end.resumes for end in ends), max(end.seconds for end in ends))
        rows.append((fault, f"{good} of {times}", *figures))
        print(fault, "; ".join(wrong) or "as it should be", *figures, file=sys.stderr, flush=True)
    heads = ["fault", "as it should be", "most submissions", "most resumes", "longest, s"]
    text = HEADING.format(every=EVERY)
    text += f"\n{times * len(FAULTS)} faults:\n\n{tabulate(rows, heads, tablefmt='github', floatfmt='.0f')}\n"
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text)
    print(text)
    sys.exit(failed)


if __name__ == "__main__":
    main()
