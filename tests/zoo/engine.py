"""Train an entry with the engine on forked ranks."""

import pickle
import random
import tempfile
from bisect import bisect_left
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from auto3d.capture.graph import Graph
from auto3d.capture.model import CapturedModel
from auto3d.cluster import place_ranks
from auto3d.errors import InputError
from auto3d.partition.methods.uniform import uniform
from auto3d.partition.stage import cut, possible_cuts
from auto3d.plan import Plan, StagePlan, stages_between
from auto3d.runtime.measurement import Status
from auto3d.runtime.process.world import World, join, leave
from auto3d.runtime.rank import build_rank
from auto3d.runtime.settings import TrainingSettings
from launch.run.ranks import run_ranks
from tests.distributed.parity import CPU, GLOBAL_BATCH
from tests.zoo.entry import Entry
from tests.zoo.outcome import CrashedError, HungError
from tests.zoo.trained import ITERATIONS, MICRO_BATCH, OPTIMIZER, SEED, Trained, array

SETTINGS = TrainingSettings(iterations=ITERATIONS, optimizer=OPTIMIZER, device="cpu", threads_per_rank=1, timeout_s=60)


def stages(graph: Graph, dp: int) -> tuple[StagePlan, ...]:
    """Two stages with trained parameters each: the uniform cut or, for dp 2, a cut at a third of the FLOPs."""

    def trains(plans: tuple[StagePlan, ...]) -> bool:
        return all(graph.trained.intersection(stage.state) for stage in cut(graph, plans))

    equal = uniform(graph, 2)
    if dp == 1 and trains(equal):
        return equal
    flops = [0, *accumulate(node.flops for node in graph.nodes)]
    wanted = bisect_left(flops, flops[-1] / (2 if dp == 1 else 3))
    inner = [position for position in possible_cuts(graph) if 0 < position < len(graph.nodes)]
    for position in sorted(inner, key=lambda position: abs(position - wanted)):
        plans = stages_between([0, position, len(graph.nodes)])
        try:
            if trains(plans):
                return plans
        except InputError:  # this cut separates operations that must stay together; try another one
            continue
    return equal


def engine(entry: Entry, captured: CapturedModel, dp: int, *, timeout_s: float) -> list[Trained]:
    """The results of each rank; raises InputError, CrashedError or HungError."""
    graph = captured.graph
    plan = Plan(
        graph=graph.fingerprint,
        dp=dp,
        tp=1,
        pp=2,
        global_batch=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        schedule="1f1b",
        stages=stages(graph, dp),
        placement=place_ranks(dp=dp, pp=2),
        seed=SEED,
    )
    with tempfile.TemporaryDirectory(prefix="auto3d-zoo-") as folder:

        def rank(world: World, report: Any) -> None:
            # Give forked ranks different random states: on a cluster, ranks share only the plan.
            random.seed(world.rank)
            np.random.seed(world.rank)
            torch.manual_seed(world.rank)
            result = _train(entry, captured, plan, world)
            (Path(folder) / str(world.rank)).write_bytes(pickle.dumps(result))

        outcome = run_ranks(plan.ranks, rank, limit_s=timeout_s)
        if outcome.status is Status.TIMEOUT:
            raise HungError(outcome.error)
        if outcome.status is not Status.OK:
            raise CrashedError(outcome.error)
        return [pickle.loads((Path(folder) / str(number)).read_bytes()) for number in range(plan.ranks)]


def _train(entry: Entry, captured: CapturedModel, plan: Plan, world: World) -> Trained:
    join(world, device=CPU, timeout_s=SETTINGS.timeout_s)
    try:
        rank = build_rank(captured, plan, SETTINGS, entry.data, world)
        results, gradients = [], {}
        for iteration, program in enumerate(rank.programs):
            results += rank.executor.run(program, iteration)
            if iteration == 0:
                gradients = {name: array(p.grad) for name, p in rank.parameters.items() if p.requires_grad}
        return Trained(
            losses=[result.loss for result in results],
            norms=[result.grad_norm for result in results],
            gradients=gradients,
            parameters={name: array(parameter) for name, parameter in rank.parameters.items()},
            buffers={name: array(buffer) for name, buffer in rank.buffers.items()},
        )
    finally:
        leave()
