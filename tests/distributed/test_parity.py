"""A Plan on any number of processes equals plain PyTorch on one process that accumulates the same micro-batches."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from auto3d.capture.graph import Graph
from auto3d.partition import PartitionRequest, partition
from auto3d.partition.cost import analytic
from auto3d.partition.merak import shard
from auto3d.partition.methods.uniform import uniform
from auto3d.partition.stage import cut
from auto3d.plan import PlanError, stages_between, stages_of_operations
from auto3d.schedule.operation import Schedule, parse
from tests.distributed.grid import kept_fractions_of
from tests.distributed.parity import (
    ADAMW,
    GLOBAL_BATCH,
    ITERATIONS,
    SGD,
    assert_buffers,
    assert_close,
    assert_parity,
    make_plan,
    plain_pytorch,
    run_rank,
)
from tests.models import MODELS, captured
from tests.soak import soak

BY_HAND_OF_ONE = tuple(
    tuple(parse(word) for word in line.split())
    for line in ("F0@0 F0@1 F0@2 B0@2 B0@1 B0@0 S@2 S@1 S@0 U@0 U@1 U@2", "F0@3 B0@3 S@3 U@3")
)


@pytest.mark.parametrize(
    ("micro_batch_size", "dp", "pp"),
    [
        (2, 1, 1),
        *soak((2, 2, 2), (2, 1, 4), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 4)),
    ],
)
def test_sgd_equals_plain_pytorch(processes, dp, pp, micro_batch_size):
    plan = make_plan("gpt2", dp=dp, pp=pp, micro_batch_size=micro_batch_size)
    ranks = processes.run(plan.ranks, run_rank, "gpt2", plan, SGD)
    assert_parity(ranks, plain_pytorch("gpt2", micro_batch_size=micro_batch_size, optimizer=SGD))


@pytest.mark.parametrize("model", ["llama", *soak("swin")])
def test_other_models_of_transformers(processes, model):
    plan = make_plan(model, dp=1, pp=4)
    ranks = processes.run(4, run_rank, model, plan, SGD)
    assert_parity(ranks, plain_pytorch(model, micro_batch_size=2, optimizer=SGD))


@pytest.mark.parametrize(("dp", "pp", "schedule"), [(2, 2, "1f1b"), (1, 4, "zb-h1"), *soak((1, 2, "1f1b"))])
def test_custom_autograd_functions(processes, dp, pp, schedule):
    """Straight-through estimators, also with a split backward."""
    plan = make_plan("straight-through", dp=dp, pp=pp, schedule=schedule)
    ranks = processes.run(plan.ranks, run_rank, "straight-through", plan, SGD)
    assert_parity(ranks, plain_pytorch("straight-through", micro_batch_size=2, optimizer=SGD))


def test_adamw_losses_equal_plain_pytorch(processes):
    """Its parameters are not compared: if a gradient is zero in theory, AdamW amplifies its rounding to a full step."""
    plan = make_plan("gpt2", dp=2, pp=2)
    ranks = processes.run(4, run_rank, "gpt2", plan, ADAMW)
    assert_parity(ranks, plain_pytorch("gpt2", micro_batch_size=2, optimizer=ADAMW), tensors=False)


@pytest.mark.parametrize(
    ("model", "pp", "schedule"),
    [
        ("reused", 4, "1f1b"),
        *soak(
            ("residual", 1, "1f1b"),
            ("residual", 3, "gpipe"),
            ("averaging", 2, "1f1b"),
            ("residual", 1, "gpipe"),
            ("residual", 3, "1f1b"),
            ("averaging", 2, "gpipe"),
            ("reused", 2, "gpipe"),
            ("reused", 2, "1f1b"),
            ("reused", 4, "gpipe"),
        ),
    ],
)
def test_models_that_are_not_a_chain_of_blocks(processes, model, pp, schedule):
    """Shared layers, skips, batch statistics, moving averages, code without gradients; buffers are compared as well."""
    plan = make_plan(model, dp=1, pp=pp, schedule=schedule)
    ranks = processes.run(pp, run_rank, model, plan, SGD)
    reference = plain_pytorch(model, micro_batch_size=2, optimizer=SGD)
    assert_parity(ranks, reference)
    assert_buffers(ranks, reference)


def test_a_loss_that_another_stage_uses(processes):
    """The loss is made on one stage and sent to the next, which averages it."""
    graph = captured("averaging", 2).graph
    after_loss = graph.producer[graph.loss] + 1
    stages = stages_between([0, after_loss, len(graph.nodes)])
    ranks = processes.run(2, run_rank, "averaging", make_plan("averaging", dp=1, pp=2, stages=stages), SGD)
    assert "mean_loss" in ranks[1]["history"][-1]["buffers"]
    assert_parity(ranks, plain_pytorch("averaging", micro_batch_size=2, optimizer=SGD))


PARTITIONED = [("llama-tied", "autopipe", 4), ("t5", "layer-assignment", 4), ("bert-pretraining", "rannc", 4)]
EVERY_PARTITION = product(
    ("t5", "bert-pretraining", "llama", "llama-tied"),
    ("autopipe", "autopipe-planner", "layer-assignment", "rannc"),
    (2, 4),
)


@pytest.mark.parametrize(
    ("model", "method", "pp"), [*PARTITIONED, *soak(*(case for case in EVERY_PARTITION if case not in PARTITIONED))]
)
def test_stages_of_every_partitioner_train(processes, model, method, pp):
    def graph_at(size: int) -> Graph:
        return captured(model, size).graph

    graph = graph_at(2)
    weights = sum(value.bytes for value in graph.parameters.values())
    memory = 4 * weights * 1.3 / pp + 250_000 if method == "rannc" else float("inf")  # too little for one device
    request = PartitionRequest(
        graph_at=graph_at,
        costs_of=lambda graph: analytic(graph, memory_bytes=memory),
        cuts=shard(graph).bounds,
        stages=None if method == "rannc" else pp,
        micro_batch_size=2,
        global_batch=GLOBAL_BATCH,
        nodes=1,
        devices_per_node=4,
    )
    stages = partition(method, request).stages
    assert len(stages) in ((2, 3, 4) if method == "rannc" else (pp,))
    plan = make_plan(model, dp=1, pp=len(stages), stages=stages)
    ranks = processes.run(plan.ranks, run_rank, model, plan, SGD)
    assert_parity(ranks, plain_pytorch(model, micro_batch_size=2, optimizer=SGD))


def test_stages_that_are_not_contiguous(processes):
    """In the Graph's order, an operation of the first stage comes after some of the second."""
    graph = captured("averaging", 2).graph
    middle = uniform(graph, 2)[0].operations[-1][1]
    independent = next(
        position
        for position, node in enumerate(graph.nodes)
        if position > middle and node.reads and all(graph.producer.get(name, 0) < middle for name in node.reads)
    )
    stage_of = [int(position >= middle and position != independent) for position in range(len(graph.nodes))]
    plan = make_plan("averaging", dp=1, pp=2, stages=stages_of_operations(stage_of))
    assert [len(stage.operations) for stage in plan.stages] == [2, 2]
    ranks = processes.run(2, run_rank, "averaging", plan, SGD)
    assert_parity(ranks, plain_pytorch("averaging", micro_batch_size=2, optimizer=SGD))


