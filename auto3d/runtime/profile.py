"""Measure a machine: the subgraphs of a model, alone and while all ranks compute, messages, all-reduces and updates.

All ranks of one node run ``measure`` together. Nothing is timed through ``deepspeed.comm``: on a CPU its log has the
launch of an asynchronous operation and not its end, and it would be a second road beside the one that training takes.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter, process_time
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import fx, nn

from auto3d.capture.graph import Value
from auto3d.capture.model import CapturedModel
from auto3d.cluster import AllReduceTimes
from auto3d.cost.profile import MessageTimes, ModelTimes, SubgraphTimes
from auto3d.partition.stage import Stage, cut
from auto3d.plan import stages_between
from auto3d.runtime.clock import Clock, Mark, clock_of
from auto3d.runtime.data import Batches, DataSettings
from auto3d.runtime.gradient_sync import GradientSync, Holders
from auto3d.runtime.materialize import materialize
from auto3d.runtime.optimizer import build_optimizer
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.stage import StageModule
from auto3d.runtime.waiting import waiting_for
from auto3d.runtime.world import World, join, new_group

ROUNDS = 5  # through all that is measured; the fastest counts, for what else runs on the machine only adds time
LEAST_REPETITIONS, TURN_S = 3, 0.06  # of a subgraph in each round, and about how long they take
LOAD_S = 0.4  # that ranks compute at the same time, in each round
MESSAGE_SIZES = tuple(4**power for power in range(5, 13))  # bytes: 1 KiB to 16 MiB
REDUCE_SIZES = (
    16,
    *(8**power for power in range(4, 9)),
    2**26,
)  # those of loss and norm; bytes: 4 KiB to 16 MiB, and 64 MiB


@dataclass(frozen=True, kw_only=True)
class Subgraphs:
    """What there is to measure of a model at one micro-batch size."""

    captured: CapturedModel
    distinct: tuple[Stage, ...]  # one of those that are equal
    kinds: tuple[int, ...]  # of each subgraph, in the order of the model: its place in ``distinct``


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a profile holds that was measured."""

    sizes: tuple[ModelTimes, ...]
    slowdown: tuple[float, ...]
    messages: MessageTimes | None
    all_reduce: AllReduceTimes | None
    update_s: float


Report = Callable[[str], None]  # is told of each part that is done


def distinct_subgraphs(captured: CapturedModel, bounds: Sequence[int]) -> Subgraphs:
    """The subgraphs between ``bounds``, each of those that are equal once: operators, shapes and arguments."""
    stages = cut(captured.graph, stages_between(bounds))
    numbers: dict[tuple, int] = {}
    distinct, kinds = [], []
    for stage in stages:
        signature = _signature(captured, stage)
        if signature not in numbers:
            numbers[signature] = len(distinct)
            distinct.append(stage)
        kinds.append(numbers[signature])
    return Subgraphs(captured=captured, distinct=tuple(distinct), kinds=tuple(kinds))


def parts_of(models: Sequence[Subgraphs]) -> int:
    """How many parts ``measure`` reports."""
    return sum(len(model.distinct) for model in models) * ROUNDS + 4


def measure(
    models: Sequence[Subgraphs],
    settings: TrainingSettings,
    data: DataSettings,
    world: World,
    *,
    seed: int,
    report: Report = lambda part: None,
) -> Measured:
    """Measure as rank ``world.rank``; ``models`` is one model at several micro-batch sizes. Rank 0 has the result.

    The process groups stay, as after ``training.train``.
    """
    torch.set_num_threads(settings.threads_per_rank)
    device = world.device(settings.device)
    join(world, device=device, timeout_s=settings.timeout_s)
    bench = _Bench(models, settings, data, world, device, seed, report)
    return Measured(
        sizes=tuple(bench.model_times(number) for number in range(len(models))),
        slowdown=bench.slowdown(),
        messages=bench.messages() if world.size > 1 else None,
        all_reduce=bench.all_reduces() if world.size > 1 else None,
        update_s=bench.update_s(),
    )


