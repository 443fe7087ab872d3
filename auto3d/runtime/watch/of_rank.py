"""One rank's part in watching a training: it times its operations and exchanges summaries with the other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from auto3d.plan import Plan
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.clock import clock_of
from auto3d.runtime.executor import Executor
from auto3d.runtime.messages.gathered import of_all_ranks
from auto3d.runtime.waiting import waiting_for
from auto3d.runtime.watch.clock_offset import seconds_ahead
from auto3d.runtime.watch.observer import ObservedOperation, OperationTimes
from auto3d.runtime.watch.peak_memory import PeakMemory
from auto3d.runtime.watch.rank_trace import IterationTracer
from auto3d.runtime.watch.slow_data import SlowData, SlowReads
from auto3d.runtime.watch.slow_rank import COMPARED, OperationMedians, SlowRank, SlowRanks, lags_of, medians_of
from auto3d.schedule.operation import Kind
from auto3d.schedule.program import Program

FIRST_WINDOW = 5  # iterations before the first exchange
LEAST_S = 10.0  # least seconds between two exchanges, once the time of an iteration is known


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """Which iterations to trace (from 1; 0: the first after ``warmup`` iterations), and the folder for it."""

    iterations: tuple[int, ...]
    warmup: int
    folder: Path


@dataclass(frozen=True)
class TracedIteration:
    """The files that the ranks wrote of one iteration, in order of ranks; ``iteration`` counts from 1."""

    iteration: int
    files: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What the ranks know of each other since their last exchange; the same on every rank."""

    peak_bytes: int | None = None  # largest peak memory of a rank so far; None before the first exchange
    peak_rank: int | None = None  # the rank that has it
    slow: tuple[SlowRank, ...] = ()
    slow_data: SlowData | None = None  # None: no stage waits long for data
    traced: TracedIteration | None = None  # the iteration that has just ended, if it was traced


class Watch:
    """Watches the training of one rank. All ranks make the same calls, where no micro-batch is in flight."""

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        memory: PeakMemory,
        device: torch.device,
        *,
        first_iteration: int,
        programs: Sequence[Program],
        trace: TraceRequest | None = None,
    ) -> None:
        self.latest = Watched()
        self._device, self._plan = device, plan
        self._trace, self._traced_from = trace, _traced_from(trace, programs, first_iteration)
        self._tracer: IterationTracer | None = None
        self._clock = clock_of(device)
        self._times = OperationTimes(self._clock)
        executor.observe(self._times)
        self._stages, self._memory = len(plan.stages), memory
        self._slow, self._slow_reads = SlowRanks(THIS_RANK.hosts), SlowReads(THIS_RANK.hosts)
        self._read_s = 0.0  # in reads since the last exchange
        self._observed: list[ObservedOperation] = []
        self._exchanged_at = first_iteration  # iterations done at the last exchange
        self._window = FIRST_WINDOW  # iterations until the next exchange
        self._began = perf_counter()
        self._start(first_iteration)

    def after(self, done: int) -> None:
        """Note the operations of the iterations that have ended; ``done`` iterations are complete on every rank."""
        observed = self._times.take(self._origin)
        self._observed += observed
        self._read_s += self._times.take_read_s()
        traced = None
        if self._tracer is not None:
            traced = self._end_trace(self._tracer, observed, done)
        if done - self._exchanged_at >= self._window:
            self._exchange(done)
        self.latest = replace(self.latest, traced=traced)
        self._start(done)

    def _start(self, done: int) -> None:
        """Begin what comes after ``done`` iterations; the device is idle."""
        if done in self._traced_from:
            self._tracer = IterationTracer(self._device)
            self._times.annotate = self._tracer.annotate
        self._origin_s, self._origin = perf_counter(), self._clock.mark()

    def _end_trace(self, tracer: IterationTracer, observed: Sequence[ObservedOperation], done: int) -> TracedIteration:
        """Write this rank's trace of the iterations that have ended, once all ranks have."""
        assert self._trace is not None
        self._tracer = self._times.annotate = None
        rank = dist.get_rank()
        trace = tracer.end(
            observed,
            origin_s=self._origin_s,
            ahead_s=seconds_ahead(),
            rank=rank,
            device=self._plan.position(rank)[0],
            host=THIS_RANK.hosts[rank],
        )
        folder = self._trace.folder / f"iteration-{done}"
        folder.mkdir(mode=0o700, exist_ok=True)
        files = tuple(folder / f"rank-{number}.json.gz" for number in range(dist.get_world_size()))
        trace.write(files[rank])
        with waiting_for("the traces of all ranks"):
            dist.barrier()
        return TracedIteration(done, files)

    def _exchange(self, done: int) -> None:
        iterations = done - self._exchanged_at
        mine = medians_of(self._observed, iterations)
        seconds = (perf_counter() - self._began) / iterations
        none = (0.0, 0.0)
        table = [number for key in self._keys() for number in mine.get(key, none)]
        rows = of_all_ranks(
            [seconds, float(self._memory.bytes()), self._read_s / iterations, *table],
            torch.float64,
        ).tolist()
        ranks: list[OperationMedians] = [
            {
                key: (row[3 + 2 * number], row[4 + 2 * number])
                for number, key in enumerate(self._keys())
                if row[4 + 2 * number]
            }
            for row in rows
        ]
        iteration_s = median(row[0] for row in rows)
        peaks = [int(row[1]) for row in rows]
        self.latest = Watched(
            peak_bytes=max(peaks),
            peak_rank=peaks.index(max(peaks)),
            slow=self._slow.after(lags_of(ranks, iteration_s)),
            slow_data=self._slow_reads.after([row[2] for row in rows], iteration_s),
        )
        # Equal on every rank, because it follows from what all of them have exchanged.
        self._window = max(FIRST_WINDOW, ceil(LEAST_S / iteration_s))
        self._observed.clear()
        self._read_s = 0.0
        self._exchanged_at, self._began = done, perf_counter()

    def _keys(self) -> list[tuple[int, Kind]]:
        return [(stage, kind) for stage in range(self._stages) for kind in COMPARED]


def _traced_from(trace: TraceRequest | None, programs: Sequence[Program], first: int) -> frozenset[int]:
    """The numbers of done iterations after which a program begins that has an iteration to trace."""
    if trace is None:
        return frozenset()
    last = sum(program.iterations for program in programs)
    wanted = {iteration - 1 if iteration else min(first + trace.warmup, last - 1) for iteration in trace.iterations}
    begins, begin = set(), 0
    for program in programs:
        if wanted & set(range(begin, begin + program.iterations)):
            begins.add(begin)
        begin += program.iterations
    return frozenset(begins)
