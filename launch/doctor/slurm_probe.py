"""The SLURM job of `auto3d doctor`: submits it as trials are submitted, answers its nodes, and reads their reports."""

import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from auto3d.words import counted
from launch.doctor.all_reduce_probe import MEASURE_S, MEET_S
from launch.doctor.device_probe import DEVICES_S
from launch.doctor.node_probe import (
    ANSWER,
    FILES_S,
    GREETING,
    REPORT,
    Answer,
    NodeReport,
    answer_file,
    greeting_file,
    probe_node,
    progress_file,
    read_file,
    report_file,
    write_file,
)
from launch.executors.follow import SETTLE_S
from launch.executors.submit import submit_calls
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import device
from launch.slurm.client import SlurmError
from launch.slurm.jobs import JobState, cancel, job_states
from launch.slurm.sbatch import check_folder
from launch.store.trials import job_folder
from launch.store.watcher import interrupts_noted

POLL_S = 0.05
END_POLL_S = 0.5
STATES_S = 2.0  # interval of squeue calls, short because they go on for a minute or two only
RUN_S = FILES_S + MEET_S + MEASURE_S + 60.0  # time limit of a job without device checks; a minute is for imports


@dataclass
class ProbeJob:
    """The job, and what has come back from it."""

    job_id: str
    folder: Path
    token: str
    nodes: int
    run_s: float  # longest time that it may run
    queued_s: float | None = None  # time in the queue; None: it has not run
    greeted: dict[int, str] = field(default_factory=dict)  # host of each node that has sent a greeting
    reports: dict[int, NodeReport] = field(default_factory=dict)  # by node
    problem: str = ""  # why some nodes have not reported

    @property
    def complete(self) -> bool:
        """Whether all nodes have reported."""
        return len(self.reports) == self.nodes

    def state(self) -> JobState | None:
        """The job's state; None if SLURM does not know the job or does not answer."""
        try:
            return job_states({self.job_id: self.folder.name}).get(self.job_id)
        except SlurmError:
            return None

    def logs(self) -> list[Path]:
        """The files with the output of the job's tasks, as far as this machine sees them."""
        return sorted(self.folder.glob("*_log.*"))


def run_probe(
    recipe: LoadedRecipe, *, nodes: int, devices: bool, wait_s: float, announce: Callable[[str], None]
) -> ProbeJob:
    """Submit the job, follow it to its end, and return it with the nodes' reports.

    A job that does not report within its limits, or is interrupted, is cancelled. With ``devices``, the nodes' devices
    also exchange messages and train. Raises SlurmError if sbatch refuses the job.
    """
    token = secrets.token_hex(6)
    name = f"auto3d-doctor-{token}"
    folder = job_folder(recipe, name)
    check_folder(folder)
    run_s = RUN_S + (DEVICES_S if devices else 0.0)
    limited = replace(recipe.values.launch, time_limit_s=run_s + 60)
    recipe = replace(recipe, values=replace(recipe.values, launch=limited))
    devices_per_node = recipe.values.cluster.devices_per_node
    call = partial(probe_node, str(folder), devices=devices_per_node, device=device(recipe.values), thorough=devices)
    with interrupts_noted() as interrupted:
        (job,) = submit_calls(recipe, folder, [call], nodes=nodes, name=name)
        probe = ProbeJob(job, folder, token, nodes, run_s)
    try:
        if interrupted():
            raise KeyboardInterrupt
        _follow(probe, wait_s, announce)
    finally:
        if not probe.complete:
            with suppress(SlurmError):  # the job has ended
                cancel([job])
    return probe


def _follow(probe: ProbeJob, wait_s: float, announce: Callable[[str], None]) -> None:
    """Follow the job until all nodes have reported, or until ``problem`` says why they have not."""
    start = time.monotonic()
    asked_at, ran_since = -STATES_S, None
    end: JobState | None = None
    ended_since = math.inf  # when SLURM first called the job ended
    while not probe.complete:
        _exchange(probe)
        now = time.monotonic()
        if now - asked_at >= STATES_S:
            asked_at = now
            state = probe.state()
            if state is not None and (state.running or state.ended) and ran_since is None:
                ran_since, probe.queued_s = now, now - start
            if state is not None and state.ended:
                end, ended_since = state, min(ended_since, now)
            announce(f"job {probe.job_id} on {counted(probe.nodes, 'node')}: {_progress(probe, state)}")
            if end is not None and now - ended_since > SETTLE_S:
                probe.problem = f"ended as {end.name}"
            elif ran_since is None and now - start > wait_s:
                why = state.why if state else "SLURM does not report its state"
                probe.problem = f"waited {wait_s:g} s for {counted(probe.nodes, 'node')} ({why})"
            elif ran_since is not None and now - ran_since > probe.run_s:
                missing = [str(node) for node in range(probe.nodes) if node not in probe.reports]
                probe.problem = f"ran for {probe.run_s:g} s without a report from its node {' or '.join(missing)}"
            if probe.problem:
                return
        time.sleep(POLL_S)
    if probe.queued_s is None:
        probe.queued_s = time.monotonic() - start
    _await_end(probe)


def _progress(probe: ProbeJob, state: JobState | None) -> str:
    """What the job is doing, by its first node or else by SLURM."""
    try:
        return progress_file(probe.folder).read_text()
    except OSError:
        return state.why if state else "state not known yet"


def _await_end(probe: ProbeJob) -> None:
    """Wait for the job's end: its tasks write their last files after their reports."""
    deadline = time.monotonic() + SETTLE_S
    while (state := probe.state()) is not None and not state.ended and time.monotonic() < deadline:
        time.sleep(END_POLL_S)


def _exchange(probe: ProbeJob) -> None:
    """Answer new greetings, and read new reports."""
    for node in range(probe.nodes):
        if node not in probe.greeted:
            greeting = read_file(greeting_file(probe.folder, node), GREETING)
            if greeting is not None:
                seen = time.time()
                write_file(answer_file(probe.folder, node), ANSWER, Answer(probe.token, seen))
                probe.greeted[node] = greeting.host
        elif node not in probe.reports:
            report = read_file(report_file(probe.folder, node), REPORT)
            if report is not None:
                probe.reports[node] = report