def test_a_written_buffer_that_two_stages_use_is_refused():
    graph = captured("averaging", 2).graph
    between = next(index for index, node in enumerate(graph.nodes) if "average" in node.state) + 1
    stages = stages_between([0, between, len(graph.nodes)])
    with pytest.raises(PlanError, match="stages: 0, 1 all use the buffer average"):
        cut(graph, stages)


def test_parameters_tied_across_stages_stay_equal(processes):
    plan = make_plan("gpt2", dp=1, pp=4)
    first, _, _, last = processes.run(4, run_rank, "gpt2", plan, ADAMW)
    for iteration in range(ITERATIONS):
        name = "transformer.wte.weight"
        embedding, head = (rank["history"][iteration]["parameters"][name] for rank in (first, last))
        assert np.array_equal(embedding, head)


def test_dropout_does_not_depend_on_degrees_or_schedule(processes):
    """Random operations are seeded by what they compute: a repeated run is identical, and another plan is equal."""
    runs = [
        processes.run(plan.ranks, run_rank, "gpt2-dropout", plan, SGD)
        for plan in (
            make_plan("gpt2-dropout", dp=2, pp=2),
            make_plan("gpt2-dropout", dp=2, pp=2),
            make_plan("gpt2-dropout", dp=1, pp=1),
            make_plan("gpt2-dropout", dp=1, pp=4, schedule="gpipe"),
        )
    ]
    once, again, single, deep = runs
    for a, b in zip(once, again, strict=True):
        assert [h["result"] for h in a["history"]] == [h["result"] for h in b["history"]]
        for name, value in a["history"][-1]["parameters"].items():
            assert np.array_equal(value, b["history"][-1]["parameters"][name]), name
    reference = single[0]["history"][-1]
    for rank in (*once, *deep):
        for name, value in rank["history"][-1]["gradients"].items():
            assert_close(value, reference["gradients"][name], name)
    other_seed = processes.run(1, run_rank, "gpt2-dropout", make_plan("gpt2-dropout", dp=1, pp=1, seed=6), SGD)
    assert other_seed[0]["history"][0]["result"] != single[0]["history"][0]["result"]
    without = processes.run(1, run_rank, "gpt2", make_plan("gpt2", dp=1, pp=1), SGD)
    assert without[0]["history"][0]["result"] != single[0]["history"][0]["result"], "dropout is on"


