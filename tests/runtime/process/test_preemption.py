"""Threads of a rank on CPUs displace no other thread when a message wakes them, unless the user has chosen a policy."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from auto3d.runtime.process.preemption import wake_without_preemption
from auto3d.runtime.process.world import join, leave


def policies(world) -> dict[str, set[int]]:
    """The policies of this rank's threads, by their names."""
    join(world, device=torch.device("cpu"), timeout_s=60)
    found: dict[str, set[int]] = {}
    for thread in Path("/proc/self/task").iterdir():
        found.setdefault((thread / "comm").read_text().strip(), set()).add(os.sched_getscheduler(int(thread.name)))
    leave()
    return found


def test_the_threads_of_a_rank_and_of_gloo(processes):
    for of_threads in processes.run(2, policies):
        of_gloo = [policy for name, policy in of_threads.items() if "gloo" in name]
        assert of_gloo
        assert all(policy == {os.SCHED_BATCH} for policy in of_gloo), of_threads


def chosen(policy: int) -> None:
    os.sched_setscheduler(0, policy, os.sched_param(0))
    wake_without_preemption()
    os._exit(os.sched_getscheduler(0))


@pytest.mark.parametrize(
    ("policy", "found"), [(os.SCHED_OTHER, os.SCHED_BATCH), (os.SCHED_IDLE, os.SCHED_IDLE)], ids=["default", "idle"]
)
def test_a_policy_of_the_users_stays(policy, found):
    process = multiprocessing.get_context("fork").Process(target=chosen, args=(policy,))
    process.start()
    process.join()
    assert process.exitcode == found
