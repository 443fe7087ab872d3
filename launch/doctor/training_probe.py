"""Trains a small language model with the engine, and compares it with plain PyTorch on each device.

This detects devices, libraries and connections that give other results, and compares predicted with used memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from auto3d.capture.model import CapturedModel, capture
from auto3d.capture.skeleton import seed_all
from auto3d.cluster import place_ranks
from auto3d.data import Batches, DataSettings, InputField
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.executor import IterationResult
from auto3d.runtime.optimizer.build import build_optimizer
from auto3d.runtime.process.world import World
from auto3d.runtime.rank import Rank, build_rank
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.runtime.verify.eager import ABSOLUTE, RELATIVE
from auto3d.runtime.waiting import waiting_for
from auto3d.runtime.watch.peak_memory import PeakMemory
from launch.doctor.link_probe import join_within

ITERATIONS = 2
MICRO_BATCHES = 4
SEED = 1
VOCABULARY = 256
OPTIMIZER = OptimizerSettings(
    optimizer="sgd",
    learning_rate=0.1,
    weight_decay=0.01,
    momentum=0.9,
    betas=(0.9, 0.95),
    learning_rate_schedule="constant",
    warmup_iterations=0,
    clip_norm=0.1,
)


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the model. On a GPU, its memory must be much larger than the workspace of a library."""

    blocks: int
    width: int
    heads: int
    sequence: int
    micro_batch_size: int


SIZES = {"cpu": ModelSize(8, 128, 4, 64, 2), "cuda": ModelSize(8, 512, 8, 512, 4)}


