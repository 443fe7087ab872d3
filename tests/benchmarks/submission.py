"""Cost of driving 500 trials on SLURM, and the time to a first job: python -m tests.benchmarks.submission

Every command is one that a user would run, in a new process, on the cluster of `make cluster-up`; without a cluster,
nothing is measured. Jobs, arrays, folders, pickled calls and exits are real; only a trial's work is one second of
sleep and a measurement file. Prints the table of results/slurm/README.md.
"""

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from statistics import mean
from tempfile import TemporaryDirectory
from time import perf_counter, sleep

from tabulate import tabulate

from launch.report.release import Target
from tests.slurm.conftest import SlurmCluster, found_cluster, why_no_cluster
from tests.targets import end, nothing_measured

LIMIT_S = 900  # time limit of one command
SUBMIT = "submit; the model is captured at two sizes"
COMMANDS = ("sinfo", "scontrol", "sbatch", "squeue", "sacct", "scancel")
RECIPE = """
model:
  architecture: GPT2LMHeadModel
  config: {n_layer: 8, n_head: 2, n_embd: 32, n_positions: 32, vocab_size: 256, bos_token_id: 0, eos_token_id: 0}
data: {sequence_length: 32}
cluster: {nodes: 4, devices_per_node: 4}
training: {global_batch: 32, compute: emulated}
search:
  dp: [1, 2]
  tp: [1]
  pp: [2, 4]
  micro_batch_size: [1, 2]
  schedule: [1f1b, gpipe, interleaved-1f1b, zb-h1, chimera]
  recompute: [none, full, 0.25, 0.5, 0.75]
  sync: [lazy, eager]
  shard_optimizer: [false, true]
  partition: [uniform, blocks]
  placement: [megatron]
  allow_idle_devices: true
  max_trials: 500
launch: {executor: slurm, exclusive: false, cpus_per_node: 1, setup: [. ./work.sh]}
"""
CUT = (  # `make sweep RECIPE=gpt20b EXECUTOR=slurm` with a model, and nodes, of which this machine can hold four
    "model.config.n_layer=8", "model.config.n_head=8", "model.config.n_embd=64", "model.config.n_positions=128",
    "model.config.vocab_size=512", "data.sequence_length=128", "data.vocabulary_size=512", "training.global_batch=16",
    "cluster={nodes: 4, devices_per_node: 2, device: cpu, accelerator: null, memory_gib: 2}", "search.max_trials=4",
    "search.tp=[1,2]", "search.pp=[2,4]", "launch.executor=slurm", "launch.exclusive=false", "launch.cpus_per_node=2",
)  # fmt: skip
# Replaces the trial: writes what it would write, a second later.
WORK = """
sleep 1
entry='"state": "submitted", "job": "'${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID'"'
until trial=$(grep "$entry" runs/many/manifest.jsonl | cut -d '"' -f 4) && test "$trial"; do sleep 1; done
cd "runs/many/trials/$trial"
printf '{"plan": %s, "status": "ok", "emulated": true, "iteration_s": [1.0]}' "$(cat plan.json)" > .measurement.json
mv .measurement.json measurement.json
exit 0
"""
# Replaces each of SLURM's commands: runs it, and logs its name, start, end and the length of its longest argument.
COUNTED = """#!/bin/sh
start=$(date +%s.%N)
longest=0
for argument; do test ${{#argument}} -gt $longest && longest=${{#argument}}; done
{real} "$@"
code=$?
echo "{name} $start $(date +%s.%N) $longest" >> {log}
exit $code
"""


# Runs auto3d, which writes its own peak memory, in KiB, when it ends.
DRIVER = """
import atexit, pathlib, re
from launch.main import main
status, peak = pathlib.Path("/proc/self/status"), pathlib.Path("peak")
atexit.register(lambda: peak.write_text(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]))
main()
"""


@dataclass(frozen=True)
class Call:
    """One call of a SLURM command."""

    name: str
    seconds: float
    longest: int  # characters of the longest argument


