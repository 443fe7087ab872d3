"""Failures of GPUs, simulated on gloo ranks: each run ends soon, with the right status, and names the rank at fault."""

import faulthandler
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from auto3d.runtime.activity import THIS_RANK, ActivityBoard
from auto3d.runtime.measurement import Status
from auto3d.runtime.process.world import World, join
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.stage.module import StageModule
from auto3d.runtime.training import TrainingResult, train
from auto3d.runtime.waiting import waiting_for
from launch import main as command
from launch.run import ranks, waits
from launch.run.diagnosis import Ending
from launch.run.ranks import Outcome, run_ranks
from launch.run.waits import WaitLimit
from launch.slurm.warning import Flag
from tests.distributed.parity import SGD, make_plan
from tests.models import TRAINED, captured
from tests.runtime.test_backend_errors import HINTS, INVALID_USAGE, PEER_LATE, REMOTE, UNHANDLED_CUDA

HOST = socket.gethostname()
SETTINGS = TrainingSettings(iterations=2, optimizer=SGD, device="cpu", threads_per_rank=1, timeout_s=60)
SOON_S = 30  # half of every time-out, enough on a busy machine too
CULPRIT = 1
DEVICE_ASSERT = torch.AcceleratorError(f"CUDA error: device-side assert triggered{HINTS}")


def block(*_: object, **__: object) -> None:
    threading.Event().wait()


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def trained(fault: Callable[[], None]) -> tuple[Outcome, bool, float]:
    """Train on two ranks. One of them calls ``fault``, and every shutdown blocks.

    Returns the outcome, whether any rank began to leave its process groups, and the seconds.
    """
    leaving = Flag()

    def leave_and_block(*_: object) -> None:
        leaving.set()
        block()

    plan = make_plan("gpt2", dp=1, pp=2)
    model = captured("gpt2", plan.micro_batch_size)

    def run(world: World, report: ranks.Report) -> TrainingResult:
        dist.destroy_process_group = leave_and_block
        if world.rank == CULPRIT:
            fault()
        return train(model, plan, SETTINGS, TRAINED["gpt2"][1], world)

    start = time.monotonic()
    outcome = run_ranks(2, run, limit_s=60, straggle_s=SETTINGS.timeout_s)
    return outcome, bool(leaving), time.monotonic() - start


# A shutdown that blocks


def test_a_shutdown_that_blocks_costs_no_result(monkeypatch):
    monkeypatch.setattr(ranks, "LEAVE_S", 0.5)
    outcome, leaving, seconds = trained(lambda: None)
    assert outcome.status is Status.OK, outcome.error
    assert len(outcome.result.loss) == SETTINGS.iterations
    assert leaving
    assert seconds < SOON_S


# Out of memory, a failed device, an error of NCCL


def in_backward(error: Exception) -> None:
    StageModule.backward = raising(error)


def in_all_reduce(error: Exception) -> None:
    """Raise ``error`` in the first all-reduce of an iteration. Earlier ones connect the ranks."""
    all_reduce = dist.all_reduce

    def fail(*arguments: object, **keys: object) -> object:
        if ", in iteration " in str(THIS_RANK):
            raise error
        return all_reduce(*arguments, **keys)

    dist.all_reduce = fail


def at_the_device(error: Exception) -> None:
    World.device = raising(error)


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
NO_CONTEXT = torch.AcceleratorError(f"CUDA error: out of memory{HINTS}")
NCCL_OUT_OF_MEMORY = dist.DistBackendError(f"{UNHANDLED_CUDA}Failed to CUDA calloc 8388608 bytes")
DUPLICATE = dist.DistBackendError(
    f"{INVALID_USAGE}Duplicate GPU detected : rank 1 and rank 0 both on CUDA device e2000"
)


@pytest.mark.parametrize(
    ("where", "error", "status", "words"),
    [
        (in_backward, OUT_OF_MEMORY, Status.OOM, r"rank 1 \(HOST\) ran out of memory in B0@1; predicted"),
        (in_all_reduce, NCCL_OUT_OF_MEMORY, Status.OOM, r"rank 1 .*HOST.* ran out of memory"),
        (at_the_device, NO_CONTEXT, Status.OOM, r"rank 1 on HOST, .* ran out of memory: CUDA error: out of memory$"),
        (
            in_backward,
            DEVICE_ASSERT,
            Status.FAILED,
            r"device-side assert triggered[\s\S]*rank 1 on HOST, .* at B0@1 of",
        ),
        (in_all_reduce, DEVICE_ASSERT, Status.FAILED, r"device-side assert triggered[\s\S]*rank 1 on HOST, .* failed$"),
        (in_all_reduce, DUPLICATE, Status.FAILED, r"Duplicate GPU detected : rank 1[\s\S]*rank 1 on HOST, .* failed$"),
    ],
)
def test_the_rank_that_failed_is_named(where, error, status, words):
    outcome, leaving, seconds = trained(lambda: where(error))
    assert (outcome.status, outcome.ending) == (status, Ending.RAISED), outcome.error
    assert re.search(words.replace("HOST", re.escape(HOST)), outcome.error), outcome.error
    assert not leaving, "it would wait for kernels that the other ranks never answer"
    assert seconds < SOON_S