@pytest.mark.parametrize("model", ["gpt2-dropout", "residual", *soak("swin")])
def test_recomputation_changes_no_bit(processes, model):
    """Neither with dropout, nor with attention whose bias is trained, nor with batch statistics."""
    plan = make_plan(model, dp=1, pp=2)
    kept = processes.run(2, run_rank, model, plan, SGD)
    full = replace(plan, schedule_options={"recompute": "full"})
    early = replace(plan, schedule="early-recompute")
    partly = kept_fractions_of(captured(model, 2).graph, full).plan(0.5)
    assert model == "residual" or any(0 < held(stage.kept) < held(stage.operations) for stage in partly.stages)
    for other in (full, early, partly):
        again = processes.run(2, run_rank, model, other, SGD)
        for a, b in zip(kept, again, strict=True):
            for what in ("gradients", "buffers"):
                for name, value in a["history"][-1][what].items():
                    assert np.array_equal(value, b["history"][-1][what][name]), name


def held(ranges: tuple[tuple[int, int], ...]) -> int:
    return sum(last - first for first, last in ranges)


def test_any_list_of_operations_runs(processes):
    """Two stages per device in a V, and micro-batches in pairs: a correct schedule that no family makes."""
    text = [
        "F0+1@0 F0+1@3 B0@3 B1@3 B0+1@0 F2+3@0 F2@3 F3@3 B3@3 B2@3 B2@0 B3@0 S@3 S@0 U@0 U@3",
        "F0@1 F1@1 F0@2 F1@2 B0@2 B1@2 B0+1@1 F2@1 F3@1 F2@2 F3@2 B3@2 B2@2 B2@1 B3@1 S@1 S@2 U@1 U@2",
    ]
    schedule = Schedule(
        name="by hand",
        stages=4,
        micro_batches=4,
        device_of={(0, 0): 0, (1, 0): 1, (2, 0): 1, (3, 0): 0},
        operations=tuple(tuple(parse(word) for word in line.split()) for line in text),
    )
    plan = make_plan("gpt2", dp=1, pp=2, stages=uniform(captured("gpt2", 2).graph, 4))
    ranks = processes.run(2, run_rank, "gpt2", plan, SGD, schedule)
    assert_parity(ranks, plain_pytorch("gpt2", micro_batch_size=2, optimizer=SGD))


def test_a_value_that_two_stages_of_one_device_use(processes):
    """Three stages on the first device: a value of stage 0 goes to 1 and 2, and its gradients come from both."""
    text = ["F0@0 F0@1 F0@2 F1@0 F1@1 F1@2 B0@2 B0@1 B0@0 B1@2 B1@1 B1@0 S@2 S@1 S@0 U@0 U@1 U@2",
            "F0@3 B0@3 F1@3 B1@3 S@3 U@3"]  # fmt: skip
    schedule = Schedule(
        name="by hand",
        stages=4,
        micro_batches=2,
        device_of={(0, 0): 0, (1, 0): 0, (2, 0): 0, (3, 0): 1},
        operations=tuple(tuple(parse(word) for word in line.split()) for line in text),
    )
    graph = captured("residual", 4).graph
    skip = next(index for index, node in enumerate(graph.nodes) if node.operator == "aten.batch_norm.default")
    bounds = [0, skip, skip + 2, skip + 4, len(graph.nodes)]
    stages = stages_between(bounds)
    plan = make_plan("residual", dp=1, pp=2, micro_batch_size=4, stages=stages)
    users = {transfer.target for stage in cut(graph, plan.stages) for transfer in stage.sent if transfer.source == 0}
    assert {1, 2} <= users
    ranks = processes.run(2, run_rank, "residual", plan, SGD, schedule)
    assert_parity(ranks, plain_pytorch("residual", micro_batch_size=4, optimizer=SGD))
    fewer = replace(schedule, micro_batches=1)
    with pytest.raises(
        AssertionError, match="PlanError: schedule: by hand has 2 devices, 4 stages and 1 micro-batches"
    ):
        processes.run(2, run_rank, "residual", plan, SGD, replace(fewer, operations=BY_HAND_OF_ONE))


def test_weights_from_a_state_dict(processes):
    torch.manual_seed(99)
    state = {name: p.detach().clone() for name, p in MODELS["gpt2"][0]().named_parameters()}
    plan = make_plan("gpt2", dp=1, pp=2)
    ranks = processes.run(2, run_rank, "gpt2", plan, SGD, None, state)
    assert_parity(ranks, plain_pytorch("gpt2", micro_batch_size=2, optimizer=SGD, state=state))
