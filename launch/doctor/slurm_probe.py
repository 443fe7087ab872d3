"""The probe's job: submit it as trials are, answer its nodes, and collect what they report."""

import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

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
STATES_S = 2.0  # of squeue; the controller is asked for a minute or two
RUN_S = FILES_S + MEET_S + MEASURE_S + 60.0  # the job's limit without its device checks; a minute is for imports


@dataclass
class ProbeJob:
    """What came back of the job."""

    job_id: str
    folder: Path
    token: str
    nodes: int
    run_s: float  # it may run
    queued_s: float | None = None  # none: it never ran
    greeted: dict[int, str] = field(default_factory=dict)  # hosts that were heard of, by node
    reports: dict[int, NodeReport] = field(default_factory=dict)
    problem: str = ""  # why not all nodes reported

    @property
    def whole(self) -> bool:
        return len(self.reports) == self.nodes

    def state(self) -> JobState | None:
        """What SLURM says of it; none: it does not know it, or does not answer."""
        try:
            return job_states({self.job_id: self.folder.name}).get(self.job_id)
        except SlurmError:
            return None

    def logs(self) -> list[Path]:
        """What its tasks print, as far as it is seen here."""
        return sorted(self.folder.glob("*_log.*"))


def run_probe(
    recipe: LoadedRecipe, *, nodes: int, devices: bool, wait_s: float, announce: Callable[[str], None]
) -> ProbeJob:
    """Submit, follow, and never leave the job behind; raises SlurmError where sbatch refuses.

    With ``devices``, those of the nodes also exchange messages and train.
    """
    token = secrets.token_hex(6)
    name = f"auto3d-doctor-{token}"
    folder = job_folder(recipe, name)
    check_folder(folder)
    run_s = RUN_S + (DEVICES_S if devices else 0.0)
    short = replace(recipe.values.launch, time_limit_s=run_s + 60)
    recipe = replace(recipe, values=replace(recipe.values, launch=short))
    of_node = recipe.values.cluster.devices_per_node
    call = partial(probe_node, str(folder), devices=of_node, device=device(recipe.values), thorough=devices)
    with interrupts_noted() as interrupted:
        (job,) = submit_calls(recipe, folder, [call], nodes=nodes, name=name)
        probe = ProbeJob(job, folder, token, nodes, run_s)
    try:
        if interrupted():
            raise KeyboardInterrupt
        _follow(probe, wait_s, announce)
    finally:
        if not probe.whole:
            with suppress(SlurmError):  # it has ended
                cancel([job])
    return probe


def _follow(probe: ProbeJob, wait_s: float, announce: Callable[[str], None]) -> None:
    """Until all nodes have reported, or ``problem`` says why not."""
    start = time.monotonic()
    asked, ran_since = -STATES_S, None
    end: JobState | None = None
    ended_since = math.inf  # when SLURM first called the job ended
    while not probe.whole:
        _exchange(probe)
        now = time.monotonic()
        if now - asked >= STATES_S:
            asked = now
            state = probe.state()
            if state is not None and (state.running or state.ended) and ran_since is None:
                ran_since, probe.queued_s = now, now - start
            if state is not None and state.ended:
                end, ended_since = state, min(ended_since, now)
            announce(f"job {probe.job_id} on {probe.nodes} nodes: {_standing(probe, state)}")
            if end is not None and now - ended_since > SETTLE_S:
                probe.problem = f"ended as {end.name}"
            elif ran_since is None and now - start > wait_s:
                why = state.why if state else "SLURM does not tell its state"
                probe.problem = f"waited {wait_s:g} s for {probe.nodes} nodes ({why})"
            elif ran_since is not None and now - ran_since > probe.run_s:
                missing = [str(node) for node in range(probe.nodes) if node not in probe.reports]
                probe.problem = f"ran for {probe.run_s:g} s, and no report came of its node {' or '.join(missing)}"
            if probe.problem:
                return
        time.sleep(POLL_S)
    if probe.queued_s is None:
        probe.queued_s = time.monotonic() - start
    _await_end(probe)


def _standing(probe: ProbeJob, state: JobState | None) -> str:
    """What the job does, as its first node says, or as SLURM does."""
    try:
        return progress_file(probe.folder).read_text()
    except OSError:
        return state.why if state else "not known yet"


def _await_end(probe: ProbeJob) -> None:
    """Its tasks write the last of their files after they have reported."""
    deadline = time.monotonic() + SETTLE_S
    while (state := probe.state()) is not None and not state.ended and time.monotonic() < deadline:
        time.sleep(END_POLL_S)


def _exchange(probe: ProbeJob) -> None:
    """Answer the nodes that greet, and take the reports of those that are done."""
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