class SmallModel(nn.Module):
    """Embedding, blocks of causal attention and two linear layers, head. Its forward returns the loss, a scalar."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Parameter(0.02 * torch.randn(size.sequence, size.width))
        self.blocks = nn.ModuleList(_Block(size.width, size.heads) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """``tokens`` and ``labels``: [samples, sequence]."""
        hidden = self.tokens(tokens) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), labels.flatten())


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            third.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for third in self.into(self.first(hidden)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.narrow(functional.gelu(self.wide(self.second(hidden))))


@dataclass(frozen=True)
class TrainedRank:
    """The result of one rank; the fields of these are keys of `auto3d doctor --json`."""

    rank: int
    host: str
    predicted_bytes: int  # predicted peak memory
    used_bytes: int  # measured peak memory
    difference: str  # first difference from plain PyTorch, in one line; empty if all is equal up to rounding


@dataclass(frozen=True)
class ProbeTraining:
    """The captured small model, the plan under which it trains, and its data."""

    captured: CapturedModel
    plan: Plan
    data: DataSettings


def degrees(ranks: int) -> tuple[int, int]:
    """dp and pp: as few stages as possible, but at least two if there are several ranks."""
    pp = next((number for number in range(2, ranks + 1) if ranks % number == 0), 1)
    return ranks // pp, pp


def plan_training(ranks: int, kind: str) -> ProbeTraining:
    """Capture the model and plan its training on ``ranks`` devices of ``kind``. On GPUs, every rank calls this."""
    import_module("transformers.optimization")  # ranks forked from here inherit this import, which they need
    size = SIZES[kind]
    data = DataSettings(
        source="synthetic",
        files=(),
        sequence_length=size.sequence,
        vocabulary_size=VOCABULARY,
        inputs={"tokens": InputField(kind="tokens"), "labels": InputField(kind="next-tokens")},
    )
    captured = capture(partial(SmallModel, size), data.input_specs(), size.micro_batch_size, device=kind)
    dp, pp = degrees(ranks)
    plan = Plan(
        graph=captured.graph.fingerprint,
        dp=dp,
        tp=1,
        pp=pp,
        global_batch=dp * MICRO_BATCHES * size.micro_batch_size,
        micro_batch_size=size.micro_batch_size,
        schedule="1f1b",
        stages=uniform(captured.graph, pp),
        placement=place_ranks(dp=dp, pp=pp),
        seed=SEED,
    )
    return ProbeTraining(captured, plan, data)


def train_both_ways(
    world: World, training: ProbeTraining, kind: str, *, meet_s: float, wait_s: float
) -> list[TrainedRank]:
    """Train as one rank of the plan, and in plain PyTorch; every rank returns the results of all ranks.

    Ranks have ``meet_s`` to meet; every later wait for another rank ends after ``wait_s``.
    """
    plan, device = training.plan, world.device(kind)
    settings = TrainingSettings(
        iterations=ITERATIONS, optimizer=OPTIMIZER, device=kind, threads_per_rank=1, timeout_s=wait_s
    )
    torch.set_num_threads(settings.threads_per_rank)
    join_within(world, device, meet_s=meet_s, wait_s=wait_s)
    expected = list(plain_training(training, device))
    if kind == "cuda":
        torch.cuda.empty_cache()  # memory that plain PyTorch used must not count
    memory = PeakMemory(device)
    rank = build_rank(training.captured, plan, settings, training.data, world)
    differences = []
    for iteration, program in enumerate(rank.programs):
        (result,) = rank.executor.run(program, iteration)
        if (difference := _difference(rank, result, expected[iteration])) is not None:
            differences.append(f"{difference} in iteration {iteration + 1}")
    peak = memory.read()
    used = peak.allocated if peak.used is None else peak.used
    first_difference = differences[0] if differences else ""
    result_here = TrainedRank(world.rank, THIS_RANK.hosts[world.rank], rank.predicted.total, used, first_difference)
    results: list[TrainedRank] = [result_here] * world.size
    with waiting_for("the training results of all ranks"):
        dist.all_gather_object(results, result_here)
    return results


@dataclass(frozen=True)
class Expected:
    """Results of one iteration in plain PyTorch; the tensors are on the CPU."""

    loss: float
    grad_norm: float
    gradients: Mapping[str, torch.Tensor]  # after clipping
    parameters: Mapping[str, torch.Tensor]  # after the update


def plain_training(training: ProbeTraining, device: torch.device) -> Iterator[Expected]:
    """Train the whole global batch on ``device``, in a plain loop over micro-batches; yields a result per iteration."""
    plan, data = training.plan, training.data
    seed_all(plan.seed)
    module = training.captured.exported.build().to(device).train()
    optimizer, learning_rate = build_optimizer(list(module.parameters()), OPTIMIZER, iterations=ITERATIONS)
    batches = Batches(data, seed=plan.seed, global_batch=plan.global_batch, micro_batch_size=plan.micro_batch_size)
    count = plan.global_batch // plan.micro_batch_size
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        total = 0.0
        for index in range(count):
            inputs = batches.micro_batch(iteration, index, tuple(data.inputs))
            loss = module(**{name: value.to(device) for name, value in inputs.items()}) / count
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(module.parameters(), OPTIMIZER.clip_norm).item()
        optimizer.step()
        learning_rate.step()
        named = dict(module.named_parameters())
        yield Expected(
            total,
            norm,
            {name: _gradient(parameter).clone() for name, parameter in named.items()},
            {name: parameter.detach().cpu().clone() for name, parameter in named.items()},
        )


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of ``parameter``, on the CPU."""
    assert parameter.grad is not None, "the loss depends on every parameter"
    return parameter.grad.cpu()


def _difference(rank: Rank, result: IterationResult, expected: Expected) -> str | None:
    """The first of loss, norm, gradients and parameters that differs by more than the parity tests' bound, or None."""
    pairs = {
        "the loss": (torch.tensor(result.loss), torch.tensor(expected.loss)),
        "the gradient norm": (torch.tensor(result.grad_norm), torch.tensor(expected.grad_norm)),
    }
    for name, parameter in rank.parameters.items():
        pairs[f"the gradient of {name}"] = _gradient(parameter), expected.gradients[name]
    for name, parameter in rank.parameters.items():
        pairs[name] = parameter.detach().cpu(), expected.parameters[name]
    scale = max(1.0, *(float(gradient.abs().max()) for gradient in expected.gradients.values()))
    for name, (actual, reference) in pairs.items():
        largest = float((actual.double() - reference.double()).abs().max())
        allowed = RELATIVE * float(reference.abs().max()) + ABSOLUTE * scale
        if not largest <= allowed:  # true for nan, too
            return f"{name} differs by {largest:.2g}, where rounding explains {allowed:.2g},"
    return None
