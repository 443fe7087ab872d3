"""run_ranks: whatever happens to a rank, the run ends soon, reports the cause, and leaves no process."""

import multiprocessing
import os
import signal
import socket
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.measurement import Status
from auto3d.runtime.process.world import join, leave, new_group
from auto3d.runtime.waiting import WaitTimeoutError, wait
from launch.run.ranks import run_ranks


def meet(world, report) -> int:
    join(world, device=torch.device("cpu"), timeout_s=30)
    total = torch.tensor(world.rank)
    dist.all_reduce(total)
    report(("met", world.rank))
    leave()
    return int(total)


def test_rank_0_gives_the_result_and_the_reports():
    reports = []
    before = set(psutil.Process().children())  # processes of other tests
    outcome = run_ranks(3, meet, limit_s=60, on_report=reports.append)
    assert (outcome.status, outcome.result) == (Status.OK, 3)
    assert reports == [("met", 0)]
    assert set(psutil.Process().children()) <= before, "none of its processes is left"


def end_badly(how: str):
    def target(world, report) -> None:
        join(world, device=torch.device("cpu"), timeout_s=20)
        THIS_RANK.timeout_s = 3  # seconds, for all waits below
        group = new_group(range(world.size), device=torch.device("cpu"))
        dist.barrier()
        if world.rank == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "compute":
                time.sleep(60)
            if how == "exit":
                os._exit(7)
            if how == "raise":
                raise ValueError("a bug of the model")
            if how == "memory":
                torch.empty(10**15)
            if how == "raise late":  # the others notice the lost connection before this rank reports its error
                leave()
                time.sleep(0.5)
                raise ValueError("a bug of the model")
        if how == "raise late":
            dist.all_reduce(torch.zeros(1))
        receiving = dist.irecv(torch.zeros(1), src=0 if world.rank == 1 else 1, group=group)
        wait(receiving, what="a message that never comes")

    return target


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("kill", Status.FAILED, "rank 1 on HOST, before its first iteration, was killed by SIGKILL"),
        ("exit", Status.FAILED, "rank 1 on HOST, before its first iteration, ended with exit code 7"),
        ("raise", Status.FAILED, "ValueError: a bug of the model"),
        ("raise late", Status.FAILED, "ValueError: a bug of the model"),
        ("memory", Status.OOM, "can't allocate memory"),
        ("stop", Status.TIMEOUT, "rank 1 on HOST, before its first iteration, is stopped"),
        ("compute", Status.TIMEOUT, "rank 1 on HOST, before its first iteration, was not done after 3."),
        ("silence", Status.TIMEOUT, "on HOST, before its first iteration, waited 3 s for a message that never comes"),
    ],
)
def test_the_cause_is_reported_within_seconds(how, status, words):
    start = time.monotonic()
    before = set(psutil.Process().children())  # processes of other tests
    outcome = run_ranks(3, end_badly(how), limit_s=60)
    assert time.monotonic() - start < 10
    assert outcome.status is status, outcome.error
    assert words.replace("HOST", socket.gethostname()) in outcome.error
    if how in ("stop", "compute"):
        assert outcome.error.count("waited 3 s for a message that never comes") == 2, "both other ranks waited"
    assert set(psutil.Process().children()) <= before, "none of its processes is left"


def compute_for_ever(world, report) -> None:
    while True:
        time.sleep(0.1)


def test_a_run_that_exceeds_its_time_limit_is_ended():
    before = set(psutil.Process().children())  # processes of other tests
    outcome = run_ranks(2, compute_for_ever, limit_s=1)
    assert outcome.status is Status.TIMEOUT
    first, *others = outcome.error.splitlines()
    assert first == "not done after 1 s"
    assert others == [
        f"rank {rank} on {socket.gethostname()}, before its first iteration, still runs" for rank in (0, 1)
    ]
    assert set(psutil.Process().children()) <= before, "none of its processes is left"


def test_ranks_end_with_their_parent_even_if_it_is_killed():
    context = multiprocessing.get_context("fork")
    parent = context.Process(target=run_ranks, args=(2, compute_for_ever), kwargs={"limit_s": None})
    parent.start()
    try:
        deadline = time.monotonic() + 60
        while len(psutil.Process(parent.pid).children()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.5)
        ranks = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.join()
    deadline = time.monotonic() + 5
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.05)


def test_a_wait_that_times_out_is_its_own_kind_of_error():
    assert issubclass(WaitTimeoutError, TimeoutError)
