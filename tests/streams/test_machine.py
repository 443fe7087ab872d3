"""The simulator can fail: it finds deadlocks of queues, blocks and order, and unordered uses of memory."""

from collections.abc import Callable

import pytest
import torch

from tests.streams.fake_distributed import FakeDistributed
from tests.streams.machine import DeadlockError, Kernel, Machine, RaceError, current
from tests.streams.torch_on_device import fake_cuda, on_device


def run(
    body: Callable[[FakeDistributed, int], object], *, ranks: int = 2, queues: int = 8, blocks: int = 1, seed: int = 0
) -> list:
    """Run ``body(dist, rank)`` on every rank, after connecting it to its neighbours."""
    machine = Machine(ranks, queues=queues, blocks=blocks, seed=seed)
    network = FakeDistributed(machine, blocks=1, before_call=lambda: None)

    def on_rank(rank: int) -> object:
        with on_device(current(), lambda: None):
            return body(network, rank)

    with fake_cuda():
        return machine.run(on_rank)


def exchange(network: FakeDistributed, rank: int, *, wait: bool = True, synchronise: bool = False) -> list[float]:
    """Send one number to the other rank and receive one, in two groups, as Exchange does."""
    groups = [network.new_group([0, 1]) for _ in range(2)]
    for source, group in enumerate(groups):
        call = network.isend if rank == source else network.irecv
        call(torch.zeros(1), 1 - rank, group=group).wait()
    there = torch.full((2,), float(rank + 1))
    back = torch.empty(2)
    receiving = network.irecv(back, 1 - rank, group=groups[1 - rank])
    if synchronise:
        torch.cuda.synchronize()
    network.isend(there, 1 - rank, group=groups[rank])
    if wait:
        receiving.wait()
    return (back * 10).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_what_is_received_is_what_was_sent(seed):
    assert run(exchange, seed=seed) == [[20.0, 20.0], [10.0, 10.0]]


def test_a_result_that_nothing_waits_for_is_found():
    with pytest.raises(RaceError, match=r"receives.*nothing orders the two"):
        run(lambda network, rank: exchange(network, rank, wait=False))


def test_a_buffer_that_is_written_while_it_is_sent_is_found():
    def body(network: FakeDistributed, rank: int) -> None:
        tensor = torch.zeros(2)
        if rank == 0:
            network.isend(tensor, 1)
            tensor.fill_(1.0)
        else:
            network.irecv(tensor, 0)

    with pytest.raises(RaceError, match=r"fill_.* writes a buffer that .*sends.* reads"):
        run(body)


def test_a_receive_before_the_send_blocks_where_there_is_one_queue():
    with pytest.raises(DeadlockError) as error:
        run(exchange, queues=1)
    assert "rank 0: the host is stuck" in str(error.value)
    assert "rank 1 receives from rank 0) (spins until rank 0 starts its own)" in str(error.value)


def test_a_synchronisation_after_a_receive_blocks_however_many_queues_there_are():
    with pytest.raises(DeadlockError, match="spins until rank 1 enqueues its own"):
        run(lambda network, rank: exchange(network, rank, synchronise=True), queues=32)


def test_kernels_that_spin_leave_no_blocks_to_others():
    def body(network: FakeDistributed, rank: int) -> None:
        groups = [network.new_group([0, 1]) for _ in range(2)]
        for group in groups:
            network.all_reduce(torch.zeros(1), group=group, async_op=True)
        host = current()
        torch.cuda.synchronize()
        host.device.free_blocks = 1
        for group in (groups[rank], groups[1 - rank]):
            network.all_reduce(torch.zeros(1), group=group, async_op=True)
            host.block(lambda: host.device.free_blocks == 0)

    with pytest.raises(DeadlockError, match="waits for 1 blocks, of which 0 are free"):
        run(body)


def test_a_queue_issues_in_the_order_of_enqueueing():
    """A stream behind a stuck one in the same queue does not continue; in another queue it does."""

    def ends(queues: int) -> list[str]:
        found: list[str] = []
        machine = Machine(1, queues=queues, blocks=8, seed=1)

        def body(rank: int) -> None:
            device = current().device
            first, second = device.new_stream("first"), device.new_stream("second")

            def kernel(stream, name: str, seconds: float) -> Kernel:
                return Kernel(stream, name, seconds=seconds, effect=lambda: found.append(name))

            first.enqueue(kernel(first, "long", 100.0))
            first.enqueue(kernel(first, "after it", 1.0))
            second.enqueue(kernel(second, "other stream", 1.0))

        machine.run(body)
        return found

    assert ends(1) == ["long", "after it", "other stream"] or ends(1) == ["long", "other stream", "after it"]
    assert ends(8) == ["other stream", "long", "after it"]
