"""Train an entry with plain, eager PyTorch in one process."""

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from auto3d.capture.describe import is_random
from auto3d.capture.held import buffers_of
from auto3d.capture.model import CapturedModel
from auto3d.data import Batches
from auto3d.runtime.optimizer.build import build_optimizer
from auto3d.runtime.randomness import Randomness
from tests.distributed.parity import CPU, GLOBAL_BATCH
from tests.zoo.entry import Entry
from tests.zoo.trained import ITERATIONS, MICRO_BATCH, OPTIMIZER, SEED, Trained, array


def reference(
    entry: Entry,
    captured: CapturedModel | None,
    spoil: Callable[[nn.Module], None] = lambda module: None,
    *,
    pipelines: int = 1,
    nudge: float = 0.0,
) -> Trained:
    """The result of eager PyTorch in one process: the unmodified module, micro-batch after micro-batch.

    Each of ``pipelines`` data-parallel copies has its own buffers, as under DistributedDataParallel without broadcasts;
    those of the first are returned. ``nudge`` changes each initial parameter by about this fraction.
    """
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    module = entry.build()
    module.train()
    spoil(module)
    named = dict(module.named_parameters())
    with torch.no_grad():
        for parameter in named.values() if nudge else ():
            noise = 1 + nudge * torch.empty(parameter.shape).uniform_(-1, 1)
            parameter.copy_(parameter * noise.to(parameter.dtype))
    step, learning_rate = build_optimizer(list(named.values()), OPTIMIZER, iterations=ITERATIONS)
    size = GLOBAL_BATCH if entry.of_whole_batch else MICRO_BATCH
    batches = Batches(entry.data, seed=SEED, global_batch=GLOBAL_BATCH, micro_batch_size=size)
    count = GLOBAL_BATCH // size
    draws = _Draws(captured, count) if entry.draws and captured else None
    kept = [{name: buffer.clone() for name, buffer in buffers_of(module).items()} for _ in range(pipelines)]
    losses, norms, gradients = [], [], {}
    for iteration in range(ITERATIONS):
        module.zero_grad()
        total = 0.0
        for index in range(count):
            buffers = kept[index * pipelines // count]
            if pipelines > 1:
                _copy(buffers, buffers_of(module))
            with draws.seeded(iteration, index) if draws else nullcontext():
                output = module(**batches.micro_batch(iteration, index, tuple(entry.inputs)))
            loss = _loss(output) / count
            loss.backward()
            total += loss.item()
            if pipelines > 1:
                _copy(buffers_of(module), buffers)
        norms.append(torch.nn.utils.clip_grad_norm_(named.values(), OPTIMIZER.clip_norm).item())
        losses.append(total)
        if iteration == 0:
            gradients = {name: array(p.grad) for name, p in named.items() if p.grad is not None}
        step.step()
        learning_rate.step()
    buffers = buffers_of(module)  # again, since a forward may have replaced some
    if pipelines > 1:
        _copy(kept[0], buffers)
    return Trained(
        losses=losses,
        norms=norms,
        gradients=gradients,
        parameters={name: array(parameter) for name, parameter in named.items()},
        buffers={name: array(buffer) for name, buffer in buffers.items()},
    )


def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    for name, value in source.items():
        target[name].copy_(value)


def _loss(output: Any) -> torch.Tensor:
    """The loss in a module's output: the output called ``loss``, else the first of several."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output["loss"]
    return output.loss if hasattr(output, "loss") else output[0]


class _Draws(TorchFunctionMode):
    """Seeds each random function of an eager forward as the runtime seeds the same operation of the Graph."""

    NAMES = frozenset(
        [
            "dropout",
            "alpha_dropout",
            "feature_dropout",
            "feature_alpha_dropout",
            "dropout1d",
            "dropout2d",
            "dropout3d",
            "rand",
            "randn",
            "randint",
            "rand_like",
            "randn_like",
            "randint_like",
            "bernoulli",
            "bernoulli_",
            "multinomial",
            "normal",
            "normal_",
            "uniform_",
            "exponential_",
            "rrelu",
            "randperm",
            "random_",
            "native_dropout",
            "gumbel_softmax",
            "cauchy_",
            "log_normal_",
            "geometric_",
        ]
    )

    def __init__(self, captured: CapturedModel, micro_batches: int) -> None:
        super().__init__()
        number = {node.name: position for position, node in enumerate(captured.graph.nodes)}
        self._operations = [number[node.name] for node in captured.exported.program.nodes if is_random(node)]
        self._randomness = Randomness(SEED, first_micro_batch=0, micro_batches=micro_batches, device=CPU)
        self._next = 0

    def seeded(self, iteration: int, micro_batch: int) -> "_Draws":
        self._randomness.iteration, self._randomness.micro_batch, self._next = iteration, micro_batch, 0
        return self

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__name__", "") in self.NAMES:
            self._randomness.seed(self._operations[self._next])
            self._next += 1
        return func(*args, **(kwargs or {}))
