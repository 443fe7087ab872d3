"""The executor: one loop over a program's steps, one small function per kind of operation."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from auto3d.runtime.data import Batches
from auto3d.runtime.exchange import Exchange
from auto3d.runtime.gradient_sync import GradientSync
from auto3d.runtime.loading import Loader, needs_of, pinned_memory_of
from auto3d.runtime.optimizer import Optimizer, update
from auto3d.runtime.out_of_memory import MemoryWatch
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.stage import StageModule
from auto3d.runtime.waiting import wait, waiting_for
from auto3d.schedule.operation import Kind
from auto3d.schedule.program import Communication, GradientSum, LossSum, Message, PipeStage, Program, Step


@dataclass(frozen=True)
class IterationResult:
    """The same on every rank, but for the time."""

    loss: float  # mean over the global batch's micro-batches
    grad_norm: float | None  # before clipping; None if asynchronous: the gradients are never all there at once
    asked_to_end: bool  # some rank was asked to, before the iteration was over
    seconds: float = field(compare=False)  # from the end of the iteration before to its end, on this rank


class Executor:
    """Runs the programs of one rank, one after the other; ``micro_batches`` is how many an iteration has."""

    def __init__(
        self,
        stages: Mapping[PipeStage, StageModule],
        optimizers: Mapping[PipeStage, tuple[Optimizer, LRScheduler] | None],
        *,
        exchange: Exchange,
        sync: GradientSync,
        everyone: dist.ProcessGroup,
        run_ahead: RunAhead,
        batches: Batches,
        randomness: Randomness,
        first_micro_batch: int,
        micro_batches: int,
        clip_norm: float,
        device: torch.device,
        memory: MemoryWatch,
        asked_to_end: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self._stages = stages
        self._optimizers = optimizers
        self._exchange = exchange
        self._sync = sync
        self._everyone = everyone
        self._run_ahead = run_ahead
        self._loader = Loader(batches, pinned_memory_of(device))
        self._randomness = randomness
        self._first_micro_batch = first_micro_batch
        self._micro_batches = micro_batches
        self._clip_norm = clip_norm
        self._device = device
        self._memory = memory
        self._asked_to_end = asked_to_end
        self._timeout_s = timeout_s
        self._program: Program | None = None  # that runs
        self._updates: Counter[PipeStage] = Counter()  # in this program
        self._totals: tuple[float, float, bool] | None = None  # what _reduce_totals gave for this iteration
        self._ended = 0  # iterations of this program, on this rank
        self._ended_at = 0.0
        # Of an asynchronous program's ended iterations: totals and seconds, before their sum begins and until it ends.
        self._unsummed: deque[tuple[torch.Tensor, float]] = deque()
        self._summed: deque[tuple[dist.Work, torch.Tensor, float]] = deque()
        self._run = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SYNC: lambda step: None,  # from it on the program may begin the sum
            Kind.UPDATE: self._update,
        }

    def run(self, program: Program, first_iteration: int) -> Iterator[IterationResult]:
        """Run ``program`` from ``first_iteration`` on; yields the result of each of its iterations once it is known.

        Those of an asynchronous program come late, since their losses travel while the next iterations run.
        """
        self._start(program, first_iteration)
        for step in program.steps:
            self._run_ahead.begin(
                f"in iteration {self._iteration_of(step)} at {step.operation} of stage {step.operation.stage}"
            )
            with self._memory.during(step.operation):
                for beginning in step.begins:
                    self._begin(beginning)
                self._run[step.operation.kind](step)
            self._run_ahead.end()
            if step.operation.kind is Kind.UPDATE and step is not program.steps[-1] and self._iteration_is_over():
                yield from self._end_iteration()
        self._exchange.end()
        yield from self._end_iteration()
        while self._unsummed:
            self._begin_loss_sum()
        yield from self._arrived_losses(wait_for_all=True)

    def _iteration_of(self, step: Step) -> int:
        """As people count; that of an update or a sync is the one it ends."""
        numbers = step.operation.micro_batches
        later = numbers[0] // self._micro_batches if numbers else self._ended
        return self._randomness.iteration + later + 1

    def _start(self, program: Program, first_iteration: int) -> None:
        self._program = program
        self._randomness.iteration = first_iteration
        self._updates.clear()
        self._totals = None
        self._ended, self._ended_at = 0, perf_counter()
        for replica, stage in self._stages.items():
            stage.weights.start(program.versions[replica])
        needs = needs_of(
            program,
            {replica: stage.stage.inputs for replica, stage in self._stages.items()},
            first_iteration=first_iteration,
            first_micro_batch=self._first_micro_batch,
            micro_batches=self._micro_batches,
        )
        self._loader.start(needs, program.iterations)
        self._sync.zero({stage for stage, _ in self._stages})
        self._exchange.start()

    def _begin(self, beginning: Communication) -> None:
        match beginning:
            case Message():
                self._exchange.post(beginning)
            case GradientSum():
                self._sync.begin(beginning.stages)
            case LossSum():
                self._begin_loss_sum()

    def _forward(self, step: Step) -> None:
        stage = self._stages[_replica(step)]
        arrived = self._receive(step)
        for micro_batch in step.operation.micro_batches:
            received = {name: tensor for name, tensors in arrived.get(micro_batch, {}).items() for tensor in tensors}
            later, index = divmod(micro_batch, self._micro_batches)
            inputs = self._loader.inputs(
                self._randomness.iteration + later, self._first_micro_batch + index, stage.stage.inputs
            )
            self._send(step, micro_batch, stage.forward(micro_batch, received, inputs))

    def _backward(self, step: Step) -> None:
        stage = self._stages[_replica(step)]
        arrived = self._receive(step)
        run = stage.backward if step.operation.kind is Kind.BACKWARD else stage.backward_input
        for micro_batch in step.operation.micro_batches:
            self._send(step, micro_batch, run(micro_batch, arrived.get(micro_batch, {})))

    def _recompute(self, step: Step) -> None:
        self._receive(step)
        for micro_batch in step.operation.micro_batches:
            self._stages[_replica(step)].recompute(micro_batch)

    def _backward_weight(self, step: Step) -> None:
        self._receive(step)
        for micro_batch in step.operation.micro_batches:
            self._stages[_replica(step)].backward_weight(micro_batch)

    def _update(self, step: Step) -> None:
        replica = _replica(step)
        if not self._clip_norm:  # no need to wait for ranks that still run backwards
            self._sync.wait({replica[0]})
        elif self._totals is None:  # the first update of the iteration on this rank; it needs the norm of all gradients
            self._totals = self._reduce_totals()
            if self._totals[1] > self._clip_norm:
                self._sync.scale(self._clip_norm / (self._totals[1] + 1e-6))
        self._stages[replica].weights.next()
        self._updates[replica] += 1
        if self._optimizers[replica] is not None:
            optimizer, learning_rate = self._optimizers[replica]
            update(optimizer, run_ahead=self._run_ahead, timeout_s=self._timeout_s)
            if self._updates[replica] % self._program.updates == 0:  # the rate changes from iteration to iteration
                learning_rate.step()
        if self._program.asynchronous:
            self._sync.zero({replica[0]})

    def _reduce_totals(self) -> tuple[float, float, bool]:
        """Sum the losses and the squared gradient norms over all ranks, in one all-reduce, once all gradients are.

        With them goes whether to end, so that all ranks end after the same iteration.
        """
        self._sync.wait({stage for stage, _ in self._stages})
        totals = torch.zeros(3, dtype=torch.float64, device=self._device)
        # Not totals[2] = …, which copies a number to a GPU and waits without a deadline until its queue is empty.
        totals[0].add_(self._take_loss(0))
        totals[1].add_(self._sync.squared_norm())
        totals[2].add_(self._asked_to_end())
        what = "the loss and gradient norm of all ranks"
        with waiting_for(what, self._timeout_s):
            work = dist.all_reduce(totals, group=self._everyone, async_op=True)
        self._run_ahead.wait(work, what)
        self._run_ahead.catch_up()
        loss, squared_norm, asked = totals.tolist()
        return loss, squared_norm**0.5, asked > 0

    def _take_loss(self, iteration: int) -> torch.Tensor | float:
        """This rank's share of the mean loss of an iteration of the program."""
        micro_batches = range(iteration * self._micro_batches, (iteration + 1) * self._micro_batches)
        losses = [stage.losses.pop(m) for stage in self._stages.values() for m in micro_batches if m in stage.losses]
        return sum(loss.double() for loss in losses) / self._program.updates

    def _iteration_is_over(self) -> bool:
        return min(self._updates[replica] for replica in self._stages) == (self._ended + 1) * self._program.updates

    def _end_iteration(self) -> Iterator[IterationResult]:
        """Note the end of an iteration on this rank; yields the results that are known by now, of any iteration."""
        if not self._program.asynchronous and self._totals is None:
            self._totals = self._reduce_totals()
        self._run_ahead.catch_up()
        now = perf_counter()
        seconds, self._ended_at = now - self._ended_at, now
        if self._program.asynchronous:
            totals = torch.zeros(2, dtype=torch.float64, device=self._device)
            totals[0].add_(self._take_loss(self._ended))
            totals[1].add_(self._asked_to_end())
            self._unsummed.append((totals, seconds))
            yield from self._arrived_losses(wait_for_all=False)
        else:
            yield IterationResult(*self._totals, seconds)
        self._ended += 1

    def _begin_loss_sum(self) -> None:
        """Of the first iteration whose sum has not begun. Nobody waits here: other ranks are not as far."""
        totals, seconds = self._unsummed.popleft()
        with waiting_for("the loss of all ranks", self._timeout_s):
            work = dist.all_reduce(totals, group=self._everyone, async_op=True)
        self._summed.append((work, totals, seconds))

    def _arrived_losses(self, *, wait_for_all: bool) -> Iterator[IterationResult]:
        while self._summed and (wait_for_all or self._summed[0][0].is_completed()):
            work, totals, seconds = self._summed.popleft()
            wait(work, timeout_s=self._timeout_s, what="the loss of all ranks")
            loss, asked = totals.tolist()
            yield IterationResult(loss, None, asked > 0, seconds)

    def _receive(self, step: Step) -> dict[int, dict[str, list[torch.Tensor]]]:
        """Micro-batch -> value -> its activations, or its gradients from every stage that used it."""
        arrived: dict[int, dict[str, list[torch.Tensor]]] = {}
        for message in step.receives:
            values = arrived.setdefault(message.micro_batch, {})
            for name, tensor in self._exchange.receive(message).items():
                values.setdefault(name, []).append(tensor)
        for message in step.releases:
            self._exchange.release(message)
        return arrived

    def _send(self, step: Step, micro_batch: int, tensors: Mapping[str, torch.Tensor]) -> None:
        messages: list[Message] = [message for message in step.sends if message.micro_batch == micro_batch]
        for message in messages:
            self._exchange.send(message, [tensors[name] for name in self._exchange.values(message)])


def _replica(step: Step) -> PipeStage:
    return step.operation.stage, step.operation.pipe
