"""The numbers that all ranks of a training know after an iteration: the loss, the gradient norm, whether to stop."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.waiting import wait, waiting_for


@dataclass(frozen=True)
class Total:
    """Sums over all ranks for one iteration."""

    loss: float  # mean over the global batch's micro-batches
    grad_norm: float | None  # before clipping; None if asynchronous: the gradients are never all there at once
    asked_to_end: bool  # whether any rank was asked to end before the iteration was over
    read: float = 0.0  # sum of the shares by which ranks compare what they have read
    counts: tuple[float, ...] = ()  # targets that the global batch has for each counted term of the loss


class Totals:
    """Sums losses, counts of targets and squared gradient norms over ``everyone``, in one all-reduce per iteration.

    Each sum also carries the answer of ``asked_to_end``, so that all ranks end after the same iteration. The ranks of a
    tensor-parallel group compute the same loss on the same targets; one rank has ``counts_loss``.
    """

    def __init__(
        self,
        everyone: dist.ProcessGroup,
        *,
        device: torch.device,
        run_ahead: RunAhead,
        counts_loss: bool = True,
        asked_to_end: Callable[[], bool] = lambda: False,
    ) -> None:
        self._everyone = everyone
        self._device = device
        self._run_ahead = run_ahead
        self._counts_loss = counts_loss
        self._asked_to_end = asked_to_end
        # Ended iterations of an asynchronous program, with their seconds: before their sum begins, and until it ends.
        self._unsummed: deque[tuple[torch.Tensor, float]] = deque()
        self._summed: deque[tuple[dist.Work, torch.Tensor, float]] = deque()

    def reduce(
        self,
        loss: torch.Tensor | float,
        squared_norm: torch.Tensor | float,
        counts: Sequence[torch.Tensor | float] = (),
        read: int = 0,
    ) -> Total:
        """The sums over all ranks of what each gives here; it waits for the others.

        All ranks give as many ``counts``.
        """
        totals = self._totals(loss, counts, read)
        totals[1].add_(squared_norm)
        self._over_all_ranks(totals, dist.ReduceOp.SUM, "the loss and gradient norm of all ranks")
        asked, total_norm, total_read, total_loss, *total_counts = totals.tolist()
        return Total(total_loss, total_norm**0.5, asked > 0, total_read, tuple(total_counts))

    def largest(self, values: Sequence[float], what: str) -> list[float]:
        """The largest of each of ``values``, called ``what``, of which all ranks give as many; it waits for them."""
        largest = torch.tensor(values, dtype=torch.float64).to(self._device)
        self._over_all_ranks(largest, dist.ReduceOp.MAX, what)
        numbers: list[float] = largest.tolist()
        return numbers

    def _over_all_ranks(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType, what: str) -> None:
        """Reduce ``values`` in place, and wait until the host can read them."""
        with waiting_for(what):
            work = dist.all_reduce(values, op=operation, group=self._everyone, async_op=True)
        assert work is not None  # because it is asynchronous
        self._run_ahead.wait(work, what)
        self._run_ahead.catch_up()

    def add(
        self, loss: torch.Tensor | float, seconds: float, counts: Sequence[torch.Tensor | float] = (), read: int = 0
    ) -> None:
        """Keep the sums of an iteration that has ended on this rank until the program begins to sum them."""
        self._unsummed.append((self._totals(loss, counts, read), seconds))

    def _totals(self, loss: torch.Tensor | float, counts: Sequence[torch.Tensor | float], read: int) -> torch.Tensor:
        """What this rank adds: whether it is asked to end, 0 in the place of the norm, what it has read, the loss and
        the counts."""
        totals = torch.zeros(4 + len(counts), dtype=torch.float64, device=self._device)
        # Not totals[0] = …, which copies a number to a GPU and waits without a deadline until its queue is empty.
        totals[0].add_(self._asked_to_end())
        totals[2].add_(read)
        if self._counts_loss:
            for number, value in enumerate((loss, *counts), start=3):
                totals[number].add_(value)
        return totals

    def begin_sum(self) -> None:
        """Begin the sum of the first iteration that waits for it. It does not block: other ranks are not as far."""
        totals, seconds = self._unsummed.popleft()
        with waiting_for("the loss of all ranks"):
            work = dist.all_reduce(totals, group=self._everyone, async_op=True)
        assert work is not None  # because it is asynchronous
        self._summed.append((work, totals, seconds))

    def arrived(self) -> Iterator[tuple[Total, float]]:
        """Sums that are complete by now, in the order of their iterations, with each iteration's seconds."""
        while self._summed and self._summed[0][0].is_completed():
            yield self._next()

    def remaining(self) -> Iterator[tuple[Total, float]]:
        """As ``arrived``, for all other iterations of the program; it waits for their sums."""
        while self._unsummed:
            self.begin_sum()
        while self._summed:
            yield self._next()

    def _next(self) -> tuple[Total, float]:
        work, totals, seconds = self._summed.popleft()
        wait(work, what="the loss of all ranks")
        asked, _, read, loss, *counts = totals.tolist()
        return Total(loss, None, asked > 0, read, tuple(counts)), seconds
