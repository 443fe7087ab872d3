"""Time messages and collectives between the ranks of one node.

Nothing is timed through ``deepspeed.comm``: on a CPU its log records the launch of an asynchronous operation, not its
end, and training communicates through torch.distributed.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from statistics import median
from time import process_time

import torch
import torch.distributed as dist

from auto3d.cluster import CollectiveTimes, NodeCollectives
from auto3d.conversions import Collective
from auto3d.cost.profile import MessageTimes
from auto3d.runtime.clock import Clock, clock_of
from auto3d.runtime.messages.tensor_group import ProcessTensorGroup
from auto3d.runtime.process.world import World, connect, new_group, without_pair_warning
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.waiting import waiting_for

MESSAGE_SIZES = tuple(4**power for power in range(5, 13))  # bytes: 1 KiB to 16 MiB
ALL_REDUCE_SIZES = (
    16,
    *(8**power for power in range(4, 9)),
    2**26,
)  # bytes: 16, as for loss and gradient norm; 4 KiB to 16 MiB; 64 MiB
PRODUCT_SIZE = 512  # rows and columns of the product before each collective: some milliseconds on a CPU core
SHARED_SIZES = tuple(8**power for power in range(4, 9))  # bytes of the whole tensor in all-gathers and reduce-scatters


class ProfiledRanks:
    """The joined ranks of a profile, seen from one rank. Every rank makes the same calls in the same order."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self.clock = clock_of(device)
        self.everyone = new_group(range(world.size), device=device)

    def barrier(self) -> None:
        self.sum(0.0)

    def of_rank_0(self, value: float) -> float:
        """Rank 0's ``value``, on every rank."""
        return self.sum(value if self.world.rank == 0 else 0.0)

    def sum(self, value: float) -> float:
        """The sum of all ranks' ``value``, on every rank."""
        total = torch.tensor([value], dtype=torch.float64)
        with waiting_for("the other ranks of the profile"):
            dist.all_reduce(total)
            return float(total)


def time_messages(ranks: ProfiledRanks) -> MessageTimes:
    """Times of messages between ranks 0 and 1: half of a round trip, for each size."""
    seconds, processor_s = [], []
    if ranks.world.rank < 2:  # NCCL connects the two here, and torch would warn of it
        without_pair_warning(partial(_round_trip, ranks, torch.zeros(1, device=ranks.device)))
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


def time_collectives(ranks: ProfiledRanks, sizes: Mapping[Collective, Collection[int]]) -> NodeCollectives:
    """Times of collectives among the first 2, 4, … ranks and among all of them.

    They run as in tensor parallelism, at the sizes of whole tensors in this module and in ``sizes``, in bytes.
    """
    counts = rank_counts(ranks.world.size, least=2)
    groups = []
    run_ahead = RunAhead(ranks.device)
    for members in counts:
        group = new_group(range(members), device=ranks.device)
        inside = ranks.world.rank < members
        if inside:
            connect(group, device=ranks.device, what=f"{members} ranks")
            among = tuple(range(members))
            groups.append(ProcessTensorGroup(group, among, run_ahead=run_ahead))

    def times(collective: Collective, usual: Collection[int]) -> CollectiveTimes:
        all_sizes = tuple(sorted({*usual, *sizes.get(collective, ())}))
        rows = [_seconds_of_each(ranks, members, groups, run_ahead, collective, all_sizes) for members in counts]
        return CollectiveTimes(ranks=counts, sizes=all_sizes, seconds=tuple(rows))

    return NodeCollectives(
        all_reduce=times(Collective.ALL_REDUCE, ALL_REDUCE_SIZES),
        all_gather=times(Collective.ALL_GATHER, SHARED_SIZES),
        reduce_scatter=times(Collective.REDUCE_SCATTER, SHARED_SIZES),
    )


def _seconds_of_each(
    ranks: ProfiledRanks,
    members: int,
    groups: Collection[ProcessTensorGroup],
    run_ahead: RunAhead,
    collective: Collective,
    sizes: Collection[int],
) -> tuple[float, ...]:
    """Seconds of ``collective`` among the first ``members`` ranks, for each of ``sizes``; on every rank.

    The ranks come from a matrix product, as in training. Straight after a barrier they would begin at the same moment,
    with the tensor in their caches.
    """
    ours = next((group for group in groups if group.shards == members), None)
    seconds = []
    square = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, device=ranks.device)
    for size in sizes:
        content = torch.zeros((members, -(-size // 4 // members)), device=ranks.device)
        times = []
        for _ in range(_repetitions(size)):
            ranks.barrier()
            if ours is not None:
                _ = square @ square
                times.append(time_communication(partial(_run, ours, collective, content, size), ranks.clock))
                run_ahead.catch_up()
        seconds.append(ranks.of_rank_0(median(times[1:] or [0.0])))
    return tuple(seconds)


def _run(group: ProcessTensorGroup, collective: Collective, content: torch.Tensor, size: int) -> None:
    if collective is Collective.ALL_REDUCE:
        group.all_reduce(content.view(-1)[: size // 4], "the profile")()
    elif collective is Collective.ALL_GATHER:
        group.all_gather(content[0], "the profile")()
    else:
        group.reduce_scatter(content, "the profile")()


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
        with waiting_for("a message"):
            exchange = dist.isend if sends else dist.irecv
            work = exchange(content, peer, group=ranks.everyone)
            assert work is not None, "this rank belongs to the group"
            work.wait()  # with NCCL only the device's queue waits


def _repetitions(size: int) -> int:
    """The number of repetitions for a message of ``size`` bytes; small messages vary more and are repeated more."""
    return 2 + max(5, min(30, 2**24 // size))
