"""Time messages and all-reduces between the ranks of one node.

Nothing is timed through ``deepspeed.comm``: on a CPU its log records the launch of an asynchronous operation, not its
end, and training communicates through torch.distributed.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import process_time

import torch
import torch.distributed as dist

from auto3d.cluster import AllReduceTimes
from auto3d.cost.profile import MessageTimes
from auto3d.runtime.clock import Clock, clock_of
from auto3d.runtime.waiting import waiting_for
from auto3d.runtime.world import World, new_group

MESSAGE_SIZES = tuple(4**power for power in range(5, 13))  # bytes: 1 KiB to 16 MiB
ALL_REDUCE_SIZES = (
    16,
    *(8**power for power in range(4, 9)),
    2**26,
)  # bytes: 16, as for loss and gradient norm; 4 KiB to 16 MiB; 64 MiB


class ProfiledRanks:
    """The joined ranks of a profile, seen from one of them. Every rank makes the same calls in the same order."""

    def __init__(self, world: World, device: torch.device, timeout_s: float) -> None:
        self.world, self.device, self.timeout_s = world, device, timeout_s
        self.clock = clock_of(device)
        self.everyone = new_group(range(world.size), timeout_s, device=device)

    def barrier(self) -> None:
        self.sum(0.0)

    def of_rank_0(self, value: float) -> float:
        """Rank 0's ``value``, on every rank."""
        return self.sum(value if self.world.rank == 0 else 0.0)

    def sum(self, value: float) -> float:
        """The sum of all ranks' ``value``, on every rank."""
        total = torch.tensor([value], dtype=torch.float64)
        with waiting_for("the other ranks of the profile", self.timeout_s):
            dist.all_reduce(total)
            return float(total)


def time_messages(ranks: ProfiledRanks) -> MessageTimes:
    """Times of messages between ranks 0 and 1: half of a round trip, for each size."""
    seconds, processor_s = [], []
    for size in MESSAGE_SIZES:
        content = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
        wall, cpu = [], []
        for _ in range(_repetitions(size)):
            ranks.barrier()
            begin = process_time()
            if ranks.world.rank < 2:
                wall.append(time_communication(partial(_round_trip, ranks, content), ranks.clock) / 2)
            cpu.append((process_time() - begin) / 2 / ranks.clock.queued)
        seconds.append(ranks.of_rank_0(median(wall[1:] or [0.0])))
        processor_s.append(ranks.of_rank_0(median(cpu[1:])))
    return MessageTimes(sizes=MESSAGE_SIZES, seconds=tuple(seconds), processor_s=tuple(processor_s))


def time_all_reduces(ranks: ProfiledRanks) -> AllReduceTimes:
    """Times of all-reduces among the first 2, 4, … ranks and among all of them, for each size."""
    counts = rank_counts(ranks.world.size, least=2)
    rows = []
    for members in counts:
        group = new_group(range(members), ranks.timeout_s, device=ranks.device)
        row = []
        for size in ALL_REDUCE_SIZES:
            content = torch.zeros(size // 4, device=ranks.device)
            times = []
            for _ in range(_repetitions(size)):
                ranks.barrier()
                if ranks.world.rank < members:
                    with waiting_for("an all-reduce", ranks.timeout_s):
                        times.append(time_communication(partial(dist.all_reduce, content, group=group), ranks.clock))
            row.append(ranks.of_rank_0(median(times[1:] or [0.0])))
        rows.append(tuple(row))
    return AllReduceTimes(ranks=counts, sizes=ALL_REDUCE_SIZES, seconds=tuple(rows))


def time_communication(run: Callable[[], object], clock: Clock) -> float:
    """Seconds that ``run``, which communicates, takes.

    On a GPU several runs are queued: in training, too, a message finds its kernel already launched, because the process
    runs ahead of its device. An event queued behind a receive is recorded when the message arrives, since the queue
    waits for it.
    """
    begin = clock.mark()
    for _ in range(clock.queued):
        run()
    end = clock.mark()
    clock.settle()
    return clock.seconds(begin, end) / clock.queued


def rank_counts(size: int, *, least: int) -> tuple[int, ...]:
    """Numbers of ranks to measure, from ``least`` to ``size``: all of them up to 4, else powers of 2 and ``size``."""
    counts = range(1, size + 1) if size <= 4 else [2**power for power in range(size.bit_length())]
    return tuple(sorted({number for number in (*counts, size) if number >= least}))


def _round_trip(ranks: ProfiledRanks, content: torch.Tensor) -> None:
    peer = 1 - ranks.world.rank
    for sends in (ranks.world.rank == 0, ranks.world.rank == 1):
        with waiting_for("a message", ranks.timeout_s):
            exchange = dist.isend if sends else dist.irecv
            work = exchange(content, peer, group=ranks.everyone)
            assert work is not None, "this rank belongs to the group"
            work.wait()  # with NCCL only the device's queue waits


def _repetitions(size: int) -> int:
    """The number of repetitions for a message of ``size`` bytes; small messages vary more and are repeated more."""
    return 2 + max(5, min(30, 2**24 // size))
