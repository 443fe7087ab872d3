"""A trial or a training on the nodes of a SLURM job: one task per node, which forks that node's ranks.

The tasks report to each other how they ended through files in the trial's folder, which all nodes must see.
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
from auto3d.runtime.watch.metrics import Metrics
from auto3d.runtime.watch.of_rank import TracedIteration
from launch.console.training_progress import watching
from launch.executors.trial import TrainingRun, is_whole, measure
from launch.recipe.load import LoadedRecipe, load
from launch.run.diagnosis import Failure, likelihood
from launch.run.ranks import GRACE_S, NodeRanks, Outcome
from launch.slurm.sbatch import nodes_needed
from launch.slurm.warning import Asked, asked_by_slurm, await_end
from launch.store.files import write_whole

POLL_S = 0.1
SPREAD_S = 5.0  # SLURM's signal may reach one node of a job this much later than another
FILES_S = 10.0  # how long a file that one node wrote may take to appear on another
FIRST_PORT, PORTS = 10_000, 20_000  # below the ports that Linux assigns by itself (32768 and up)
PORT_STEP = 1999  # from one run of a job to its next: the adjacent ports belong to the jobs submitted next


class NodesError(InputError):
    """A job that does not have the tasks that the trial needs, or whose tasks have lost each other."""


@dataclass(frozen=True)
class NodeTask:
    """This process's position among the tasks of a job; each node has one task."""

    number: int
    count: int
    meeting_point: str
    start: int  # how many times SLURM has requeued the job

    def meeting_point_of(self, run: int) -> str:
        """Where the ranks of run number ``run`` of one job meet; run 0 has ``meeting_point``.

        Each run has its own port: an early rank must not meet ranks of the previous run that have yet to leave.
        """
        address, _, port = self.meeting_point.rpartition(":")
        return f"{address}:{FIRST_PORT + (int(port) - FIRST_PORT + PORT_STEP * run) % PORTS}"


def task_of(environment: Mapping[str, str] = os.environ) -> NodeTask:
    """This process's task, from SLURM's variables. The port is derived from the job's id, so jobs do not collide."""
    job = submitit.JobEnvironment()
    start = int(environment.get("SLURM_RESTART_COUNT", "0"))
    port = FIRST_PORT + (int(environment["SLURM_JOB_ID"]) + 101 * start) % PORTS
    return NodeTask(job.global_rank, job.num_tasks, f"tcp://{job.hostnames[0]}:{port}", start)


def run_trial_on_nodes(recipe_file: str, plan_file: str, measurement_file: str, modules: str) -> None:
    """Run this node's ranks of the trial; the first node writes the measurement, however the trial ended.

    A trial that SLURM requeues starts from its beginning, since it is short. ``modules`` is the folder of the recipe.
    """
    asked = asked_by_slurm()
    _run_on_nodes(replace(load(recipe_file), folder=Path(modules)), plan_file, measurement_file, asked)


def run_training_on_nodes(
    recipe_file: str, plan_file: str, measurement_file: str, modules: str, checkpoints: str
) -> None:
    """Run this node's ranks of a training to its end, like a trial's ranks.

    The training continues from the newest checkpoint in the folder ``checkpoints``. When SLURM warns it, it writes a
    checkpoint and has the job requeued.
    """
    asked = asked_by_slurm()
    recipe = replace(load(recipe_file), folder=Path(modules))
    training = TrainingRun.of(recipe, Path(checkpoints), asked_to_end=lambda: bool(asked))
    plan = Plan.from_json(Path(plan_file).read_bytes())
    with watching(Console(), recipe, plan, Path(checkpoints)) as on_report:
        _run_on_nodes(recipe, plan_file, measurement_file, asked, training, on_report)


def _run_on_nodes(
    recipe: LoadedRecipe,
    plan_file: str,
    measurement_file: str,
    asked: Asked,
    training: TrainingRun | None = None,
    on_report: Callable[[Metrics | TracedIteration], None] = lambda report: None,
) -> None:
    if Path(measurement_file).exists():  # it was written just before SLURM requeued the job
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
        # If SLURM's signal ended the ranks, its state of the job says why; if they left a checkpoint, work remains.
        await_end(asked, requeue=ended_early and task.number == 0)
    if task.number == 0:
        write_whole(Path(measurement_file), measurement.to_json())


_failure = TypeAdapter(Failure | None)  # one node's report; None: all its ranks succeeded


@dataclass(frozen=True)
class _Others:
    """The other tasks of the job, which report their ends through files."""

    folder: Path
    task: NodeTask
    limit_s: float  # time for all of their reports

    def outcome(self, ours: Outcome) -> Outcome:
        """The outcome of all nodes, given this node's; only the first node gets it, the others report to it."""
        failure = None
        if ours.status is not Status.OK:
            assert ours.ending is not None
            failure = Failure(ours.ending, ours.status, ours.error)
        if self.task.number > 0:
            write_whole(self._file(self.task.number), _failure.dump_json(failure).decode())
            return ours
        ends = [] if failure is None else [failure]
        deadline = time.monotonic() + self.limit_s
        for number in range(1, self.task.count):
            ends += self._end_of(number, deadline, known=ends)
        if not ends:
            return ours
        worst = min(ends, key=likelihood)
        return Outcome(worst.status, error=worst.error, ending=worst.ending)

    def _end_of(self, number: int, deadline: float, known: Sequence[Failure]) -> list[Failure]:
        while True:
            try:
                failure = _failure.validate_json(self._file(number).read_bytes())
                return [] if failure is None else [failure]
            except (OSError, ValidationError):
                if time.monotonic() >= deadline:
                    # The node or its slurmd is dead: SLURM's state says so, and a requeue may start the trial again.
                    waited = f"waited {self.limit_s:g} s for node {number} of the job to report how its ranks ended"
                    raise NodesError("\n".join([waited, *(failure.error for failure in known)])) from None
            time.sleep(POLL_S)

    def _file(self, number: int) -> Path:
        return self.folder / f"node-{number}-start-{self.task.start}.json"
