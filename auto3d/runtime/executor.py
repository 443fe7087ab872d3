"""The executor: one loop over a program's steps, one small function per kind of operation.

The host must issue an operation faster than the device runs it. So all that the iterations of a program have in common
is looked up once, when the program first runs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, nan
from time import perf_counter
from typing import Any, TypeVar

import torch

from auto3d.errors import InputError
from auto3d.runtime.loss_scale import LossScale
from auto3d.runtime.messages.exchange import Exchange
from auto3d.runtime.messages.gradient_sync import GradientSync
from auto3d.runtime.messages.totals import Total, Totals
from auto3d.runtime.optimizer.build import Optimizers
from auto3d.runtime.optimizer.classes import averages, use_weights
from auto3d.runtime.optimizer.state import note_weights
from auto3d.runtime.out_of_memory import MemoryWatch
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.samples.batch_targets import BatchTargets
from auto3d.runtime.samples.incomplete_batch import IncompleteBatch, IncompleteBatches
from auto3d.runtime.samples.inputs import MicroBatchInputs
from auto3d.runtime.samples.sizes import ShorterSamples, SizedStages
from auto3d.runtime.stage.module import StageModule
from auto3d.runtime.stage.out_of_range import OutOfRangeError
from auto3d.runtime.watch.observer import StepObserver
from auto3d.schedule.operation import Kind, Operation
from auto3d.schedule.program import Communication, GradientSum, LossSum, Message, PipeStage, Program, Step, without


@dataclass(frozen=True)
class IterationResult:
    """The same on every rank, except for ``seconds``."""

    loss: float  # mean over the global batch: over its real targets if the loss is a mean over targets
    grad_norm: float | None  # before clipping; None if asynchronous, for they are never all there at once, or skipped
    asked_to_end: bool  # whether any rank was asked to end before the iteration was over
    learning_rate: float  # rate of the iteration's updates
    seconds: float = field(compare=False)  # time from the end of the previous iteration to the end of this iteration
    skipped: bool = False  # whether gradients overflowed under a loss scale, so that nothing was updated


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Everything by which a rank exchanges data with others, and how it waits for them."""

    exchange: Exchange
    sync: GradientSync
    totals: Totals
    run_ahead: RunAhead


T = TypeVar("T")
Passes = Sequence[tuple[int, StageModule]]
"""The micro-batches of a step, each with the stage that runs it."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step with all that its program's iterations have in common."""

    operation: Operation
    later: int | None  # iterations of the program before its own; None: an update or a sync, for that which it ends
    where: str  # its place in an iteration, for errors
    calls: Sequence[Callable[[], None]]  # the calls that make up the step, in order