class Commands:
    """Runs commands of auto3d in ``folder`` and records their time, memory and calls of SLURM."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self._folder, self._log = folder, folder / "calls"
        programs = folder / "programs"
        programs.mkdir()
        for name in COMMANDS:
            file = programs / name
            file.write_text(COUNTED.format(real=which(name), name=name, log=self._log))
            file.chmod(0o755)
        changes = {"PATH": f"{programs}:{os.environ['PATH']}", "AUTO3D_CACHE": str(folder / "cache")}
        self._environment = cluster.environment | changes
        self.rows: list[list[str]] = []
        self.seconds: dict[str, float] = {}  # by the names of rows
        self.peak_mib: dict[str, float] = {}  # of the command itself

    def run(self, what: str, *arguments: str) -> str:
        """Run a command and add the row ``what``; returns the output of the command."""
        self._log.write_text("")
        command = ["timeout", str(LIMIT_S), sys.executable, "-c", DRIVER, *arguments]
        begin = perf_counter()
        with (self._folder / "output").open("w+") as output:
            process = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stdout=output, stderr=subprocess.STDOUT
            )
            _, code, used = os.wait4(process.pid, 0)
            seconds = perf_counter() - begin
            output.seek(0)
            printed = output.read()
        if code:
            raise SystemExit(f"auto3d {' '.join(arguments)}: exit code {os.waitstatus_to_exitcode(code)}\n{printed}")
        peaks = [
            int((self._folder / "peak").read_text()),
            used.ru_maxrss,
        ]  # in KiB: of the command itself, and of its children
        figures = [f"{seconds:.1f}", f"{used.ru_utime + used.ru_stime:.1f}", *(f"{peak / 1024:.0f}" for peak in peaks)]
        self.seconds[what], self.peak_mib[what] = seconds, peaks[0] / 1024
        self.rows.append([what, *figures, self._calls()])
        print(*self.rows[-1], flush=True)
        return printed

    def _calls(self) -> str:
        calls: dict[str, list[Call]] = defaultdict(list)
        for line in self._log.read_text().splitlines():
            name, start, end, longest = line.split()
            calls[name].append(Call(name, float(end) - float(start), int(longest)))
        descriptions = []
        for name, each in calls.items():
            longest = max(call.longest for call in each)
            wide = f", arguments of {longest} characters" if longest > 1000 else ""
            descriptions.append(f"{len(each)} {name} ({mean(call.seconds for call in each):.2f} s{wide})")
        return ", ".join(descriptions)


def measure(cluster: SlurmCluster, folder: Path) -> Commands:
    (folder / "many.yaml").write_text(RECIPE)
    (folder / "work.sh").write_text(WORK)
    commands = Commands(cluster, folder)
    recipe = "many.yaml"
    later = "launch.additional_parameters.begin=now+1hour"
    try:
        commands.run(SUBMIT, "sweep", recipe, later, "--detach")
        assert "500 pending" in commands.run("status of 500 that wait", "status", recipe)
        commands.run("cancel 500", "cancel", recipe)
        assert "500 cancelled" in commands.run("status of 500 that were cancelled", "status", recipe)
        commands.run("submit again; the captures are in the cache", "sweep", recipe, "--detach")
        commands.run("follow to the end", "resume", recipe)
        assert "500 ok" in commands.run("status of 500 that ended", "status", recipe)
    finally:
        cluster.run(sys.executable, "-m", "launch.main", "cancel", recipe, cwd=folder)
    return commands


def first_job_s(cluster: SlurmCluster, folder: Path, cache: Path) -> float:
    """Seconds from a user's command, a sweep of the recipe gpt20b, until the first of its jobs runs."""
    folder.mkdir()
    auto3d = [sys.executable, "-m", "launch.main"]
    environment = cluster.environment | {"AUTO3D_CACHE": str(cache)}
    begin = perf_counter()
    with (folder / "output").open("w") as output:
        sweep = subprocess.Popen([*auto3d, "sweep", "gpt20b", *CUT], cwd=folder, env=environment, stderr=output)
    try:
        while "RUNNING" not in (states := cluster.run("squeue", "--noheader", "--format=%T")):
            if sweep.poll() is not None or perf_counter() - begin > LIMIT_S:
                raise SystemExit(f"no job of gpt20b began: {states}\n{(folder / 'output').read_text()}")
            sleep(0.1)
        return perf_counter() - begin
    finally:
        sweep.terminate()
        sweep.wait()
        cluster.run(*auto3d, "cancel", "gpt20b", cwd=folder)
        while cluster.run("squeue", "--noheader"):
            sleep(0.5)


def main() -> None:
    if reason := why_no_cluster():
        nothing_measured(reason)
    with TemporaryDirectory() as folder:
        cluster, here = found_cluster(), Path(folder)
        cold, warm = (first_job_s(cluster, here / name, here / "captures") for name in ("cold", "warm"))
        commands = measure(cluster, here)
    heads = [
        "command",
        "s",
        "processor s",
        "driver's peak MiB",
        "largest process",
        "calls of SLURM's commands (mean s of one)",
    ]
    print(tabulate(commands.rows, heads, tablefmt="github", disable_numparse=True))
    print(f"\nfirst job of gpt20b, cut: after {cold:.1f} s, and {warm:.1f} s with what was captured before")
    print(f"{len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[1]:.1f}")
    status = max(seconds for what, seconds in commands.seconds.items() if what.startswith("status"))
    end(
        [
            Target(what="submission of 500 trials", found=commands.seconds[SUBMIT], wish=60, unit=" s"),
            Target(what="its driver's memory", found=commands.peak_mib[SUBMIT], wish=200, unit=" MiB"),
            Target(what="status of 500 trials", found=status, wish=2, unit=" s"),
            Target(what="first job of gpt20b, cut", found=cold, wish=30, unit=" s"),
            Target(what="first job of gpt20b, cut, captured before", found=warm, wish=5, unit=" s"),
        ]
    )


if __name__ == "__main__":
    main()
