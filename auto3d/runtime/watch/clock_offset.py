"""How far the clocks of ranks are apart, so that times of different machines fit into one timeline."""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from auto3d.runtime.messages.gathered import of_all_ranks
from auto3d.runtime.waiting import wait

ROUNDS = 20  # the round with the shortest way there and back has the smallest error
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # an identifier per running kernel, whose processes share its clock


def seconds_ahead() -> float:
    """Seconds by which this rank's perf_counter is ahead of rank 0's. Every rank must call it.

    It is exactly 0 on the machine of rank 0. Elsewhere its error is at most half of the shortest round trip (F.
    Cristian, Probabilistic clock synchronization, 1989).
    """
    # 52 bits, because a float64 holds them exactly.
    kernels = of_all_ranks([int(_BOOT.read_text().replace("-", "")[:13], 16)], torch.int64)
    same = (kernels == kernels[0]).flatten().tolist()
    ahead = 0.0
    for rank in (rank for rank in range(dist.get_world_size()) if not same[rank]):
        if dist.get_rank() in (0, rank):
            ahead = measure_ahead(rank, perf_counter)
    return 0.0 if dist.get_rank() == 0 else ahead


def measure_ahead(rank: int, clock: Callable[[], float]) -> float:
    """Seconds by which the ``clock`` of ``rank`` is ahead of rank 0's; only ``rank`` gets the answer.

    Rank 0 and ``rank`` call it.
    """
    number = torch.zeros(1, dtype=torch.float64)
    what = f"the clock of rank {rank}"

    def send(value: float, to: int) -> None:
        number[0] = value
        work = dist.isend(number, to)
        assert work is not None
        wait(work, what=what)

    def receive(source: int) -> float:
        work = dist.irecv(number, source)
        assert work is not None
        wait(work, what=what)
        return float(number[0])

    best, ahead = float("inf"), 0.0
    for _ in range(ROUNDS):
        if dist.get_rank() == 0:
            receive(rank)
            send(clock(), rank)
        else:
            sent = clock()
            send(sent, 0)
            there = receive(0)
            back = clock()
            if back - sent < best:
                best, ahead = back - sent, (sent + back) / 2 - there
    return ahead
