"""The part of `auto3d doctor`'s job that runs on each of its nodes.

Nodes and the machine that asked exchange files, in a folder that all of them must see: a node greets, is answered, and
reports. Each end stamps its files with its own clock, which bounds how far the clocks are apart.
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

FILES_S = 60.0  # until a file that one machine wrote is seen by another: NFS may remember for 30 s that there is none
POLL_S = 0.05


@dataclass(frozen=True)
class Greeting:
    """A node's first file."""

    host: str
    sent: float  # time.time() of the node, as below


@dataclass(frozen=True)
class Answer:
    token: str
    seen: float  # time.time() of the machine that asked, when it saw the greeting


@dataclass(frozen=True)
class NodeReport:
    """All that a node found."""

    machine: Machine
    sent: float
    answer: Answer | None  # none came within FILES_S
    received: float
    meeting_point: str
    all_reduce: AllReduce
    devices: DeviceReport | None  # not asked for, or the ranks did not sum

    @property
    def skew_s(self) -> tuple[float, float]:
        """The least and the most by which the node's clock is ahead: it sent, we saw, it received, in this order."""
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
    """What the first node does, in words."""
    return folder / "progress.txt"


def write_file(file: Path, kind: TypeAdapter[Content], content: Content) -> None:
    write_whole(file, kind.dump_json(content).decode())


def read_file(file: Path, kind: TypeAdapter[Content]) -> Content | None:
    """None as long as it is not there, or not whole."""
    try:
        return kind.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def probe_node(folder: str, *, devices: int, device: str, thorough: bool) -> None:
    """A task of the probe's job: one on each node, which forks a rank for each of the node's ``devices``.

    The ranks meet and sum; where it is ``thorough``, they also exchange messages and train.
    """
    place, task = Path(folder), task_of()
    machine, sent = this_machine(), time.time()
    write_file(greeting_file(place, task.number), GREETING, Greeting(machine.host, sent))
    deadline = time.monotonic() + FILES_S
    while (answer := read_file(answer_file(place, task.number), ANSWER)) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    received = time.time()
    ranks = range(task.number * devices, (task.number + 1) * devices)
    node = NodeRanks(ranks, task.meeting_point) if task.count > 1 else None
    found = all_reduce(task.count * devices, device=device, node=node)
    of_devices = None
    if thorough and found.correct and not found.error:
        of_devices = probe_devices(
            task.count * devices,
            device=device,
            node_of=lambda run: NodeRanks(ranks, task.meeting_point_of(run)) if node else None,
            announce=lambda line: write_whole(progress_file(place), line) if task.number == 0 else None,
        )
    meeting_point = task.meeting_point if node else "a file"
    report = NodeReport(machine, sent, answer, received, meeting_point, found, of_devices)
    write_file(report_file(place, task.number), REPORT, report)
