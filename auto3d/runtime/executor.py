"""The executor: one loop over a program's steps, one small function per kind of operation."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from auto3d.runtime.data import Batches
from auto3d.runtime.exchange import Exchange
from auto3d.runtime.gradient_sync import GradientSync
from auto3d.runtime.lowering import Message, Program, Step
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage import StageModule
from auto3d.runtime.waiting import waiting_for
from auto3d.runtime.whereabouts import HERE
from auto3d.schedule.operation import Kind

Replica = tuple[int, int]  # (stage, pipe)


@dataclass(frozen=True)
class IterationResult:
    """The same on every rank."""

    loss: float  # mean over the global batch's micro-batches
    grad_norm: float  # before clipping


class Executor:
    """Runs the program of one rank, iteration after iteration."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[Replica, StageModule],
        optimizers: Mapping[Replica, tuple[Optimizer, LRScheduler] | None],
        *,
        exchange: Exchange,
        sync: GradientSync,
        batches: Batches,
        randomness: Randomness,
        first_micro_batch: int,
        clip_norm: float,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._program = program
        self._stages = stages
        self._optimizers = optimizers
        self._exchange = exchange
        self._sync = sync
        self._batches = batches
        self._randomness = randomness
        self._first_micro_batch = first_micro_batch
        self._clip_norm = clip_norm
        self._device = device
        self._timeout_s = timeout_s
        self._unsynced: set[Replica] = set()  # whose gradient sync has not begun in this iteration
        self._result: IterationResult | None = None  # of this iteration, once its gradients are complete
        self._run = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SYNC: self._start_sync,
            Kind.UPDATE: self._update,
        }

    def run_iteration(self, iteration: int) -> IterationResult:
        self._randomness.iteration = iteration
        self._unsynced = set(self._stages)
        self._result = None
        for stage in self._stages.values():
            stage.loss.zero_()
        self._sync.start_iteration()
        self._exchange.start_iteration()
        for step in self._program.steps:
            HERE.is_at(f"in iteration {iteration + 1} at {step.operation} of stage {step.operation.stage}")
            self._run[step.operation.kind](step)
        self._exchange.end_iteration()
        return self._result

    def _forward(self, step: Step) -> None:
        stage = self._stages[_replica(step)]
        arrived = self._receive(step)
        for micro_batch in step.operation.micro_batches:
            received = {name: tensor for name, tensors in arrived.get(micro_batch, {}).items() for tensor in tensors}
            index = self._first_micro_batch + micro_batch
            inputs = self._batches.micro_batch(self._randomness.iteration, index, stage.stage.inputs)
            inputs = {name: tensor.to(self._device, non_blocking=True) for name, tensor in inputs.items()}
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

    def _start_sync(self, step: Step) -> None:
        self._unsynced.discard(_replica(step))
        still_used = {name for replica in self._unsynced for name in self._stages[replica].stage.state}
        self._sync.start(self._stages[_replica(step)].stage, still_used)

    def _update(self, step: Step) -> None:
        if self._result is None:  # the first update of the iteration on this rank; it needs the norm of all gradients
            self._sync.wait()
            self._result = self._reduce_result()
            if 0 < self._clip_norm < self._result.grad_norm:
                self._sync.scale(self._clip_norm / (self._result.grad_norm + 1e-6))
        if self._optimizers[_replica(step)] is not None:
            optimizer, learning_rate = self._optimizers[_replica(step)]
            optimizer.step()
            learning_rate.step()

    def _reduce_result(self) -> IterationResult:
        """Sum the squared gradient norms and the losses over all ranks, in one all-reduce."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        totals[0] = self._sync.squared_norm()
        totals[1] = sum(stage.loss for stage in self._stages.values())
        with waiting_for("the loss and gradient norm of all ranks", self._timeout_s):
            dist.all_reduce(totals)
            squared_norm, loss = totals.tolist()  # with NCCL it is this that waits
        return IterationResult(loss, squared_norm**0.5)

    def _receive(self, step: Step) -> dict[int, dict[str, list[torch.Tensor]]]:
        """Micro-batch -> value -> its activations, or its gradients from every stage that used it."""
        arrived: dict[int, dict[str, list[torch.Tensor]]] = {}
        for message in step.receives:
            values = arrived.setdefault(message.micro_batch, {})
            for name, tensor in zip(self._exchange.values(message), self._exchange.receive(message), strict=True):
                values.setdefault(name, []).append(tensor)
        for message in step.releases:
            self._exchange.release(message)
        return arrived

    def _send(self, step: Step, micro_batch: int, tensors: Mapping[str, torch.Tensor]) -> None:
        messages: list[Message] = [message for message in step.sends if message.micro_batch == micro_batch]
        for message in messages:
            self._exchange.send(message, [tensors[name] for name in self._exchange.values(message)])


def _replica(step: Step) -> Replica:
    return step.operation.stage, step.operation.pipe
