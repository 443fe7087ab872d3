"""Measure a machine for the cost model.

Measured are the subgraphs of a model, on one rank while the others are idle; the slowdown while several ranks compute;
messages and collectives between ranks; sums of gradients beside compute; and the optimizer's update. All ranks of one
node call ``measure`` together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import nn

from auto3d.capture.shard import Shard
from auto3d.cluster import NodeCollectives
from auto3d.conversions import Collective
from auto3d.cost.profile import CandidateTimes, MessageTimes, ModelTimes, SumTimes
from auto3d.cost.work import exchanges_of
from auto3d.data import Batches, DataSettings
from auto3d.derived.local_graph import local_graphs
from auto3d.runtime.messages.gradient_sync import GradientSync, Holders
from auto3d.runtime.optimizer.build import build_optimizers
from auto3d.runtime.optimizer.parameter_groups import update_rules
from auto3d.runtime.process.world import World
from auto3d.runtime.profile.distinct_subgraphs import ModelSubgraphs
from auto3d.runtime.profile.link_timing import ProfiledRanks, rank_counts, time_collectives, time_messages
from auto3d.runtime.profile.subgraph_timing import (
    MIN_REPETITIONS,
    Seconds,
    SubgraphRun,
    fastest_round,
    subgraph_times,
    time_passes,
    time_subgraph,
)
from auto3d.runtime.profile.sum_timing import time_sums
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import start_rank
from auto3d.runtime.weights.materialize import materialize

ROUNDS = 5  # rounds of measurements; the fastest counts, because other programs on the machine only add time
STAGE_ROUNDS = 2  # rounds of measurements of whole stages, which are many and take longer
LOAD_S = 0.4  # seconds in each round during which ranks compute at the same time


@dataclass(frozen=True, kw_only=True)
class MachineTimes:
    """The measured part of a profile (auto3d.cost.profile.Profile)."""

    sizes: tuple[ModelTimes, ...]  # an entry for each micro-batch size and way of tensor parallelism
    slowdown: tuple[float, ...]  # slowdown[n - 1]: how much longer a rank computes while n ranks do
    messages: MessageTimes | None  # None on a single rank
    collectives: NodeCollectives | None  # None on a single rank
    sums: SumTimes | None  # None on a single rank
    update_s: float  # the optimizer's update of one parameter


Report = Callable[[str], None]  # called with the name of each measurement that is done


def num_reports(models: Sequence[ModelSubgraphs]) -> int:
    """How many times ``measure`` calls ``report``."""
    return sum(len(model.distinct) for model in models) * ROUNDS + 5


def measure(
    models: Sequence[ModelSubgraphs],
    settings: TrainingSettings,
    data: DataSettings,
    world: World,
    *,
    seed: int,
    report: Report = lambda part: None,
) -> MachineTimes:
    """Measure as rank ``world.rank``; ``models`` is one model at several micro-batch sizes, without tensor parallelism
    first.

    Only rank 0's result is meaningful. The process groups stay, as after ``training.train``.
    """
    device = start_rank(settings, world)
    profiler = _Profiler(models, settings, data, ProfiledRanks(world, device), seed, report)
    return MachineTimes(
        sizes=tuple(profiler.model_times(model) for model in models),
        slowdown=profiler.slowdown(),
        messages=profiler.messages() if world.size > 1 else None,
        collectives=profiler.collectives() if world.size > 1 else None,
        sums=profiler.sums() if world.size > 1 else None,
        update_s=profiler.update_s(),
    )


@dataclass(frozen=True, kw_only=True)
class NamedStages:
    """Candidate stages of a model at one micro-batch size, with equal stages merged."""

    names: tuple[str, ...]
    model: ModelSubgraphs  # its kinds have these ``names``


def measure_stages(
    sizes: Sequence[NamedStages],
    settings: TrainingSettings,
    data: DataSettings,
    world: World,
    *,
    seed: int,
    report: Report = lambda part: None,
) -> tuple[CandidateTimes, ...]:
    """Times of whole stages, one entry for each of ``sizes``, on a single rank; otherwise as ``measure``.

    ``report`` is called STAGE_ROUNDS times for each distinct stage.
    """
    device = start_rank(settings, world)
    models, ranks = [size.model for size in sizes], ProfiledRanks(world, device)
    profiler = _Profiler(models, settings, data, ranks, seed, report)
    return tuple(profiler.candidate_times(size) for size in sizes)


_Key = tuple[str, Shard | None]  # name of a parameter or buffer, and the shard of it; None: all of it


def _key(name: str, model: ModelSubgraphs) -> _Key:
    """What the first rank of ``model`` holds of ``name``."""
    split = None if model.derived is None else model.derived.placements[name].split
    return name, None if split is None else Shard(split, 0, model.share.tp)


class _Profiler:
    """One rank of a profile. Every rank calls the same methods in the same order; some measure on rank 0 only."""

    def __init__(
        self,
        models: Sequence[ModelSubgraphs],
        settings: TrainingSettings,
        data: DataSettings,
        ranks: ProfiledRanks,
        seed: int,
        report: Report,
    ) -> None:
        self._models, self._settings, self._data = models, settings, data
        self._ranks, self._report = ranks, report
        self._is_first = ranks.world.rank == 0
        self._seed = seed
        self._state: dict[_Key, torch.Tensor] = {}
        for model in models:
            self._make_state(model)
        whole = {name: tensor for (name, shard), tensor in self._state.items() if shard is None}
        self._trained = {name: tensor for name, tensor in whole.items() if isinstance(tensor, nn.Parameter)}

    def _make_state(self, model: ModelSubgraphs) -> None:
        """Make the parameters and buffers that ``model`` uses and that no other model has in common with it."""
        constants, trained = model.captured.exported.constants, model.captured.graph.trained
        needed = {_key(name, model) for stage in model.distinct for name in stage.state if name not in constants}
        missing = dict(needed - self._state.keys())
        made = materialize(
            model.captured.exported.build,
            sorted(missing),
            seed=self._seed,
            shards={name: shard for name, shard in missing.items() if shard is not None},
        )
        for name, tensor in made.items():
            placed = tensor.to(self._ranks.device)
            if name in trained:
                placed = nn.Parameter(placed)
                placed.grad = torch.zeros_like(placed)
            self._state[name, missing[name]] = placed

    def model_times(self, model: ModelSubgraphs) -> ModelTimes:
        """Times of the model's subgraphs on rank 0, while the other ranks are idle."""
        whole, split = self._runs(model), self._runs(model, split=True)
        rounds: list[list[list[Seconds]]] = [[] for _ in whole]
        for _ in range(ROUNDS):
            for kind, (whole_run, split_run) in enumerate(zip(whole, split, strict=True)):
                if self._is_first:
                    rounds[kind].append(time_subgraph(whole_run, split_run, self._ranks.clock))
                self._ranks.barrier()
                degree = f", tp {model.share.tp}" if model.share.tp > 1 else ""
                self._report(f"micro-batch of {whole_run.samples}{degree}: {whole_run.name}")
        return ModelTimes(
            micro_batch_size=model.captured.graph.micro_batch_size,
            graph=model.captured.graph.fingerprint,
            kinds=model.kinds,
            subgraphs=tuple(subgraph_times(run, times) for run, times in zip(whole, rounds, strict=True)),
            tp=model.share.tp,
            sequence_parallel=model.share.sequence_parallel,
        )

    def candidate_times(self, stages: NamedStages) -> CandidateTimes:
        """Times of the distinct stages of ``stages``."""
        runs, samples = self._runs(stages.model), stages.model.captured.graph.micro_batch_size
        rounds: list[list[list[tuple[float, float]]]] = [[] for _ in runs]
        for _ in range(STAGE_ROUNDS):
            for times, run in zip(rounds, runs, strict=True):
                times.append(time_passes(run, self._ranks.clock))
                self._report(f"stage, micro-batch of {samples}: from {run.name}")
        seconds = [fastest_round(times) for times in rounds]
        return CandidateTimes(
            micro_batch_size=samples,
            kinds=dict(zip(stages.names, stages.model.kinds, strict=True)),
            forward_s=tuple(forward for forward, _ in seconds),
            backward_s=tuple(backward for _, backward in seconds),
            repetitions=tuple(sum(map(len, times)) for times in rounds),
        )

    def slowdown(self) -> tuple[float, ...]:
        """How much longer a rank computes while 1, 2, … ranks compute.

        It follows from how often the ranks get through the subgraphs of the largest micro-batch in equal times.
        """
        size = self._ranks.world.size
        runs = self._largest_runs()
        counts = rank_counts(size, least=1)
        rates = dict.fromkeys(counts, 0.0)
        for _ in range(ROUNDS):
            for computing in counts:
                self._ranks.barrier()
                rate = self._rate(runs) if self._ranks.world.rank < computing else 0.0
                rates[computing] = max(rates[computing], self._ranks.sum(rate) / computing)
        self._report("ranks that compute together")
        factors = [rates[1] / rate for rate in rates.values()]
        return tuple(float(np.interp(computing, counts, factors)) for computing in range(1, size + 1))

    def messages(self) -> MessageTimes:
        times = time_messages(self._ranks)
        self._report("messages")
        return times

    def collectives(self) -> NodeCollectives:
        """Times at usual sizes and at the sizes of the models' tensor-parallel programs."""
        sizes: dict[Collective, set[int]] = {}
        for model in self._models:
            for local in () if model.derived is None else local_graphs(model.derived):
                for exchange in exchanges_of(local, 1.0):
                    sizes.setdefault(exchange.collective, set()).add(int(exchange.size))
        times = time_collectives(self._ranks, sizes)
        self._report("collectives")
        return times

    def sums(self) -> SumTimes:
        """Sums beside the subgraphs of the largest micro-batch."""
        times = time_sums(self._ranks, [partial(_forward_and_backward, run) for run in self._largest_runs()])
        self._report("sums of gradients beside compute")
        return times

    def update_s(self) -> float:
        """Seconds per parameter of the executor's update: zero, norm and scale the gradients, and run the optimizer."""
        ranks = self._ranks
        holders = {name: Holders((ranks.world.rank,), (0,)) for name in self._trained}
        run_ahead = RunAhead(ranks.device)
        sync = GradientSync(self._trained, holders, device=ranks.device, run_ahead=run_ahead)
        rules = update_rules(self._models[0].captured.graph, self._settings.optimizer)
        optimizers = build_optimizers(self._trained, rules, iterations=1)
        times = []
        for _ in range(2 * ROUNDS):
            if self._is_first:
                begin = ranks.clock.mark()
                sync.zero({0})
                sync.squared_norm()
                sync.scale(1.0)
                for optimizer, _ in optimizers.values():
                    optimizer.step()
                end = ranks.clock.mark()
                ranks.clock.settle()  # an update begins on an idle device, since the host has waited for the norm
                times.append(ranks.clock.seconds(begin, end))
            ranks.barrier()
        self._report("the optimizer's update")
        elements = sum(parameter.numel() for parameter in self._trained.values())
        return ranks.of_rank_0(median(times[1:]) if times else 0.0) / elements

    def _largest_runs(self) -> list[SubgraphRun]:
        """The subgraphs of the largest micro-batch, without tensor parallelism."""
        whole = [model for model in self._models if model.derived is None]
        return self._runs(max(whole, key=lambda model: model.captured.graph.micro_batch_size))

    def _runs(self, model: ModelSubgraphs, *, split: bool = False) -> list[SubgraphRun]:
        samples = model.captured.graph.micro_batch_size
        batches = Batches(self._data, seed=0, global_batch=samples, micro_batch_size=samples)
        device = self._ranks.device
        constants = {name: value.to(device) for name, value in model.captured.exported.constants.items()}
        names = {name for stage in model.distinct for name in stage.state} - constants.keys()
        state = {**{name: self._state[_key(name, model)] for name in names}, **constants}
        return [SubgraphRun(stage, model, state, batches, device, split=split) for stage in model.distinct]

    def _rate(self, runs: Sequence[SubgraphRun]) -> float:
        """How many times per second all of ``runs`` go forward and backward."""
        begin, done = self._now(), 0
        while done < MIN_REPETITIONS or self._now() < begin + LOAD_S:
            for _ in range(self._ranks.clock.queued):
                for run in runs:
                    _forward_and_backward(run)
            done += self._ranks.clock.queued
        return done / (self._now() - begin)

    def _now(self) -> float:
        """Host time in seconds, once the device is idle."""
        self._ranks.clock.settle()
        return perf_counter()


def _forward_and_backward(run: SubgraphRun) -> None:
    run.forward()
    run.backward()
