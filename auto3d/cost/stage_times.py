"""Seconds that a device needs for the operations of a stage: compute, and the collectives of tensor parallelism."""

from functools import lru_cache

import numpy as np

from auto3d.cluster import Accelerator
from auto3d.cost.collectives import GroupLink
from auto3d.cost.model_work import ModelWork
from auto3d.cost.sub_pipelined import Segment, sub_pipelined_s
from auto3d.cost.times import TimesOf, times_of
from auto3d.share import Share


class StageTimes:
    """The times of stages of ``work``; ``times_at`` has its operations' times (default: from the device's figures).

    The plans of a search have many stages in common, so results are kept.
    """

    def __init__(self, work: ModelWork, times_at: TimesOf | None, *, hides_collectives: bool = False) -> None:
        self._work, self._hides_collectives = work, hides_collectives
        self._times = lru_cache(None)(
            times_at or (lambda samples, accelerator, share: times_of(work.work_at(samples, share), accelerator))
        )
        self._collectives = lru_cache(None)(self._make_collectives)
        self.between_cuts = lru_cache(1024)(self._make_between_cuts)
        self.seconds = lru_cache(2**16)(self._make_seconds)

    def _make_between_cuts(
        self,
        samples: int,
        accelerator: Accelerator,
        share: Share,
        link: GroupLink | None,
        cuts: tuple[int, ...],
        kept: float | None,
    ) -> np.ndarray:
        """[cuts - 1]: seconds of one micro-batch forward, backward and recomputed between neighbouring ``cuts``.

        A stage that keeps the fraction ``kept`` recomputes the rest of each forward; with 0, it recomputes all that
        full recomputation recomputes. None: it does not recompute.
        """

        def passes(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            times = np.diff(self._times(samples, accelerator, share).table[:, positions])
            exchanged = np.zeros((2, len(cuts) - 1))
            if link is not None:
                exchanged = np.diff(self._collectives(samples, share, link)[:, positions])
            busy = self._busy(times[0], exchanged[0], share), self._busy(times[2], exchanged[1], share)
            return np.maximum(busy[0], times[1]), np.maximum(busy[1], times[3])

        positions = np.array(cuts)
        forward, backward = passes(positions)
        if kept is None:
            return forward + backward
        if kept:
            return forward * (2 - kept) + backward
        again, _ = passes(positions.clip(*self._work.recomputed(samples)))
        return forward + again + backward

    def _make_seconds(
        self,
        samples: int,
        accelerator: Accelerator,
        share: Share,
        link: GroupLink | None,
        operations: tuple[tuple[int, int], ...],
        halved: bool,
    ) -> tuple[float, float, float]:
        """Seconds of one micro-batch: forward, backward, and the weight half that the backward contains.

        If it is ``halved``, it consists of two halves of ``samples`` each, which take turns. No pass is shorter than
        the host needs for it.
        """
        times = self._times(samples, accelerator, share)
        total = sum((times.range(first, last) for first, last in operations), start=np.zeros(5))
        if halved:
            forward, backward = (
                sub_pipelined_s(self._segments(samples, accelerator, share, link, operations, forward=direction))
                for direction in (True, False)
            )
            hosts = [2 * float(total[row]) + accelerator.operation_s for row in (1, 3)]
            return max(forward, hosts[0]), max(backward, hosts[1]), 2 * float(total[4])
        exchanged = np.zeros(2)
        if link is not None:
            table = self._collectives(samples, share, link)
            exchanged = sum((table[:, last] - table[:, first] for first, last in operations), start=exchanged)
        forward = max(float(self._busy(total[0], exchanged[0], share)), float(total[1]) + accelerator.operation_s)
        backward = max(float(self._busy(total[2], exchanged[1], share)), float(total[3]) + accelerator.operation_s)
        return forward, backward, float(total[4])

    def _busy(self, compute: np.ndarray, exchanged: np.ndarray, share: Share) -> np.ndarray:
        """Seconds of passes with so many of compute and of collectives: their sum, unless the system hides these."""
        if not self._hides_collectives:
            return compute + exchanged
        return np.maximum(compute + exchanged / share.tp, exchanged)

    def _segments(
        self,
        samples: int,
        accelerator: Accelerator,
        share: Share,
        link: GroupLink | None,
        operations: tuple[tuple[int, int], ...],
        *,
        forward: bool,
    ) -> list[Segment]:
        """The compute of ``operations`` between collectives, and the collectives, in the order of the pass."""
        busy = self._times(samples, accelerator, share).table[0 if forward else 2]
        exchanges = [
            exchange for exchange in self._work.work_at(samples, share).exchanges if exchange.forward == forward
        ]
        segments: list[Segment] = []
        for first, last in operations if forward else reversed(operations):
            inside = [exchange for exchange in exchanges if first <= exchange.position < last]
            place = first if forward else last
            for exchange in inside if forward else reversed(inside):
                seconds = link.seconds_in_operation(exchange.collective, exchange.size) if link is not None else 0.0
                segments.append((float(abs(busy[exchange.boundary] - busy[place])), seconds))
                place = exchange.boundary
            segments.append((float(abs(busy[last if forward else first] - busy[place])), 0.0))
        return segments

    def _make_collectives(self, samples: int, share: Share, link: GroupLink) -> np.ndarray:
        """[2, operations + 1]: seconds of the collectives before each operation, forward and backward."""
        work = self._work.work_at(samples, share)
        seconds = np.zeros((2, len(work) + 1))
        for row, exchanges in zip(seconds, work.exchanges_of, strict=True):
            for (collective, size), counts in exchanges.items():
                row[1:] += link.seconds_in_operation(collective, size) * counts
        return np.cumsum(seconds, axis=1)