# Other ranks that notice the failure before or after the culprit reports it


def meet(world: World) -> list[int]:
    """Join the other ranks; returns the process ids of all ranks."""
    join(world, device=torch.device("cpu"), timeout_s=60)
    processes = [0] * world.size
    dist.all_gather_object(processes, os.getpid())
    return processes


def wait_for_end(process: int) -> None:
    """Wait for ``process`` to end."""
    with suppress(ProcessLookupError):
        wait([os.pidfd_open(process)])


def aborts_at_work() -> None:
    faulthandler.disable()
    THIS_RANK.set_computing()
    os.abort()


def aborts_while_waiting() -> None:
    faulthandler.disable()
    THIS_RANK.set_waiting_for("activations for F0@1")
    os.abort()


def raising_in_a_wait(error: Exception) -> Callable[[], None]:
    def act() -> None:
        with waiting_for("activations for F0@1"):
            raise error

    return act


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


GONE = dist.DistBackendError(f"{REMOTE}socketProgress: Connection closed by remote peer node2<42830>")
KILLED = f"rank 1 on {HOST}, before its first iteration, was killed by SIGKILL"
WAITED = f"rank 0 on {HOST}, before its first iteration, was ended by SIGABRT (its own output says why); it was waiting"


@pytest.mark.parametrize("culprit_first", [True, False], ids=["culprit first", "culprit last"])
@pytest.mark.parametrize(
    ("consequence", "cause", "status", "words"),
    [
        (aborts_while_waiting, raising(OUT_OF_MEMORY), Status.OOM, ["rank 1: ", "CUDA out of memory"]),
        (aborts_while_waiting, raising(ValueError("a bug")), Status.FAILED, ["rank 1: ", "ValueError: a bug"]),
        (aborts_while_waiting, kills_itself, Status.FAILED, [KILLED, WAITED]),
        (aborts_at_work, raising(ValueError("a bug")), Status.FAILED, ["rank 1: ", "ValueError: a bug"]),
        (aborts_at_work, kills_itself, Status.FAILED, [KILLED]),
        (
            raising_in_a_wait(GONE),
            kills_itself,
            Status.FAILED,
            [KILLED, "by remote peer"],
        ),
        (raising_in_a_wait(PEER_LATE[0]), raising(DEVICE_ASSERT), Status.FAILED, ["rank 1: ", "device-side assert"]),
    ],
)
def test_the_cause_outranks_its_consequences(consequence, cause, status, words, culprit_first):
    def run(world: World, report: ranks.Report) -> None:
        processes = meet(world)
        first, last = (CULPRIT, 0) if culprit_first else (0, CULPRIT)
        if world.rank == last:
            if world.rank == 0:
                THIS_RANK.set_waiting_for("activations for F0@1")
            wait_for_end(processes[first])
        if world.rank == CULPRIT:
            THIS_RANK.set_computing()
            cause()
        consequence()

    start = time.monotonic()
    outcome = run_ranks(2, run, limit_s=60)
    assert outcome.status is status, outcome.error
    assert outcome.error.startswith(words[0]), outcome.error
    assert all(each in outcome.error for each in words), outcome.error
    assert time.monotonic() - start < SOON_S


@pytest.mark.parametrize(
    ("abort", "status", "ending"),
    [(aborts_while_waiting, Status.TIMEOUT, Ending.WAITED), (aborts_at_work, Status.FAILED, Ending.ABORTED)],
)
def test_an_abort_with_no_other_cause_is_reported(abort, status, ending):
    outcome = run_ranks(1, lambda world, report: abort(), limit_s=60)
    assert (outcome.status, outcome.ending) == (status, ending)
    assert outcome.error.startswith(f"rank 0 on {HOST}, before its first iteration, was ended by SIGABRT")


def test_a_rank_has_not_begun_whatever_its_parent_has_trained(monkeypatch):
    monkeypatch.setattr(THIS_RANK, "_phase", "at U0")
    outcome = run_ranks(1, lambda world, report: aborts_at_work(), limit_s=60)
    assert outcome.error.startswith(f"rank 0 on {HOST}, before its first iteration, ")


def test_a_rank_that_dies_in_the_middle_of_a_message_is_reported():
    def run(world: World, report: ranks.Report) -> None:
        report(os.getpid())
        report(bytes(2**24))  # larger than a pipe's buffer; meanwhile the parent handles the first report

    def kill(report: int | bytes) -> None:
        rank = psutil.Process(report)
        while rank.status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        rank.kill()

    outcome = run_ranks(1, run, limit_s=60, on_report=kill)
    assert outcome.status is Status.FAILED
    assert "was killed by SIGKILL" in outcome.error


