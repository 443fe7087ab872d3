"""One rank's part in watching a training: it times its operations and exchanges summaries with the other ranks."""

from dataclasses import dataclass
from math import ceil
from statistics import median
from time import perf_counter

import torch

from auto3d.plan import Plan
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.clock import clock_of
from auto3d.runtime.executor import Executor
from auto3d.runtime.gathered import of_all_ranks
from auto3d.runtime.observer import ObservedOperation, OperationTimes
from auto3d.runtime.peak_memory import PeakMemory
from auto3d.runtime.slow_rank import COMPARED, OperationMedians, SlowRank, SlowRanks, lags_of, medians_of
from auto3d.schedule.operation import Kind

FIRST_WINDOW = 5  # iterations before the first exchange
LEAST_S = 2.0  # least seconds between two exchanges, once the time of an iteration is known


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What the ranks know of each other since their last exchange; the same on every rank."""

    peak_bytes: int | None = None  # largest peak memory of a rank so far; None before the first exchange
    peak_rank: int | None = None  # the rank that has it
    slow: tuple[SlowRank, ...] = ()


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
        timeout_s: float,
    ) -> None:
        self.latest = Watched()
        self._clock = clock_of(device)
        self._times = OperationTimes(self._clock)
        executor.observe(self._times)
        self._stages, self._memory, self._timeout_s = len(plan.stages), memory, timeout_s
        self._slow = SlowRanks(THIS_RANK.hosts)
        self._observed: list[ObservedOperation] = []
        self._exchanged_at = first_iteration  # iterations done at the last exchange
        self._window = FIRST_WINDOW  # iterations until the next one
        self._began = perf_counter()
        self._origin = self._clock.mark()

    def after(self, done: int) -> None:
        """Note the operations of the iterations that have ended; ``done`` iterations are complete on every rank."""
        self._observed += self._times.take(self._origin)
        self._origin = self._clock.mark()
        if done - self._exchanged_at >= self._window:
            self._exchange(done)

    def _exchange(self, done: int) -> None:
        iterations = done - self._exchanged_at
        mine = medians_of(self._observed, iterations)
        seconds = (perf_counter() - self._began) / iterations
        none = (0.0, 0.0)
        table = [number for key in self._keys() for number in mine.get(key, none)]
        rows = of_all_ranks(
            [seconds, float(self._memory.bytes()), *table], torch.float64, timeout_s=self._timeout_s
        ).tolist()
        ranks: list[OperationMedians] = [
            {
                key: (row[2 + 2 * number], row[3 + 2 * number])
                for number, key in enumerate(self._keys())
                if row[3 + 2 * number]
            }
            for row in rows
        ]
        iteration_s = median(row[0] for row in rows)
        peaks = [int(row[1]) for row in rows]
        self.latest = Watched(
            peak_bytes=max(peaks),
            peak_rank=peaks.index(max(peaks)),
            slow=self._slow.after(lags_of(ranks, iteration_s)),
        )
        # Equal on every rank, because it follows from what all of them have exchanged.
        self._window = max(FIRST_WINDOW, ceil(LEAST_S / iteration_s))
        self._observed.clear()
        self._exchanged_at, self._began = done, perf_counter()

    def _keys(self) -> list[tuple[int, Kind]]:
        return [(stage, kind) for stage in range(self._stages) for kind in COMPARED]
