"""Name the rank that is slow: its operations take longer than on the other ranks that run the same stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from auto3d.runtime.watch.observer import ObservedOperation
from auto3d.schedule.operation import Kind

# Each rank computes the same in these. Updates are not among them: under ZeRO-1 each rank updates other parameters.
COMPARED = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
LAGS = 1.2  # ratio from which a rank is slow; docs/watch.md has the noise that it was chosen by
RECOVERED = 1.1  # ratio below which a slow rank is no longer
WINDOWS = 2  # windows in a row in which a rank must lag before it is named
LEAST_SHARE = 0.01  # part of an iteration that the lag must take; what takes less cannot slow a training down

OperationMedians = dict[tuple[int, Kind], tuple[float, float]]
"""(stage, kind) -> median compute seconds of one micro-batch, and micro-batches per iteration."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that lags behind the others of its stage, in one kind of operation: the kind that costs it most time."""

    rank: int
    host: str
    stage: int
    kind: Kind
    ratio: float  # its median compute time, divided by the median of the others'

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} is slow: its {self.kind} of stage {self.stage} takes {self.ratio:.2f} "
            "times as long as the other ranks' of that stage"
        )


def medians_of(observed: Sequence[ObservedOperation], iterations: int) -> OperationMedians:
    """The medians of the operations of ``iterations`` iterations of one rank."""
    seconds: dict[tuple[int, Kind], list[float]] = {}
    micro_batches: dict[tuple[int, Kind], int] = {}
    for operation in observed:
        kind = operation.operation.kind
        if kind in COMPARED:
            key = operation.operation.stage, kind
            count = len(operation.operation.micro_batches)
            seconds.setdefault(key, []).append(operation.computed_s / count)
            micro_batches[key] = micro_batches.get(key, 0) + count
    return {key: (median(values), micro_batches[key] / iterations) for key, values in seconds.items()}


def lags_of(ranks: Sequence[OperationMedians], iteration_s: float) -> dict[int, tuple[int, Kind, float]]:
    """Rank -> the stage and kind in which it loses most time to the others of its stage, and its ratio to them.

    Ranks are in it whose ratio exceeds RECOVERED. A rank that runs a stage alone is compared with nobody.
    """
    lags: dict[int, tuple[int, Kind, float]] = {}
    lost: dict[int, float] = {}
    for key in sorted({key for rank in ranks for key in rank}):
        holders = [rank for rank, medians in enumerate(ranks) if key in medians]
        for rank in holders if len(holders) > 1 else ():
            mine, count = ranks[rank][key]
            others = median(ranks[other][key][0] for other in holders if other != rank)
            late_s = (mine - others) * count
            if mine > RECOVERED * others > 0 and late_s > max(lost.get(rank, 0.0), LEAST_SHARE * iteration_s):
                lags[rank], lost[rank] = (*key, mine / others), late_s
    return lags


class SlowRanks:
    """Follows the windows of a training, and says which ranks are slow. Equal on every rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._lagged: dict[int, int] = {}  # rank -> windows in a row in which it lagged
        self._slow: set[int] = set()

    def after(self, lags: dict[int, tuple[int, Kind, float]]) -> tuple[SlowRank, ...]:
        """The ranks that are slow after a window with ``lags``."""
        self._lagged = {
            rank: self._lagged.get(rank, 0) + 1 for rank, lag in lags.items() if lag[-1] > LAGS or rank in self._slow
        }
        self._slow = {rank for rank, windows in self._lagged.items() if windows >= WINDOWS}
        return tuple(SlowRank(rank, self._hosts[rank], *lags[rank]) for rank in sorted(self._slow))
