"""DeepSpeed's log: each call is timed alone, and until it has ended."""

from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from auto3d.runtime.measurement import Status
from auto3d.runtime.process.world import join
from launch.run.ranks import run_ranks

CALLS = 200


def test_logged_seconds_are_no_more_than_the_calls_took():
    """DeepSpeed itself would report the sum of all earlier calls with each, a hundred times as much."""
    pytest.importorskip("deepspeed")

    def run(world, report):
        from deepspeed import comm

        from launch.peers.deepspeed_log import read_log, start_log
        from launch.peers.deepspeed_setup import join_deepspeed

        join(world, device=torch.device("cpu"), timeout_s=60)
        join_deepspeed(SimpleNamespace(world=world))
        log = start_log()
        before = perf_counter()
        for _ in range(CALLS):
            comm.all_reduce(torch.ones(256))
        elapsed = perf_counter() - before
        (calls,) = read_log(log, 2)
        return calls, elapsed

    outcome = run_ranks(1, run, limit_s=60)
    assert outcome.status is Status.OK, outcome.error
    calls, elapsed = outcome.result
    assert (calls.operation, calls.calls, calls.message_bytes) == ("all_reduce", CALLS / 2, CALLS / 2 * 1024)
    assert 0 < 2 * calls.seconds <= elapsed


def test_a_logged_call_returns_when_it_has_ended():
    pytest.importorskip("deepspeed")
    from launch.peers.deepspeed_log import BlockingBackend

    waited = []

    class Started(dist.Work):
        def wait(self, timeout=None):
            waited.append(self)
            return True

    handle = Started()
    backend = BlockingBackend(SimpleNamespace(all_reduce=lambda tensor, async_op: handle, using_mpi=False, send=len))
    assert backend.all_reduce([1.0], async_op=True) is handle
    assert waited == [handle]
    assert backend.send([1, 2]) == 2
    assert backend.using_mpi is False
