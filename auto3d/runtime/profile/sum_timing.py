"""Time sums of gradients beside compute, on all ranks of one node."""

from collections.abc import Callable, Sequence
from itertools import accumulate, cycle, islice

import torch

from auto3d.cost.profile import SumTimes
from auto3d.runtime.messages.slice_collectives import all_reduce
from auto3d.runtime.process.world import connect, new_group
from auto3d.runtime.profile.link_timing import ProfiledRanks
from auto3d.runtime.run_ahead import RunAhead

SUM_SIZES = tuple(4**power for power in range(9, 13))  # bytes: 256 KiB to 16 MiB
REPETITIONS = 9  # the fastest counts, because other programs on the machine only add time
LONGER = 4  # the compute beside a sum takes at least so many times as long, since the sum takes longer beside it


def time_sums(ranks: ProfiledRanks, compute: Sequence[Callable[[], None]]) -> SumTimes:
    """Times of all-reduces among all ranks, and by how much they delay the compute of ranks that runs beside them.

    Every rank does the same parts of ``compute`` at the same time. Times are means over the ranks.
    """
    everyone = new_group(range(ranks.world.size), device=ranks.device)
    connect(everyone, device=ranks.device, what="all ranks")
    run_ahead, clock = RunAhead(ranks.device), ranks.clock

    def once(parts: Sequence[Callable[[], None]], buffer: torch.Tensor | None) -> float:
        """Seconds of ``parts`` beside the sum of ``buffer``, if there is one; without parts, seconds of the sum."""
        ranks.barrier()
        compute[-1]()  # ranks come to a sum from compute, and not all at once
        begin = clock.mark()
        works = () if buffer is None else all_reduce(buffer, everyone).works
        for part in parts:
            part()
        end = clock.mark()
        for work in works:
            run_ahead.wait(work, "a gradient sum of the profile")
        if not parts:
            end = clock.mark()
        run_ahead.catch_up()
        clock.settle()
        return ranks.sum(clock.seconds(begin, end)) / ranks.world.size

    def least(parts: Sequence[Callable[[], None]], buffer: torch.Tensor | None = None) -> float:
        return min(once(parts, buffer) for _ in range(REPETITIONS))

    part_seconds = [least([part]) for part in compute]
    seconds, lost = [], []
    for size in SUM_SIZES:
        buffer = torch.zeros(size // 4, device=ranks.device)
        seconds.append(least([], buffer))
        count = next(n for n, time in enumerate(accumulate(cycle(part_seconds)), 1) if time >= LONGER * seconds[-1])
        parts = list(islice(cycle(compute), count))
        pairs = [(once(parts, None), once(parts, buffer)) for _ in range(REPETITIONS)]
        alone, beside = map(min, zip(*pairs, strict=True))
        lost.append(max(0.0, beside - alone))
    return SumTimes(sizes=SUM_SIZES, seconds=tuple(seconds), lost_s=tuple(lost))