class Executor:
    """Runs the programs of one rank, one after the other."""

    def __init__(
        self,
        stages: Mapping[PipeStage, StageModule],
        optimizers: Mapping[PipeStage, Optimizers],
        inputs: MicroBatchInputs,
        peers: Peers,
        *,
        randomness: Randomness,
        memory: MemoryWatch,
        clip_norm: float,
        targets: BatchTargets | None = None,
        loss_scale: LossScale | None = None,
        learning_rate: Callable[[int], float],
        incomplete: IncompleteBatches | None = None,
        shorter: ShorterSamples | None = None,
        averages: bool = False,
    ) -> None:
        self._stages = stages
        self._averages = averages  # whether an optimizer of any rank has other weights in evaluation
        self.evaluates = False  # whether the parameters have these
        self._incomplete_batches = incomplete  # None: all global batches are complete
        self._incomplete: IncompleteBatch | None = None  # the global batch that runs, if it is incomplete
        self._shorter = shorter  # None: all samples are of the same length
        self._sized: dict[int, SizedStages] = {}  # micro-batches of the program that are of another size
        self._optimizers = optimizers
        self._inputs = inputs
        self._exchange, self._sync, self._totals = peers.exchange, peers.sync, peers.totals
        self._run_ahead = peers.run_ahead
        self._randomness = randomness
        self._memory = memory
        self._clip_norm = clip_norm
        self._targets = targets or BatchTargets()
        self._loss_scale = loss_scale or LossScale()
        self._waits_for_sums = bool(clip_norm) or self._loss_scale.is_used or self._targets.vary
        self._learning_rate = learning_rate  # iteration, from 0 -> the rate of its updates
        self._program = Program(steps=())  # the program that runs
        self._steps: list[PreparedStep] = []  # steps of the program
        self._own = {stage for stage, _ in stages}
        self._updates: Counter[PipeStage] = Counter()  # updates of each stage in this program
        self._total: Total | None = None  # sums of this iteration, once an update has needed them
        self._skips = False  # whether this iteration updates nothing
        self._ended = 0  # iterations of this program that this rank has ended
        self._ended_at = 0.0
        self._known = 0  # iterations of this program whose results are known
        self._runs: dict[Kind, Callable[[Step, Passes], None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.UPDATE: self._update,
        }

    def run(self, program: Program, first_iteration: int) -> Iterator[IterationResult]:
        """Run ``program`` from ``first_iteration`` on; yields the result of each of its iterations once it is known.

        Results of an asynchronous program come late, because their losses travel while the next iterations run.
        """
        self._start(program, first_iteration)
        run_ahead, last = self._run_ahead, self._steps[-1]
        for step in self._steps:
            number = first_iteration + 1 + (self._ended if step.later is None else step.later)
            run_ahead.begin(f"in iteration {number}{step.where}")
            observer = run_ahead.observer
            if observer is not None:
                observer.begin(step.operation)
            try:
                for call in step.calls:
                    call()
            except Exception as error:
                self._memory.check(error, step.operation)
                if isinstance(error, OutOfRangeError):
                    raise InputError(f"iteration {number}{step.where}: {error}") from error
                raise
            if observer is not None:
                observer.end()
            run_ahead.end()
            if step.operation.kind is Kind.UPDATE and step is not last and self._iteration_is_over():
                yield from self._end_iteration()
        self._exchange.end()
        yield from self._end_iteration()
        for total, late_s in self._totals.remaining():
            yield self._result(self._late(total), late_s)

    def read_anew(self) -> None:
        """Forget the inputs that were read ahead of the next program, because the data are others from now on."""
        self._inputs.end()

    def use_weights(self, *, evaluation: bool) -> bool:
        """Have the weights of evaluation, or those that are trained; returns whether these are others than before.

        All ranks must call it, between two programs. It changes nothing unless an optimizer averages.
        """
        if not self._averages or evaluation == self.evaluates:
            return False
        self.evaluates = evaluation
        self._sync.follow_weights()
        for optimizer in self._averaging():
            use_weights(optimizer, evaluation=evaluation)
        self._gather(self._own)
        return True

    def note_weights(self, *, evaluation: bool) -> None:
        """Go on from weights of evaluation, or from trained weights, that are in the parameters already."""
        if self._averages and evaluation != self.evaluates:
            self.evaluates = evaluation
            for optimizer in self._averaging():
                note_weights(optimizer, evaluation=evaluation)

    def _averaging(self) -> Iterator[torch.optim.Optimizer]:
        """The optimizers of this rank that have other weights in evaluation."""
        for optimizers in self._optimizers.values():
            yield from (optimizer for optimizer, _ in optimizers.values() if averages(type(optimizer)))

    def observe(self, observer: StepObserver | None) -> None:
        """From now on tell ``observer`` of each operation; None: nobody."""
        self._run_ahead.observer = observer

    def _result(self, total: Total, seconds: float) -> IterationResult:
        """The result of the first iteration of the program that has none yet."""
        skipped_before = self._loss_scale.skipped_iterations - self._skips  # they did not advance the rate
        rate = self._learning_rate(self._randomness.iteration + self._known - skipped_before)
        self._known += 1
        return IterationResult(total.loss, total.grad_norm, total.asked_to_end, rate, seconds, self._skips)

    def _start(self, program: Program, first_iteration: int) -> None:
        """Begin ``program``, or what of it an incomplete global batch needs."""
        self.use_weights(evaluation=False)
        batches = self._incomplete_batches
        self._incomplete = incomplete = None if batches is None else batches.of(first_iteration)
        sized = {} if self._shorter is None else self._shorter.of(first_iteration, self._inputs.micro_batches)
        if batches is not None and incomplete is not None:
            program = without(program, incomplete.absent)
            if incomplete.short is not None:
                sized[incomplete.short] = batches.sized
        is_prepared = program is self._program and sized == self._sized
        self._program, self._sized = program, sized
        if batches is not None:
            for stage in self._all_stages():
                stage.set_present(1.0 if incomplete is None else incomplete.samples)
        if not is_prepared:
            self._exchange.set_sizes({number: sized_stages.transfers for number, sized_stages in sized.items()})
            self._steps = [self._prepared(step) for step in program.steps]
        self._randomness.iteration = first_iteration
        self._updates.clear()
        self._total, self._skips = None, False
        self._ended, self._known, self._ended_at = 0, 0, perf_counter()
        for pipe_stage, stage in self._stages.items():
            stage.weights.start(program.versions[pipe_stage])
        inputs_of = {pipe_stage: stage.stage.inputs for pipe_stage, stage in self._stages.items()}
        self._inputs.start(program, inputs_of, first_iteration, is_complete=incomplete is None)
        self._sync.zero(self._own)
        self._exchange.start()

    def _prepared(self, step: Step) -> PreparedStep:
        operation = step.operation
        passes = [(m, self._stages_of(m)[_pipe_stage(step)]) for m in operation.micro_batches]
        calls: list[Callable[[], None]] = [self._beginning(communication) for communication in step.begins]
        if operation.kind is not Kind.SYNC:  # it only marks the step from which the program may begin the sum
            calls.append(partial(self._runs[operation.kind], step, passes))
        later = operation.micro_batches[0] // self._inputs.micro_batches if operation.micro_batches else None
        return PreparedStep(operation, later, f" at {operation} of stage {operation.stage}", calls)

    def _beginning(self, communication: Communication) -> Callable[[], None]:
        match communication:
            case Message():
                return partial(self._exchange.post, communication)
            case GradientSum():
                return partial(self._sync.begin, communication.stages)
            case LossSum():
                return self._totals.begin_sum

    def _stages_of(self, micro_batch: int) -> Mapping[PipeStage, StageModule]:
        """The stages that run ``micro_batch``, of its size."""
        return self._sized[micro_batch].stages if micro_batch in self._sized else self._stages

    def _all_stages(self) -> list[StageModule]:
        of_others = {id(stage): stage for sized in self._sized.values() for stage in sized.stages.values()}
        return [*self._stages.values(), *of_others.values()]

    def _forward(self, step: Step, passes: Passes) -> None:
        arrived = self._exchange.receive_for(step)
        for micro_batch, stage in passes:
            received = {name: tensor for name, tensors in arrived.get(micro_batch, {}).items() for tensor in tensors}
            inputs = self._observed(self._inputs.of, micro_batch, stage.stage)
            self._exchange.send_from(step, micro_batch, stage.forward(micro_batch, received, inputs))

    def _observed(self, read: Callable[..., T], *arguments: Any) -> T:
        """What ``read`` returns; the observer, if there is one, is told of its begin and end."""
        observer = self._run_ahead.observer
        if observer is None:
            return read(*arguments)
        observer.begin_read()
        found = read(*arguments)
        observer.end_read()
        return found

    def _backward(self, step: Step, passes: Passes) -> None:
        arrived = self._exchange.receive_for(step)
        defer_weights = step.operation.kind is Kind.BACKWARD_INPUT
        for micro_batch, stage in passes:
            sent_back = stage.backward(micro_batch, arrived.get(micro_batch, {}), defer_weights=defer_weights)
            self._exchange.send_from(step, micro_batch, sent_back)

    def _recompute(self, step: Step, passes: Passes) -> None:
        self._exchange.receive_for(step)
        for micro_batch, stage in passes:
            stage.recompute(micro_batch)

    def _backward_weight(self, step: Step, passes: Passes) -> None:
        self._exchange.receive_for(step)
        for micro_batch, stage in passes:
            stage.backward_weight(micro_batch)

    def _update(self, step: Step, passes: Passes) -> None:
        pipe_stage = _pipe_stage(step)
        if not self._waits:  # no need to wait for ranks that still run backwards
            self._sync.wait({pipe_stage[0]})
        elif self._total is None:  # the first update of the iteration on this rank; it needs the sums of all gradients
            self._total, factor = self._reduce_totals()
            norm = self._total.grad_norm
            if self._clip_norm and norm is not None and norm > self._clip_norm:
                factor *= self._clip_norm / (norm + 1e-6)
            if factor != 1 and not self._skips:
                self._sync.scale(factor)
        self._stages[pipe_stage].weights.next()
        self._updates[pipe_stage] += 1
        for optimizer, learning_rate in () if self._skips else self._optimizers[pipe_stage].values():
            optimizer.step()
            if self._updates[pipe_stage] % self._program.updates == 0:  # the rate changes once per iteration
                learning_rate.step()
        if self._program.asynchronous:
            self._gather({pipe_stage[0]})
            self._sync.zero({pipe_stage[0]})

    def _gather(self, stages: Set[int]) -> None:
        """Under ZeRO-1, gather the weights of ``stages``, of which each holder has updated a slice."""
        self._sync.begin_gathers(stages)
        self._sync.wait_for_weights()

    def _reduce_totals(self) -> tuple[Total, float]:
        """(loss and gradient norm of the global batch, the factor that its gradients lack).

        They are known once the gradients of this rank's stages are summed.
        """
        iteration = self._randomness.iteration
        read = self._observed(self._inputs.share, iteration)  # before the wait for sums that are under way
        self._sync.wait(self._own)
        total = self._totals.reduce(self._take_loss(0), self._sync.squared_norm(), self._take_counts(0), read)
        where = f"iteration {iteration + 1}"
        self._inputs.check(iteration, total.read, where=where, together=True)
        fraction = self._fraction(total, iteration + 1)
        assert total.grad_norm is not None
        divisor = (fraction or 1.0) * self._loss_scale.value  # without a target, all gradients are 0
        if self._loss_scale.is_used:
            self._skips = not isfinite(total.grad_norm)
            self._loss_scale.update(finite=not self._skips)
        norm = None if self._skips else total.grad_norm / divisor
        return replace(total, loss=total.loss / fraction if fraction else nan, grad_norm=norm), 1 / divisor

    def _late(self, total: Total) -> Total:
        """``total`` of the next iteration of an asynchronous program, if nothing is to be divided."""
        iteration = self._randomness.iteration + self._known
        self._inputs.check(iteration, total.read, where=f"iteration {iteration + 1}")
        self._fraction(total, iteration + 1)
        return total

    def _fraction(self, total: Total, iteration: int) -> float:
        present = 1.0
        if self._incomplete is not None:
            present = self._incomplete.samples if self._targets.counts_items else self._incomplete.present
        return self._targets.fraction(total.counts, iteration, is_updated=not self._waits, present=present)

    @property
    def _waits(self) -> bool:
        """Whether updates wait for the sums of all gradients."""
        return self._waits_for_sums or self._incomplete is not None

    def _take_counts(self, iteration: int) -> list[torch.Tensor | float]:
        """How many targets this rank has counted in an iteration of the program, for each counted term of the loss; and
        then how many the data says, if these count."""
        count = self._inputs.micro_batches
        counts: list[torch.Tensor | float] = [0.0 for _ in self._targets.terms.counted]
        for stage in self._all_stages() if counts else ():
            for micro_batch in range(iteration * count, (iteration + 1) * count):
                for number, targets in stage.counts.pop(micro_batch, {}).items():
                    counts[number] = counts[number] + targets.double()
        if self._targets.counts_items:
            counts.append(self._inputs.take_items(self._randomness.iteration + iteration))
        return counts

    def _take_loss(self, iteration: int) -> torch.Tensor | float:
        """What this rank adds to the mean loss of an iteration of the program."""
        count = self._inputs.micro_batches
        micro_batches = range(iteration * count, (iteration + 1) * count)
        losses = [stage.losses.pop(m) for stage in self._all_stages() for m in micro_batches if m in stage.losses]
        return sum(loss.double() for loss in losses) / self._program.updates

    def _iteration_is_over(self) -> bool:
        least = min(self._updates[pipe_stage] for pipe_stage in self._stages)
        return least == (self._ended + 1) * self._program.updates

    def _end_iteration(self) -> Iterator[IterationResult]:
        """Note the end of an iteration on this rank; yields all results that are known by now."""
        if not self._program.asynchronous and self._total is None:
            self._total, _ = self._reduce_totals()
        if not self._program.asynchronous:
            self._gather(self._own)
        self._run_ahead.catch_up()
        now = perf_counter()
        seconds, self._ended_at = now - self._ended_at, now
        if self._program.asynchronous:
            read = self._observed(self._inputs.share, self._randomness.iteration + self._ended)
            self._totals.add(self._take_loss(self._ended), seconds, self._take_counts(self._ended), read)
            for total, earlier_s in self._totals.arrived():
                yield self._result(self._late(total), earlier_s)
        else:
            assert self._total is not None
            yield self._result(self._total, seconds)
        self._ended += 1


def _pipe_stage(step: Step) -> PipeStage:
    return step.operation.stage, step.operation.pipe
