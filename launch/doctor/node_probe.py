"""What each node of `auto3d doctor`'s SLURM job runs.

A node and the machine of the command exchange files in a shared folder: the node writes a greeting, the command
answers, and the node writes its report. Both put their own clock's time into their files, which bounds the difference
between the clocks.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from launch.doctor.all_reduce_probe import AllReduce, all_reduce
from launch.doctor.device_probe import DeviceReport, probe_devices
from launch.doctor.machine import Machine, this_machine
from launch.executors.node_task import task_of
from launch.run.ranks import NodeRanks
from launch.store.files import write_whole

# Time until other machines see a new file. NFS clients may cache for 30 s that it does not exist.
FILES_S = 60.0
POLL_S = 0.05


@dataclass(frozen=True)
class Greeting:
    """A node's first file."""

    host: str
    sent: float  # time.time() of the node


@dataclass(frozen=True)
class Answer:
    token: str
    seen: float  # time.time() of the command's machine when it saw the greeting


@dataclass(frozen=True)
class NodeReport:
    """The results of one node."""

    machine: Machine
    sent: float  # time.time() of the node when it wrote its greeting
    answer: Answer | None  # None: no answer came within FILES_S
    received: float  # time.time() of the node when it read the answer
    meeting_point: str
    all_reduce: AllReduce
    devices: DeviceReport | None  # None: not requested, or the all-reduce failed

    @property
    def skew_s(self) -> tuple[float, float]:
        """Lower and upper bound of how far the node's clock is ahead, in seconds.

        The node sent its greeting, then we saw it, then the node received the answer.
        """
        assert self.answer is not None, "it was answered"
        return self.sent - self.answer.seen, self.received - self.answer.seen


Content = TypeVar("Content", Greeting, Answer, NodeReport)
GREETING, ANSWER, REPORT = TypeAdapter(Greeting), TypeAdapter(Answer), TypeAdapter(NodeReport)


def greeting_file(folder: Path, node: int) -> Path:
    return folder / f"greeting-{node}.json"


def answer_file(folder: Path, node: int) -> Path:
    return folder / f"answer-{node}.json"


def report_file(folder: Path, node: int) -> Path:
    return folder / f"report-{node}.json"


def progress_file(folder: Path) -> Path:
    """The file in which the first node says what it is doing."""
    return folder / "progress.txt"


def write_file(file: Path, kind: TypeAdapter[Content], content: Content) -> None:
    write_whole(file, kind.dump_json(content).decode())


def read_file(file: Path, kind: TypeAdapter[Content]) -> Content | None:
    """The content of ``file``, or None while it does not exist or is incomplete."""
    try:
        return kind.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def probe_node(folder: str, *, devices: int, device: str, thorough: bool) -> None:
    """Run one task of the SLURM job. Each node has one task, which forks a rank for each of its ``devices`` devices.

    The ranks meet and check an all-reduce. If ``thorough``, they also exchange messages and train.
    """
    shared_folder, task = Path(folder), task_of()
    machine, sent = this_machine(), time.time()
    write_file(greeting_file(shared_folder, task.number), GREETING, Greeting(machine.host, sent))
    deadline = time.monotonic() + FILES_S
    answer_path = answer_file(shared_folder, task.number)
    while (answer := read_file(answer_path, ANSWER)) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    received = time.time()
    ranks = range(task.number * devices, (task.number + 1) * devices)
    node = NodeRanks(ranks, task.meeting_point) if task.count > 1 else None
    reduced = all_reduce(task.count * devices, device=device, node=node)
    device_report = None
    if thorough and reduced.correct and not reduced.error:
        device_report = probe_devices(
            task.count * devices,
            device=device,
            node_of=lambda run: NodeRanks(ranks, task.meeting_point_of(run)) if node else None,
            announce=lambda line: write_whole(progress_file(shared_folder), line) if task.number == 0 else None,
        )
    meeting_point = task.meeting_point if node else "a file"
    report = NodeReport(machine, sent, answer, received, meeting_point, reduced, device_report)
    write_file(report_file(shared_folder, task.number), REPORT, report)