# Waits that a rank cannot interrupt


def stuck(silent: int | None) -> Callable[[World, ranks.Report], None]:
    def run(world: World, report: ranks.Report) -> None:
        if world.rank != silent:
            THIS_RANK.set_waiting_for("a connection from rank 1 to rank 0")
        block()

    return run


def test_a_wait_inside_a_blocking_call_is_ended(monkeypatch):
    monkeypatch.setattr(ranks, "MARGIN_S", 0.5)
    start = time.monotonic()
    outcome = run_ranks(2, stuck(silent=None), limit_s=60, straggle_s=0.5)
    assert time.monotonic() - start < SOON_S
    assert (outcome.status, outcome.ending) == (Status.TIMEOUT, Ending.WAITED)
    for rank in (0, 1):
        waited = rf"^rank {rank} on {HOST}, before its first iteration, waited \d+ s for a connection from rank 1"
        assert re.search(waited, outcome.error, re.MULTILINE), outcome.error
    outcome = run_ranks(2, stuck(silent=1), limit_s=60, straggle_s=0.5)
    assert outcome.error.startswith(f"rank 1 on {HOST}, before its first iteration, was not done after"), outcome.error


def test_the_limit_applies_to_each_single_wait(monkeypatch):
    clock = 100.0
    for module in ("auto3d.runtime.activity", "launch.run.waits"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: clock)
    monkeypatch.setattr(waits, "CONFIRM_S", 0.0)
    board = ActivityBoard(3)
    limit = WaitLimit(board, 60.0)
    board.write(0, "at F0@1", "")
    board.write(1, "at F0@1", "a message")
    clock = 130.0
    board.write(2, "at F0@1", "a message")
    assert limit.next_look([0, 1, 2]) == 160.0
    assert limit.next_look([0]) == 190.0, "a wait that begins later ends later"
    clock = 159.0
    assert not limit.failures([0, 1, 2])
    clock = 160.0
    assert list(limit.failures([0, 1, 2])) == [1]
    board.write(1, "at F0@1", "another message")
    assert not limit.failures([0, 1, 2])


# The whole command

HOLDS = """
import threading
import torch, torch.distributed as dist
from torch import nn

def block(*_):
    threading.Event().wait()

class Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        if FULL and dist.is_initialized():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x, y):
        return nn.functional.cross_entropy(Full.apply(self.b(torch.relu(self.a(x)))), y)

def make():
    if dist.is_initialized():
        dist.destroy_process_group = block
    return Net()
"""


def write_model(folder: Path, *, full: bool) -> None:
    (folder / "holds.py").write_text(HOLDS.replace("FULL", str(full)))


TRAIN = ("train", "own.yaml", "model.factory=holds:make", "plan.micro_batch_size=2", "--json")
FULL = f"rank 1 ({HOST}) ran out of memory in B0@1; predicted for pipeline device 1: "


def test_the_command_names_the_rank_that_ran_out_of_memory(folder, auto3d):
    write_model(folder, full=True)
    start = time.monotonic()
    error = auto3d(*TRAIN, code=1).err
    assert time.monotonic() - start < SOON_S
    assert f"training ended as oom:\n{FULL}" in error


def test_the_command_prints_its_result_though_the_shutdown_blocks(folder, auto3d, monkeypatch):
    monkeypatch.setattr(ranks, "LEAVE_S", 0.5)
    write_model(folder, full=False)
    assert '"loss"' in auto3d(*TRAIN).out


def joined(rank: int, port: int, output: Path) -> None:
    """Run one rank of the command as torchrun starts it. Its shutdown blocks if there are process groups to destroy."""
    sys.stdout = sys.stderr = output.open("w", buffering=1)
    os.dup2(sys.stderr.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command.sys.argv = ["auto3d", *TRAIN]
    try:
        command.main()
    finally:
        if dist.is_initialized():
            block()


@pytest.mark.parametrize(("full", "code"), [(True, 1), (False, 0)], ids=["out of memory", "success"])
def test_ranks_of_a_launcher_end_though_the_shutdown_blocks(folder, auto3d, monkeypatch, full, code):
    monkeypatch.setattr("auto3d.runtime.process.world.LEAVE_S", 0.5)
    write_model(folder, full=full)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    outputs = [folder / f"output-{rank}" for rank in range(2)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=joined, args=(rank, port, outputs[rank])) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    texts = [output.read_text() for output in outputs]
    assert codes == [code, code], texts
    if full:
        assert f"auto3d: {FULL}" in texts[1]
        assert re.search(rf"^auto3d: rank 0 on {HOST}, .* waiting for .* when the connection broke", texts[0], re.M)
    else:
        assert '"loss"' in texts[0]
