"""Runs the messages and gradient sums of real schedules with the engine's own executor, without a model.

Operations multiply matrices and send known tensors, so the receiver can check the contents. Before some operations the
process waits until its device is idle, as torch's allocator does when it runs out of cached memory. If a receive is
posted too early, or a send is stuck behind it in a hardware queue, this wait never ends.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isclose
from zlib import crc32

import torch
from torch import nn

from auto3d.capture.graph import Value
from auto3d.cluster import place_ranks
from auto3d.cost.memory.device import NOTHING
from auto3d.data import Batches, DataSettings
from auto3d.partition.stage import Stage, Transfer
from auto3d.runtime.executor import Executor, Peers
from auto3d.runtime.messages.exchange import Exchange
from auto3d.runtime.messages.gradient_sync import GradientSync, Holders
from auto3d.runtime.messages.totals import Totals
from auto3d.runtime.out_of_memory import MemoryWatch
from auto3d.runtime.process.world import World, connect, new_group
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.samples.inputs import MicroBatchInputs
from auto3d.runtime.stage.module import Gradients, StageModule, Tensors
from auto3d.runtime.stage.target_counts import TargetCounts
from auto3d.runtime.waiting import waiting_for
from auto3d.runtime.weights.versions import WeightVersions
from auto3d.schedule import build_schedule
from auto3d.schedule.lowering import lower
from launch.doctor.link_probe import CorruptedError, join_within

ITERATIONS = 3
SIZES = {"cpu": (2**12, 2**16, 2**18), "cuda": (2**12, 2**20, 2**24)}  # bytes; each message has a tensor of each size
WIDTHS = {"cpu": 64, "cuda": 2048}  # rows and columns of the matrices that operations multiply
SKIP_BYTES = 2**12  # size of the value that the first stage sends straight to the last
GRADIENT_BYTES = 2**20  # gradients of each stage
NO_CLIPPING = 1e30  # With any limit, however large, the executor computes the norm of all gradients.
PAUSE_FRACTION = 0.3  # fraction of operations before which the process waits
LONGEST_PAUSE_S = 2e-3
CONNECTIONS = {"cpu": (None,), "cuda": (1, 8, 32)}  # hardware queues; a CPU has none


@dataclass(frozen=True)
class Pattern:
    """A schedule on all ranks: ``pp`` devices in each of ``dp`` pipelines."""

    schedule: str
    dp: int
    pp: int
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.schedule} dp={self.dp} pp={self.pp}"


def patterns(ranks: int) -> list[Pattern]:
    """The schedules to run: messages between neighbours both ways, around all devices and, for even ``ranks``, sums."""
    schedules = [Pattern("1f1b", 1, ranks, 2 * ranks), Pattern("interleaved-1f1b", 1, ranks, 2 * ranks)]
    if ranks % 2 == 0:
        schedules.append(Pattern("chimera", 1, ranks, ranks))
        if ranks > 2:
            schedules.append(Pattern("1f1b", 2, ranks // 2, ranks))
    return schedules


@dataclass(frozen=True)
class ExchangeResult:
    """How many tensors one rank received and checked, and how many seconds that took."""

    tensors: int
    seconds: float


def exchange(
    world: World,
    kind: str,
    connections: int | None,
    *,
    meet_s: float,
    wait_s: float,
    begin: Callable[[Pattern], None],
) -> ExchangeResult:
    """Run all ``patterns`` with ``connections`` hardware queues of the GPU; ``begin`` is called with each at its start.

    Ranks have ``meet_s`` to meet; every later wait for another rank ends after ``wait_s``. Raises CorruptedError if a
    tensor differs from what was sent.
    """
    if connections is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)  # CUDA reads this when it starts
    device = world.device(kind)
    if kind == "cpu":
        torch.set_num_threads(1)
    join_within(world, device, meet_s=meet_s, wait_s=wait_s)
    tensors, start = 0, time.monotonic()
    for pattern in patterns(world.size):
        begin(pattern)
        tensors += _run(world, pattern, device)
    return ExchangeResult(tensors, time.monotonic() - start)


def _run(world: World, pattern: Pattern, device: torch.device) -> int:
    """Run one pattern; returns how many tensors this rank received."""
    schedule = build_schedule(pattern.schedule, devices=pattern.pp, micro_batches=pattern.micro_batches)
    placement = place_ranks(dp=pattern.dp, pp=pattern.pp)
    pipeline_device = next(number for number, ranks in enumerate(placement) if world.rank in ranks)
    pipeline = placement[pipeline_device].index(world.rank)
    transfers = list(_transfers(schedule.stages, device.type))
    holders = {
        _parameter(stage): Holders(
            tuple(sorted({r for (s, _), home in schedule.device_of.items() if s == stage for r in placement[home]})),
            (stage,),
        )
        for stage in range(schedule.stages)
    }
    shared = {holding.stages for holding in holders.values() if len(holding.ranks) > 1}
    program = lower(schedule, transfers, shared)[pipeline_device]
    pipe_stages = [pipe_stage for pipe_stage, home in schedule.device_of.items() if home == pipeline_device]
    run_ahead = RunAhead(device)
    everyone = new_group(range(world.size), device=device)
    connect(everyone, device=device, what="all ranks")
    messages = Exchange(
        program,
        transfers,
        ranks_of=[[ranks[pipeline]] for ranks in placement],
        device_of=schedule.device_of,
        sample_dimensions={},
        device=device,
        run_ahead=run_ahead,
    )
    parameters = {
        _parameter(stage): nn.Parameter(torch.zeros(GRADIENT_BYTES // 4, device=device)) for stage, _ in pipe_stages
    }
    private = [name for name in parameters if len(holders[name].ranks) == 1]
    sync = GradientSync(parameters, holders, private=private, device=device, run_ahead=run_ahead)
    totals = Totals(everyone, device=device, run_ahead=run_ahead)
    receipts = _Receipts(pipeline)
    load = _SyntheticLoad(device, random.Random(f"{pattern} {world.rank}"))
    stages = {
        (number, pipe): _FakeComputation(
            _stage(number, transfers), pipe, parameters[_parameter(number)], receipts, load
        ).as_stage()
        for number, pipe in pipe_stages
    }
    micro_batches = pattern.micro_batches * schedule.parts
    no_data = DataSettings(source="synthetic", files=(), sequence_length=1, vocabulary_size=1, inputs={})
    executor = Executor(
        stages,
        {pipe_stage: {} for pipe_stage in pipe_stages},
        MicroBatchInputs(
            Batches(no_data, seed=0, global_batch=pattern.micro_batches, micro_batch_size=1),
            first_micro_batch=0,
            micro_batches=micro_batches,
            device=device,
        ),
        Peers(exchange=messages, sync=sync, totals=totals, run_ahead=run_ahead),
        randomness=Randomness(0, first_micro_batch=0, micro_batches=micro_batches, device=device),
        memory=MemoryWatch(pipeline_device, NOTHING),
        clip_norm=NO_CLIPPING,
        learning_rate=lambda iteration: 0.0,
    )
    # Each backward adds 1 to the gradients of its stage.
    norm = pattern.micro_batches * pattern.dp * (schedule.stages * GRADIENT_BYTES / 4) ** 0.5
    for iteration in range(ITERATIONS):
        receipts.iteration = iteration
        for result in executor.run(program, iteration):
            receipts.check()
            assert result.grad_norm is not None, "no pattern is asynchronous"
            if not isclose(result.grad_norm, norm, rel_tol=1e-6):
                raise CorruptedError(
                    f"the gradients of all ranks were summed to the norm {result.grad_norm}, not {norm}"
                )
    return receipts.count


def _parameter(stage: int) -> str:
    return f"stage {stage}"


def _transfers(stages: int, kind: str) -> Iterator[Transfer]:
    """A value of each size between neighbouring stages, and a value from the first stage to the last."""
    for source, target in pairwise(range(stages)):
        for size in SIZES[kind]:
            yield _transfer(f"{size} bytes", size, source, target)
    if stages > 2:
        yield _transfer("skip", SKIP_BYTES, 0, stages - 1)


def _transfer(name: str, size: int, source: int, target: int) -> Transfer:
    value = Value(f"{name} from stage {source} to {target}", (size // 4,), "float32", 4, True)
    return Transfer(value=value, source=source, target=target)


def _stage(number: int, transfers: Sequence[Transfer]) -> Stage:
    return Stage(
        index=number,
        nodes=(),
        inputs=(),
        state=(_parameter(number),),
        received=tuple(transfer for transfer in transfers if transfer.target == number),
        sent=tuple(transfer for transfer in transfers if transfer.source == number),
        flops=0,
        has_loss=False,
    )


class _Receipts:
    """Counts and checks received tensors. The device compares them, and the process does not wait for it."""

    def __init__(self, pipeline: int) -> None:
        self.iteration = 0
        self.count = 0
        self._pipeline = pipeline
        self._wrong: list[tuple[str, torch.Tensor]] = []

    def number(self, what: str) -> float:
        """The number that fills the tensor ``what`` in this iteration; float32 represents it exactly."""
        return float(crc32(f"{what} {self._pipeline} {self.iteration}".encode()) % 2**24)

    def note(self, what: str, tensor: torch.Tensor) -> None:
        self.count += 1
        self._wrong.append((what, (tensor != self.number(what)).any()))

    def check(self) -> None:
        """Raise CorruptedError if a tensor of this iteration has wrong contents."""
        noted, self._wrong = self._wrong, []
        for what, wrong in noted:
            if wrong.item():
                raise CorruptedError(f"{what} arrived with other contents in iteration {self.iteration + 1}")


class _SyntheticLoad:
    """What an operation does besides its messages: matrix products and, before some operations, a pause."""

    def __init__(self, device: torch.device, draw: random.Random) -> None:
        self._device = device
        self._draw = draw
        self._matrix = torch.ones(WIDTHS[device.type], WIDTHS[device.type], device=device)

    def run(self, products: int) -> None:
        if self._draw.random() < PAUSE_FRACTION:
            self._pause()
        for _ in range(products):
            self._matrix @ self._matrix

    def filled(self, shape: tuple[int, ...], number: float) -> torch.Tensor:
        return torch.full(shape, number, device=self._device)

    def _pause(self) -> None:
        time.sleep(self._draw.uniform(0, LONGEST_PAUSE_S))
        if self._device.type == "cuda":
            with waiting_for("its device to complete all that is queued"):
                torch.cuda.empty_cache()
                torch.cuda.synchronize(self._device)


class _FakeComputation:
    """Gives known tensors in place of computed tensors, and checks those that it receives."""

    def __init__(
        self, stage: Stage, pipe: int, parameter: nn.Parameter, receipts: _Receipts, load: _SyntheticLoad
    ) -> None:
        self.targets = TargetCounts()
        self._stage = stage
        self._pipe = pipe
        self._parameter = parameter
        self._receipts = receipts
        self._load = load

    def as_stage(self) -> StageModule:
        return StageModule(self._stage, [self], WeightVersions({}, several=False))

    def forward(self, micro_batch: int, state: Tensors, taken: Tensors) -> Tensors:
        for name, tensor in taken.items():
            self._receipts.note(self._name("the activations", name, micro_batch), tensor)
        self._load.run(1)
        return self._tensors("the activations", self._stage.sent, micro_batch)

    def backward(self, micro_batch: int, gradients: Gradients, *, defer_weights: bool) -> dict[str, torch.Tensor]:
        for name, tensors in gradients.items():
            for tensor in tensors:
                self._receipts.note(self._name("the gradients", name, micro_batch), tensor)
        self._load.run(2)
        with torch.no_grad():
            if self._parameter.grad is None:
                self._parameter.grad = torch.zeros_like(self._parameter)
            self._parameter.grad += 1
        return self._tensors("the gradients", self._stage.received, micro_batch)

    def recompute(self, micro_batch: int) -> None:
        raise NotImplementedError("no pattern recomputes")

    def _tensors(self, what: str, transfers: Sequence[Transfer], micro_batch: int) -> dict[str, torch.Tensor]:
        return {
            transfer.value.name: self._load.filled(
                transfer.value.shape, self._receipts.number(self._name(what, transfer.value.name, micro_batch))
            )
            for transfer in transfers
        }

    def _name(self, what: str, value: str, micro_batch: int) -> str:
        return f"{what} of {value}, micro-batch {micro_batch}, pipe {self._pipe},"
