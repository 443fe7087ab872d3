"""A trial or a training on the nodes of a SLURM job: a task per node, which forks that node's ranks.

The tasks tell each other how they ended by files in the trial's folder, which all nodes must see.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import submitit
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.measurement import Status
from launch.console.progress import training_progress
from launch.executors.trial import IterationReport, Training, is_whole, measure
from launch.recipe.load import LoadedRecipe, load
from launch.run.diagnosis import Failure, likelihood
from launch.run.ranks import GRACE_S, NodeRanks, Outcome
from launch.slurm.sbatch import nodes_needed
from launch.slurm.warning import Asked, asked_by_slurm, await_end
from launch.store.files import write_whole

POLL_S = 0.1
SPREAD_S = 5.0  # SLURM's signals reach the nodes of a job one after the other
FILES_S = 10.0  # beside the grace of the ranks, until a file that one node wrote is seen by another
FIRST_PORT, PORTS = 10_000, 20_000  # below those that Linux gives out (32768 and up)
PORT_STEP = 1999  # between the runs of one job: the ports beside its own are those of the jobs submitted next


class NodesError(InputError):
    """A job whose tasks are not those that the trial needs."""


@dataclass(frozen=True)
class Task:
    """This process's place among a job's tasks, of which there is one on each node."""

    number: int
    count: int
    meeting_point: str
    start: int  # of the job: 0, and one more each time that SLURM sent it back to the queue

    def meeting_point_of(self, run: int) -> str:
        """Where the ranks of run number ``run`` of one job meet; run 0 has ``meeting_point``.

        A port each, for a rank that is early must not meet the ranks of the run before, which are about to leave.
        """
        address, _, port = self.meeting_point.rpartition(":")
        return f"{address}:{FIRST_PORT + (int(port) - FIRST_PORT + PORT_STEP * run) % PORTS}"


def task_of(environment: Mapping[str, str] = os.environ) -> Task:
    """From SLURM's variables alone. The port follows from the job's number, so that jobs do not collide."""
    job = submitit.JobEnvironment()
    start = int(environment.get("SLURM_RESTART_COUNT", "0"))
    port = FIRST_PORT + (int(environment["SLURM_JOB_ID"]) + 101 * start) % PORTS
    return Task(job.global_rank, job.num_tasks, f"tcp://{job.hostnames[0]}:{port}", start)


def run_trial_on_nodes(recipe_file: str, plan_file: str, measurement_file: str, modules: str) -> None:
    """Run this node's ranks of the trial of these files; the first node writes the measurement, whatever the end was.

    A job that SLURM sends back to the queue starts again, for a trial is short.
    """
    asked = asked_by_slurm()
    _run_on_nodes(replace(load(recipe_file), folder=Path(modules)), plan_file, measurement_file, asked)


def run_training_on_nodes(
    recipe_file: str, plan_file: str, measurement_file: str, modules: str, checkpoints: str
) -> None:
    """Run this node's ranks of a training, as of a trial, but to the training's end.

    It goes on from the newest checkpoint in the folder ``checkpoints``. When SLURM warns it, it leaves one and has the
    job queued again.
    """
    asked = asked_by_slurm()
    recipe = replace(load(recipe_file), folder=Path(modules))
    training = Training.of(recipe, Path(checkpoints), asked_to_end=lambda: bool(asked))
    with training_progress(Console(), recipe.values.training.iterations) as on_report:
        _run_on_nodes(recipe, plan_file, measurement_file, asked, training, on_report)


def _run_on_nodes(
    recipe: LoadedRecipe,
    plan_file: str,
    measurement_file: str,
    asked: Asked,
    training: Training | None = None,
    on_report: Callable[[IterationReport], None] = lambda report: None,
) -> None:
    if Path(measurement_file).exists():  # it was written just before SLURM sent the job back to the queue
        return
    task = task_of()
    plan = Plan.from_json(Path(plan_file).read_bytes())
    folder = Path(measurement_file).resolve().parent
    per_node = recipe.values.cluster.devices_per_node
    ranks = range(task.number * per_node, min((task.number + 1) * per_node, plan.ranks))
    if task.count != nodes_needed(recipe, plan):
        raise NodesError(f"the plan needs {nodes_needed(recipe, plan)} nodes of {per_node} ranks, not {task.count}")

    node = NodeRanks(ranks, task.meeting_point) if task.count > 1 else None
    others = _Others(folder, task, recipe.values.training.timeout_s + GRACE_S + FILES_S)
    measurement = measure(
        recipe, plan, folder, node=node, of_all=others.outcome, training=training, on_report=on_report
    )
    ended_early = training is not None and measurement.status is Status.OK and not is_whole(recipe, measurement)
    if ended_early or (measurement.status is not Status.OK and asked.within(SPREAD_S)):
        # Ranks that SLURM's signal ended say nothing of the job's end, and those that left a checkpoint are not done.
        await_end(asked, requeue=ended_early and task.number == 0)
    if task.number == 0:
        write_whole(Path(measurement_file), measurement.to_json())


_failure = TypeAdapter(Failure | None)  # of a node; none: all its ranks are done


@dataclass(frozen=True)
class _Others:
    """The other tasks of the job, whose ends come as files."""

    folder: Path
    task: Task
    timeout_s: float

    def outcome(self, own: Outcome) -> Outcome:
        """How all nodes ended, on the first; on another it is told to the first."""
        if self.task.number > 0:
            failure = None if own.status is Status.OK else Failure(own.ending, own.status, own.error)
            write_whole(self._file(self.task.number), _failure.dump_json(failure).decode())
            return own
        ends = [] if own.status is Status.OK else [Failure(own.ending, own.status, own.error)]
        deadline = time.monotonic() + self.timeout_s
        for number in range(1, self.task.count):
            ends += self._end_of(number, deadline, known=ends)
        if not ends:
            return own
        worst = min(ends, key=likelihood)
        return Outcome(worst.status, error=worst.error, ending=worst.ending)

    def _end_of(self, number: int, deadline: float, known: Sequence[Failure]) -> list[Failure]:
        while True:
            try:
                failure = _failure.validate_json(self._file(number).read_bytes())
                return [] if failure is None else [failure]
            except (OSError, ValidationError):
                if time.monotonic() >= deadline:
                    # It is dead, or its slurmd is: SLURM's state tells, and its requeue may start the trial again.
                    waited = f"waited {self.timeout_s:g} s for node {number} of the job to tell how its ranks ended"
                    raise NodesError("\n".join([waited, *(failure.error for failure in known)])) from None
            time.sleep(POLL_S)

    def _file(self, number: int) -> Path:
        return self.folder / f"node-{number}-start-{self.task.start}.json"