class _Bench:
    """One rank at work. Every rank calls the same methods in the same order; rank 0 measures what one alone does."""

    def __init__(
        self,
        models: Sequence[Subgraphs],
        settings: TrainingSettings,
        data: DataSettings,
        world: World,
        device: torch.device,
        seed: int,
        report: Report,
    ) -> None:
        self._models, self._settings, self._data = models, settings, data
        self._world, self._device, self._report = world, device, report
        self._clock = clock_of(device)
        self._everyone = new_group(range(world.size), settings.timeout_s, device=device)
        first = models[0].captured
        constants = first.exported.constants
        names = {name for model in models for stage in model.distinct for name in stage.state}
        tensors = materialize(first.exported.build, sorted(names - constants.keys()), seed=seed)
        self._state = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._trained = {}
        for name in sorted(first.graph.trained & names):
            parameter = nn.Parameter(self._state[name])
            parameter.grad = torch.zeros_like(parameter)
            self._state[name] = self._trained[name] = parameter

    def model_times(self, number: int) -> ModelTimes:
        model = self._models[number]
        whole, split = self._runs(model), self._runs(model, split=True)
        rounds: list[list[list[tuple[float, float, float]]]] = [[] for _ in whole]
        for _ in range(ROUNDS):
            for kind, (one, other) in enumerate(zip(whole, split, strict=True)):
                if self._world.rank == 0:
                    rounds[kind].append(turn(one, other, self._clock))
                self._barrier()
                self._report(f"micro-batch of {one.samples}: {one.name}")
        return ModelTimes(
            micro_batch_size=model.captured.graph.micro_batch_size,
            graph=model.captured.graph.fingerprint,
            kinds=model.kinds,
            subgraphs=tuple(_subgraph_times(run, found) for run, found in zip(whole, rounds, strict=True)),
        )

    def slowdown(self) -> tuple[float, ...]:
        """Of a rank, while 1, 2, … compute the subgraphs of the largest size: from how often they get through them."""
        runs = self._runs(max(self._models, key=lambda model: model.captured.graph.micro_batch_size))
        counts = _counts(self._world.size, least=1)
        rates = dict.fromkeys(counts, 0.0)
        for _ in range(ROUNDS):
            for computing in counts:
                self._barrier()
                rate = self._rate(runs) if self._world.rank < computing else 0.0
                rates[computing] = max(rates[computing], self._sum(rate) / computing)
        self._report("ranks that compute together")
        factors = [rates[1] / rate for rate in rates.values()]
        every = range(1, self._world.size + 1)
        return tuple(float(np.interp(computing, counts, factors)) for computing in every)

    def messages(self) -> MessageTimes:
        """Between ranks 0 and 1, there and back."""
        seconds, processor_s = [], []
        for size in MESSAGE_SIZES:
            content = torch.zeros(size, dtype=torch.uint8, device=self._device)
            each, spent = [], []
            for _ in range(self._repetitions(size)):
                self._barrier()
                used = process_time()
                if self._world.rank < 2:
                    each.append(seconds_of(partial(self._there_and_back, content), self._clock) / 2)
                spent.append((process_time() - used) / 2 / self._clock.queued)
            seconds.append(self._of_first(median(each[1:] or [0.0])))
            processor_s.append(self._of_first(median(spent[1:])))
        self._report("messages")
        return MessageTimes(sizes=MESSAGE_SIZES, seconds=tuple(seconds), processor_s=tuple(processor_s))

    def all_reduces(self) -> AllReduceTimes:
        """Of the first 2, 4, … ranks and of all."""
        counts = _counts(self._world.size, least=2)
        rows = []
        for members in counts:
            group = new_group(range(members), self._settings.timeout_s, device=self._device)
            row = []
            for size in REDUCE_SIZES:
                content = torch.zeros(size // 4, device=self._device)
                each = []
                for _ in range(self._repetitions(size)):
                    self._barrier()
                    if self._world.rank < members:
                        with waiting_for("an all-reduce", self._settings.timeout_s):
                            each.append(seconds_of(partial(dist.all_reduce, content, group=group), self._clock))
                row.append(self._of_first(median(each[1:] or [0.0])))
            rows.append(tuple(row))
        self._report("all-reduces")
        return AllReduceTimes(ranks=counts, sizes=REDUCE_SIZES, seconds=tuple(rows))

    def update_s(self) -> float:
        """Of one parameter, as the executor does it: zeroing, norm and scaling of gradients, and the optimizer."""
        own = {name: Holders((self._world.rank,), (0,)) for name in self._trained}
        timeout_s = self._settings.timeout_s
        run_ahead = RunAhead(self._device, timeout_s)
        sync = GradientSync(self._trained, own, device=self._device, run_ahead=run_ahead, timeout_s=timeout_s)
        optimizer, _ = build_optimizer(list(self._trained.values()), self._settings.optimizer, iterations=1)
        each = []
        for _ in range(2 * ROUNDS):
            if self._world.rank == 0:
                begin = self._clock.mark()
                sync.zero({0})
                sync.squared_norm()
                sync.scale(1.0)
                optimizer.step()
                end = self._clock.mark()
                self._clock.settle()  # an update begins on an idle device: the host has waited for the norm
                each.append(self._clock.seconds(begin, end))
            self._barrier()
        self._report("the optimizer's update")
        elements = sum(parameter.numel() for parameter in self._trained.values())
        return self._of_first(median(each[1:]) if each else 0.0) / elements

    def _runs(self, model: Subgraphs, *, split: bool = False) -> list["_Run"]:
        samples = model.captured.graph.micro_batch_size
        batches = Batches(self._data, seed=0, global_batch=samples, micro_batch_size=samples)
        return [
            _Run(stage, model.captured, {**self._state, **self._constants(model)}, batches, self._device, split=split)
            for stage in model.distinct
        ]

    def _constants(self, model: Subgraphs) -> dict[str, torch.Tensor]:
        return {name: value.to(self._device) for name, value in model.captured.exported.constants.items()}

    def _rate(self, runs: Sequence["_Run"]) -> float:
        """Times per second that all of ``runs`` go forward and backward."""
        begin, done = self._now(), 0
        while done < LEAST_REPETITIONS or self._now() < begin + LOAD_S:
            for _ in range(self._clock.queued):
                for run in runs:
                    run.forward()
                    run.backward()
            done += self._clock.queued
        return done / (self._now() - begin)

    def _there_and_back(self, content: torch.Tensor) -> None:
        other = 1 - self._world.rank
        for sends in (self._world.rank == 0, self._world.rank == 1):
            with waiting_for("a message", self._settings.timeout_s):
                exchange = dist.isend if sends else dist.irecv
                exchange(content, other, group=self._everyone).wait()  # with NCCL only the device's queue waits

    @staticmethod
    def _repetitions(size: int) -> int:
        """More of small messages, which vary more."""
        return 2 + max(5, min(30, 2**24 // size))

    def _now(self) -> float:
        """Host time when the device is idle."""
        self._clock.settle()
        return perf_counter()

    def _barrier(self) -> None:
        self._sum(0.0)

    def _of_first(self, value: float) -> float:
        return self._sum(value if self._world.rank == 0 else 0.0)

    def _sum(self, value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64)
        with waiting_for("the other ranks of the profile", self._settings.timeout_s):
            dist.all_reduce(total)
            return float(total)


class Part(Protocol):
    """A subgraph that can be timed."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...

    def backward_input(self) -> None: ...

    def backward_weight(self) -> None: ...


def seconds_of(run: Callable[[], object], clock: Clock) -> float:
    """Seconds of ``run``, which communicates.

    On a GPU several are queued: in training, too, a message finds its kernel launched, since the process is ahead of
    its device. An event after a receive sees the arrival, for which the queue waits.
    """
    begin = clock.mark()
    for _ in range(clock.queued):
        run()
    end = clock.mark()
    clock.settle()
    return clock.seconds(begin, end) / clock.queued


def turn(whole: Part, split: Part, clock: Clock) -> list[tuple[float, float, float]]:
    """Seconds of forward, backward, and the weight half of a split one: some repetitions, after one unmeasured.

    On a GPU many repetitions are queued with events between their parts, and waited for at once. All run on one
    stream, so each finds the memory that the one before it freed.
    """
    _marked(whole, split, clock)
    deadline = perf_counter() + TURN_S
    found: list[tuple[float, float, float]] = []
    while len(found) < LEAST_REPETITIONS or perf_counter() <= deadline:
        repetitions = [_marked(whole, split, clock) for _ in range(clock.queued)]
        clock.settle()
        for marks in repetitions:
            forward, backward, _, weight = (clock.seconds(begin, end) for begin, end in pairwise(marks))
            found.append((forward, backward, weight))
    return found


def _marked(whole: Part, split: Part, clock: Clock) -> list[Mark]:
    """Marks before, between and after a forward, a backward, a split forward with its input half, and a weight half."""
    marks = [clock.mark()]
    for part in ((whole.forward,), (whole.backward,), (split.forward, split.backward_input), (split.backward_weight,)):
        for run in part:
            run()
        marks.append(clock.mark())
    return marks


class _Run:
    """One subgraph, ready to run again and again as a stage does, on made-up activations."""

    def __init__(
        self,
        stage: Stage,
        captured: CapturedModel,
        state: dict[str, torch.Tensor],
        batches: Batches,
        device: torch.device,
        *,
        split: bool,
    ) -> None:
        graph = captured.graph
        own = set(stage.nodes)
        modules = [node.module for node in graph.nodes if node.name in own and not node.from_inputs and node.module]
        self.name, self.samples = modules[0] if modules else stage.nodes[0], graph.micro_batch_size
        self._module = StageModule(
            stage,
            captured,
            state,
            loss_weight=1.0,
            randomness=Randomness(0, first_micro_batch=0, micro_batches=1, device=device),
            device=device,
            split_backward=split,
        )
        self._state = {state[name].untyped_storage().data_ptr() for name in stage.state}
        self._device = device
        self._load = partial(batches.micro_batch, 0, 0, self._module.stage.inputs)
        if device.type == "cuda":  # queued repetitions must not wait for the host
            pinned = {name: value.pin_memory() for name, value in self._load().items()}
            self._load = lambda: pinned
        self._received = {one.value.name: _made_up(one.value, device) for one in stage.received}
        sent = [graph.value(name) for name in self._module.sent]
        self._gradients = {value.name: [_made_up(value, device)] for value in sent if value.differentiable}

    def forward(self) -> None:
        """With what loading its inputs takes of the device: on a CPU all of it, on a GPU the copy."""
        inputs = {name: value.to(self._device, non_blocking=True) for name, value in self._load().items()}
        self._module.forward(0, self._received, inputs)
        self._module.losses.clear()

    def backward(self) -> None:
        self._module.backward(0, self._gradients)

    def backward_input(self) -> None:
        self._module.backward_input(0, self._gradients)

    def backward_weight(self) -> None:
        self._module.backward_weight(0)

    def saved_bytes(self) -> int:
        """What autograd keeps of a forward, each tensor's memory once, without weights."""
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._state:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.forward()
        self.backward()
        return sum(kept.values())


def _subgraph_times(run: _Run, rounds: Sequence[Sequence[tuple[float, float, float]]]) -> SubgraphTimes:
    """Of forward, backward and weight half: the median of the round in which it is least; nothing, where none is."""
    medians = [[median(each) for each in zip(*found, strict=True)] for found in rounds]
    forward, backward, weight = map(min, zip(*medians, strict=True)) if medians else (0.0, 0.0, 0.0)
    return SubgraphTimes(
        name=run.name,
        forward_s=forward,
        backward_s=backward,
        backward_weight_s=weight,
        saved_bytes=run.saved_bytes(),
        repetitions=sum(map(len, rounds)),
    )


def _made_up(value: Value, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, value.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(value.shape, dtype=dtype, device=device)
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _counts(size: int, *, least: int) -> tuple[int, ...]:
    """How many of ``size`` ranks are tried at a time: each number of a few, else powers of two, and all."""
    tried = range(1, size + 1) if size <= 4 else [2**power for power in range(size.bit_length())]
    return tuple(sorted({number for number in (*tried, size) if number >= least}))


def _signature(captured: CapturedModel, stage: Stage) -> tuple:
    """Equal for subgraphs that do the same: values are told by the order of their first use, not by name."""
    graph, exported = captured.graph, captured.exported
    own, numbers, found = set(stage.nodes), {}, []

    def told(node: fx.Node) -> Any:
        number = numbers.setdefault(node, len(numbers))
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return number
        name = exported.parameters.get(node.name, node.name)
        trains = name in graph.trained if name in graph.parameters else name not in graph.inputs
        return number, tuple(value.shape), str(value.dtype), trains

    for node in exported.program.nodes:
        if node.name in own or (node.target is operator.getitem and node.args[0].name in own):
            found.append((str(node.target), repr(fx.map_arg((node.args, node.kwargs), told))))
            numbers.setdefault(node, len(numbers))
    passed = [sorted(numbers[node] for node in numbers if node.name == one.value.name) for one in stage.sent]
    return *found, str(passed), stage.has_loss
