"""Checks and measures messages between neighbouring ranks, one way and both ways at once."""

import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.process.world import World, join, new_group
from auto3d.runtime.waiting import poll, wait, waiting_for

SIZES = {"cpu": (2**16, 2**20, 2**24), "cuda": (2**16, 2**20, 2**24, 2**26)}  # bytes
MEASURE_S = 0.1  # time to measure one size; a message that takes longer is measured once
LONGEST_S = 1.0  # Sizes whose messages are predicted to take longer are skipped.
REPETITIONS = 50  # most messages of one size
BUFFERS = 2  # receives in progress at a time


@dataclass(frozen=True)
class PairRate:
    """Bandwidth of messages of one size between two neighbouring ranks, per direction."""

    ranks: tuple[int, int]
    between_nodes: bool
    size_bytes: int
    repetitions: int
    one_way_gbit_per_s: float
    both_ways_gbit_per_s: float


@dataclass(frozen=True)
class Neighbours:
    """Two neighbouring ranks of one node."""

    ranks: tuple[int, int]
    host: str
    peer_access: bool | None  # whether their GPUs reach each other's memory; None: no GPUs, or each rank sees its own


@dataclass(frozen=True)
class Links:
    rates: list[PairRate]
    neighbours: list[Neighbours]


class CorruptedError(RuntimeError):
    """A message arrived with other contents than it was sent with."""


def join_within(world: World, device: torch.device, *, meet_s: float, wait_s: float) -> None:
    """Join the other ranks, which have ``meet_s`` to meet; every later wait for another rank ends after ``wait_s``."""
    join(world, device=device, timeout_s=meet_s)
    THIS_RANK.timeout_s = wait_s


def measure_links(world: World, kind: str, *, meet_s: float, wait_s: float) -> Links:
    """Bandwidths of all pairs of ranks r and r + 1, measured one pair after the other; equal on all ranks.

    Ranks have ``meet_s`` to meet; every later wait for another rank ends after ``wait_s``. Raises CorruptedError on a
    rank that receives other contents than were sent.
    """
    device = world.device(kind)
    if kind == "cpu":
        torch.set_num_threads(1)
    join_within(world, device, meet_s=meet_s, wait_s=wait_s)
    THIS_RANK.set_phase("in the measurement of messages")
    everyone = list(range(world.size))
    upward, downward = (new_group(everyone, device=device, messages=True) for _ in range(2))
    rates = []
    for lower in range(world.size - 1):
        pair = _Pair(world.rank, lower, upward, downward, device)
        between_nodes = THIS_RANK.hosts[lower] != THIS_RANK.hosts[lower + 1]
        once_s, last_size = 0.0, 0
        for size in SIZES[kind]:
            if last_size and once_s * size / last_size > LONGEST_S:
                break
            once_s, last_size = max(pair.seconds(size, 1, both=both) for both in (False, True)), size
            count = max(1, min(REPETITIONS, int(MEASURE_S / once_s)))
            one_way, both_ways = (8e-9 * size * count / pair.seconds(size, count, both=both) for both in (False, True))
            rates.append(PairRate((lower, lower + 1), between_nodes, size, count, one_way, both_ways))
    return Links(rates, _neighbours(world, kind))


@dataclass(frozen=True)
class _Pair:
    """Ranks ``lower`` and ``lower + 1``. This rank may be one of them or neither."""

    rank: int
    lower: int
    upward: dist.ProcessGroup
    downward: dist.ProcessGroup
    device: torch.device

    def seconds(self, size: int, count: int, *, both: bool) -> float:
        """Time of the slower rank for ``count`` messages of ``size`` bytes, upward or ``both`` ways at once.

        Every rank of the world must call this; all get the same value.
        """
        here = self.rank - self.lower
        pattern = torch.arange(size // 4, device=self.device, dtype=torch.float32) % 97
        buffers = [torch.zeros_like(pattern) for _ in range(BUFFERS)]
        message = pattern + 1 + here
        self._meet(0.0)
        seconds_here = 0.0
        if here in (0, 1):
            seconds_here = self._exchange(message, buffers, count, sends=both or here == 0, receives=both or here == 1)
        seconds = self._meet(seconds_here)
        if here in (0, 1) and (both or here == 1):
            expected = pattern + 2 - here
            for buffer in buffers[:count]:
                if not torch.equal(buffer, expected):
                    sender = THIS_RANK.name(self.lower + 1 - here)
                    raise CorruptedError(f"a message of {size} bytes from {sender} arrived with other contents")
        return seconds

    def _exchange(
        self, message: torch.Tensor, buffers: list[torch.Tensor], count: int, *, sends: bool, receives: bool
    ) -> float:
        """Send and receive ``count`` messages; returns the seconds that this took."""
        peer = 2 * self.lower + 1 - self.rank
        out, into = (self.upward, self.downward) if peer > self.rank else (self.downward, self.upward)
        what = f"messages of {message.numel() * message.element_size()} bytes between it and {THIS_RANK.name(peer)}"
        clock = _Clock(self.device)
        pending: deque[dist.Work] = deque()
        for number in range(count):
            with waiting_for(what):
                if receives:
                    pending.append(_begun(dist.irecv(buffers[number % BUFFERS], peer, group=into)))
                if sends:
                    pending.append(_begun(dist.isend(message, peer, group=out)))
            # On a GPU, receives of one group complete in order. On a CPU, only this wait protects buffers in use.
            while self.device.type == "cpu" and len(pending) > (BUFFERS - 1) * (sends + receives):
                wait(pending.popleft(), what=what)
        for work in pending:
            with waiting_for(what):
                work.wait()
        return clock.seconds(what)

    def _meet(self, seconds: float) -> float:
        """Wait for all ranks; returns the largest of their ``seconds``."""
        largest = torch.tensor(seconds, dtype=torch.float64)
        pair = f"{THIS_RANK.name(self.lower)} and {THIS_RANK.name(self.lower + 1)}"
        what = f"the other ranks around the messages between {pair}"
        with waiting_for(what):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            return largest.item()


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


class _Clock:
    """Measures seconds from its construction on; on a GPU, until the GPU has done all queued operations."""

    def __init__(self, device: torch.device) -> None:
        self._start = time.perf_counter()
        self._began = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._began is not None:
            self._began.record()

    def seconds(self, what: str) -> float:
        """Seconds until now. Polls a GPU until its queue is done; ``what`` names the wait in a time-out's error."""
        if self._began is None:
            return time.perf_counter() - self._start
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        poll(ended.query, what=what)
        return self._began.elapsed_time(ended) / 1e3


def _neighbours(world: World, kind: str) -> list[Neighbours]:
    """All pairs of ranks r and r + 1 on the same node."""
    here = world.device(kind).index
    sees = kind == "cuda" and here + 1 < torch.cuda.device_count()
    access_here = torch.cuda.can_device_access_peer(here, here + 1) if sees else None
    access: list[bool | None] = [None] * world.size
    with waiting_for("the peer access of all ranks"):
        dist.all_gather_object(access, access_here)
    return [
        Neighbours((lower, lower + 1), THIS_RANK.hosts[lower], access[lower])
        for lower in range(world.size - 1)
        if THIS_RANK.hosts[lower] == THIS_RANK.hosts[lower + 1]
    ]
