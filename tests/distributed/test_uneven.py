"""Stages with different numbers of replicas, on real processes, equal plain PyTorch on one with the same micro-batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from auto3d.cluster import place_ranks
from auto3d.partition.stage import cut
from auto3d.partition.uniform import uniform
from auto3d.plan import Plan, PlanError, StagePlan, stages_between
from auto3d.runtime import training
from auto3d.runtime.data import Batches, DataSettings
from auto3d.runtime.replicas import resplit_dimensions
from auto3d.runtime.training import TrainingSettings, build_rank, samples_at_once
from auto3d.runtime.world import join, leave
from auto3d.schedule import build_schedule
from tests.distributed.test_parity import SGD, assert_close, assert_parity, plain_pytorch, run_rank
from tests.models import MODELS, captured
from tests.processes import ProcessPool


def make_plan(
    model: str,
    replicas: list[int],
    *,
    dp: int = 1,
    micro_batch_size: int = 6,
    micro_batches: int = 3,
    schedule: str = "1f1b",
    options: dict | None = None,
    stages: tuple[StagePlan, ...] | None = None,
) -> Plan:
    """``replicas`` of each pipeline device."""
    options = options or {}
    shape = build_schedule(schedule, devices=len(replicas), micro_batches=micro_batches, **options)
    graph = captured(model, micro_batch_size // shape.parts).graph
    device_of = {stage: device for (stage, _), device in shape.device_of.items()}
    return Plan(
        graph=graph.fingerprint,
        dp=dp,
        tp=1,
        pp=len(replicas),
        global_batch=dp * micro_batches * micro_batch_size,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        schedule_options=options,
        stages=tuple(
            replace(stage, replicas=replicas[device_of[index]])
            for index, stage in enumerate(stages or uniform(graph, shape.stages))
        ),
        placement=place_ranks(dp=dp, pp=len(replicas), replicas=replicas),
        seed=5,
    )


def assert_equals_one_process(pool: ProcessPool, model: str, plan: Plan) -> None:
    ranks = pool.run(plan.ranks, run_rank, model, plan, SGD)
    reference = plain_pytorch(
        model, micro_batch_size=samples_at_once(plan), global_batch=plan.global_batch, optimizer=SGD
    )
    assert_parity(ranks, reference)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("replicas", [[2, 1], [1, 3], [3, 1], [1, 2, 1], [2, 2], [4]], ids=str)
def test_tied_embeddings_on_stages_of_any_replicas(processes, replicas, schedule):
    assert_equals_one_process(processes, "gpt2", make_plan("gpt2", replicas, schedule=schedule, micro_batch_size=12))


@pytest.mark.parametrize("replicas", [[2, 1], [1, 3], [3, 1], [1, 2, 1], [1, 1, 2]], ids=str)
@pytest.mark.parametrize("model", ["t5", "bert", "vit", "llama-tied"])
def test_skips_copies_and_other_models(processes, model, replicas):
    """T5's encoder output skips stages; its position bias is made of weights, and all replicas have it alike."""
    plan = make_plan(model, replicas, micro_batches=2)
    crossing = {t.value.name for stage in cut(captured(model, 6).graph, plan.stages) for t in stage.received}
    split = resplit_dimensions(captured(model, 6), plan, cut(captured(model, 6).graph, plan.stages))
    assert split
    assert (model == "t5") == bool(crossing - split.keys() and len(replicas) == 2) or len(replicas) == 3
    assert_equals_one_process(processes, model, plan)
