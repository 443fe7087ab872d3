"""A Plan on any number of processes equals plain PyTorch on one that accumulates the same micro-batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from auto3d.capture.graph import Graph
from auto3d.cluster import place_ranks
from auto3d.partition import Request, partition
from auto3d.partition.cost import analytic
from auto3d.partition.merak import shard
from auto3d.partition.stage import cut
from auto3d.partition.uniform import uniform
from auto3d.plan import Plan, PlanError, stages_between, stages_of_operations
from auto3d.runtime.data import Batches
from auto3d.runtime.optimizer import OptimizerSettings, build_optimizer
from auto3d.runtime.rank import TrainingSettings, build_rank
from auto3d.runtime.world import join, leave
from auto3d.schedule import build_schedule, samples_at_once
from auto3d.schedule.operation import Schedule, parse
from auto3d.search.recompute import Shares
from tests.models import MODELS, captured

ITERATIONS = 3
GLOBAL_BATCH = 8
CLIP_NORM = 0.1  # below the norms that occur, so clipping acts in every iteration
SGD = OptimizerSettings(
    optimizer="sgd",
    learning_rate=0.1,
    weight_decay=0.01,
    momentum=0.9,
    betas=(0.9, 0.95),
    learning_rate_schedule="linear",
    warmup_iterations=1,
    clip_norm=CLIP_NORM,
)
ADAMW = replace(SGD, optimizer="adamw", learning_rate=1e-3)


def make_plan(
    model: str,
    *,
    dp: int,
    pp: int,
    micro_batch_size: int = 2,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    options: dict | None = None,
    stages=None,
    seed: int = 5,
) -> Plan:
    plan = Plan(
        graph="",
        dp=dp,
        tp=1,
        pp=pp,
        global_batch=GLOBAL_BATCH if micro_batches is None else dp * micro_batches * micro_batch_size,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        schedule_options=options or {},
        stages=stages or uniform(captured(model, micro_batch_size).graph, pp),
        placement=place_ranks(dp=dp, pp=pp),
        seed=seed,
    )
    return replace(plan, graph=captured(model, samples_at_once(plan)).graph.fingerprint)


def run_rank(world, model: str, plan: Plan, optimizer: OptimizerSettings, schedule=None, state=None) -> dict:
    """Train as one rank; returns the losses, norms and, per iteration, this rank's gradients and parameters."""
    settings = TrainingSettings(
        iterations=ITERATIONS, optimizer=optimizer, device="cpu", threads_per_rank=1, timeout_s=60
    )
    join(world, device=torch.device("cpu"), timeout_s=60)
    try:
        rank = build_rank(
            captured(model, samples_at_once(plan)),
            plan,
            settings,
            MODELS[model][1],
            world,
            schedule=schedule,
            state=state,
        )
        history = []
        for iteration, program in enumerate(rank.programs):
            (result,) = rank.executor.run(program, iteration)
            gradients = {name: p.grad.numpy().copy() for name, p in rank.parameters.items() if p.requires_grad}
            parameters = {name: p.detach().numpy().copy() for name, p in rank.parameters.items()}
            buffers = {name: b.numpy().copy() for name, b in rank.buffers.items()}
            history.append({"result": result, "gradients": gradients, "parameters": parameters, "buffers": buffers})
        return {"history": history}
    finally:
        leave()


def plain_pytorch(
    model: str,
    *,
    micro_batch_size: int,
    optimizer: OptimizerSettings,
    global_batch: int = GLOBAL_BATCH,
    seed: int = 5,
    state=None,
) -> list[dict]:
    """The reference: the unmodified model, on this process, in a plain loop."""
    build, data = MODELS[model]
    torch.manual_seed(seed)
    module = build()
    if state is not None:
        module.load_state_dict(state, strict=False)
    module.train()
    step, learning_rate = build_optimizer(list(module.parameters()), optimizer, iterations=ITERATIONS)
    batches = Batches(data, seed=seed, global_batch=global_batch, micro_batch_size=micro_batch_size)
    count = global_batch // micro_batch_size
    history = []
    for iteration in range(ITERATIONS):
        module.zero_grad()
        total = 0.0
        for index in range(count):
            output = module(**batches.micro_batch(iteration, index, tuple(data.inputs)))
            loss = (output if isinstance(output, torch.Tensor) else output["loss"]) / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM).item()
        step.step()
        learning_rate.step()
        history.append(
            {
                "loss": total,
                "norm": norm,
                "gradients": {n: p.grad.numpy().copy() for n, p in module.named_parameters() if p.grad is not None},
                "parameters": {name: p.detach().numpy().copy() for name, p in module.named_parameters()},
                "buffers": {name: buffer.numpy().copy() for name, buffer in module.named_buffers()},
            }
        )
    return history


def assert_close(ours: np.ndarray, theirs: np.ndarray, what: str) -> None:
    difference = np.abs(ours - theirs).max()
    bound = 1e-5 * np.abs(theirs).max() + 1e-7
    assert difference <= bound, f"{what}: differs by {difference:.3g}, at most {bound:.3g} is allowed"


def assert_parity(ranks: list[dict], reference: list[dict], *, tensors: bool = True) -> None:
    for iteration, expected in enumerate(reference):
        seen = set()
        for number, rank in enumerate(ranks):
            got = rank["history"][iteration]
            where = f"iteration {iteration}, rank {number}"
            assert_close(np.float64(got["result"].loss), np.float64(expected["loss"]), f"loss, {where}")
            assert_close(np.float64(got["result"].grad_norm), np.float64(expected["norm"]), f"norm, {where}")
            assert expected["norm"] > CLIP_NORM, "this case does not clip"
            for name in got["gradients"] if tensors else ():
                assert_close(got["gradients"][name], expected["gradients"][name], f"gradient of {name}, {where}")
            for name in got["parameters"] if tensors else ():
                assert_close(got["parameters"][name], expected["parameters"][name], f"{name}, {where}")
            seen.update(got["parameters"])
        assert seen == set(expected["parameters"]), "together, the ranks hold every parameter"


BY_HAND_OF_ONE = tuple(
    tuple(parse(word) for word in line.split())
    for line in ("F0@0 F0@1 F0@2 B0@2 B0@1 B0@0 S@2 S@1 S@0 U@0 U@1 U@2", "F0@3 B0@3 S@3 U@3")
)
DEGREES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("dp", "pp"), DEGREES)
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_sgd_equals_plain_pytorch(processes, dp, pp, schedule, micro_batch_size):
    plan = make_plan("gpt2", dp=dp, pp=pp, schedule=schedule, micro_batch_size=micro_batch_size)
    ranks = processes.run(plan.ranks, run_rank, "gpt2", plan, SGD)
    assert_parity(ranks, plain_pytorch("gpt2", micro_batch_size=micro_batch_size, optimizer=SGD))


@pytest.mark.parametrize("model", ["bert", "llama", "vit", "t5"])
def test_other_models_of_transformers(processes, model):
    plan = make_plan(model, dp=1, pp=4)
    ranks = processes.run(4, run_rank, model, plan, SGD)
    assert_parity(ranks, plain_pytorch(model, micro_batch_size=2, optimizer=SGD))


def test_adamw_losses_equal_plain_pytorch(processes):
    """Not its parameters: where a gradient is zero in theory, AdamW amplifies its rounding to a full step."""
    plan = make_plan("gpt2", dp=2, pp=2)
    ranks = processes.run(4, run_rank, "gpt2", plan, ADAMW)
    assert_parity(ranks, plain_pytorch("gpt2", micro_batch_size=2, optimizer=ADAMW), tensors=False)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("model", "pp"), [("residual", 1), ("residual", 3), ("averaging", 2), ("reused", 2), ("reused", 4)]
)
def test_models_that_are_not_a_chain_of_blocks(processes, model, pp, schedule):
    """Shared layers, skips, batch statistics, moving averages, code without gradients: on each, buffers too."""
    plan = make_plan(model, dp=1, pp=pp, schedule=schedule)
    ranks = processes.run(pp, run_rank, model, plan, SGD)
    reference = plain_pytorch(model, micro_batch_size=2, optimizer=SGD)
    assert_parity(ranks, reference)
    held = [name for rank in ranks for name in rank["history"][-1]["buffers"]]
    assert sorted(held) == sorted(reference[-1]["buffers"]), "each buffer lives on one rank"
    for rank in ranks:
        for name, value in rank["history"][-1]["buffers"].items():
            assert_close(value, reference[-1]["buffers"][name], name)


def test_a_loss_that_another_stage_uses(processes):
    """The loss is made on one stage and sent to the next, which averages it."""
    graph = captured("averaging", 2).graph
    after_loss = graph.producer[graph.loss] + 1
    stages = stages_between([0, after_loss, len(graph.nodes)])
    ranks = processes.run(2, run_rank, "averaging", make_plan("averaging", dp=1, pp=2, stages=stages), SGD)
    assert "mean_loss" in ranks[1]["history"][-1]["buffers"]
    assert_parity(ranks, plain_pytorch("averaging", micro_batch_size=2, optimizer=SGD))


@pytest.mark.parametrize("model", ["t5", "bert-pretraining", "llama", "llama-tied"])
@pytest.mark.parametrize("method", ["autopipe", "layer-assignment", "rannc"])
@pytest.mark.parametrize("pp", [2, 4])
def test_stages_of_every_partitioner_train(processes, model, method, pp):
    def graph_at(size: int) -> Graph:
        return captured(model, size).graph

    graph = graph_at(2)
    weights = sum(value.bytes for value in graph.parameters.values())
    memory = 4 * weights * 1.3 / pp + 250_000 if method == "rannc" else float("inf")  # so little that it must divide
    request = Request(
        graph_at=graph_at,
        costs_of=lambda graph: analytic(graph, memory_bytes=memory),
        sharding=shard(graph),
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
    """An operation of the first stage stands, in the Graph's order, after some of the second."""
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
    """Random operations are seeded by what they compute; so a repeated run is identical, and another plan is equal."""
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


SCHEDULES_TO_TRAIN = [
    ("chimera", 2, 2, {}),
    ("chimera", 4, 4, {}),
    ("chimera", 4, 4, {"pipes": 4}),
    ("chimera", 4, 8, {"scale": "doubling", "sync": "eager-opt"}),
    ("chimera", 4, 5, {"sync": "eager"}),
    ("chimera", 4, 4, {"scale": "halving"}),
    ("gems", 4, 4, {"sync": "eager"}),
    ("interleaved-1f1b", 2, 4, {"sync": "eager"}),
    ("interleaved-1f1b", 2, 3, {"recompute": "full"}),
    ("1f1b", 2, 3, {"recompute": "full"}),
    ("early-recompute", 4, 4, {}),
    ("shifted-critical-path", 4, 5, {}),
    ("chimera", 4, 4, {"recompute": "full"}),
    ("zb-h1", 4, 5, {}),
    ("zb-h2", 2, 4, {}),
    ("zb-v", 2, 5, {}),
]


@pytest.mark.parametrize("model", ["gpt2", "t5"])
@pytest.mark.parametrize(("name", "pp", "micro_batches", "options"), SCHEDULES_TO_TRAIN)
def test_every_schedule_trains(processes, model, name, pp, micro_batches, options):
    schedule = build_schedule(name, devices=pp, micro_batches=micro_batches, **options)
    plan = make_plan(
        model,
        dp=1,
        pp=pp,
        micro_batch_size=2 * schedule.parts,
        micro_batches=micro_batches,
        schedule=name,
        options=options,
        stages=uniform(captured(model, 2).graph, schedule.stages),
    )
    ranks = processes.run(pp, run_rank, model, plan, SGD)
    assert_parity(ranks, plain_pytorch(model, micro_batch_size=2, global_batch=plan.global_batch, optimizer=SGD))


@pytest.mark.parametrize(
    ("model", "name"),
    [("averaging", "early-recompute"), ("residual", "early-recompute"), ("residual", "zb-h1"), ("vit", "zb-h1")],
)
def test_recomputation_and_split_backwards_of_other_models(processes, model, name):
    """Buffers that a recomputed forward would write to twice; convolutions; layers that two stages share."""
    schedule = build_schedule(name, devices=2, micro_batches=4)
    ranks = processes.run(2, run_rank, model, make_plan(model, dp=1, pp=2), SGD, schedule)
    reference = plain_pytorch(model, micro_batch_size=2, optimizer=SGD)
    assert_parity(ranks, reference)
    for rank in ranks:
        for buffer, value in rank["history"][-1]["buffers"].items():
            assert_close(value, reference[-1]["buffers"][buffer], buffer)


@pytest.mark.parametrize(("name", "options"), [("1f1b", {"recompute": "full"}), ("early-recompute", {})])
@pytest.mark.parametrize("share", [None, 0.3, 0.7])
def test_dropout_is_the_same_when_recomputed(processes, name, options, share):
    plan = make_plan("gpt2-dropout", dp=1, pp=2)
    kept = processes.run(2, run_rank, "gpt2-dropout", plan, SGD)
    recomputing = replace(plan, schedule=name, schedule_options=options)
    if share is not None:
        recomputing = Shares(captured("gpt2-dropout", 2).graph, recomputing).plan(share)
        assert any(0 < held(stage.kept) < held(stage.operations) for stage in recomputing.stages)
    again = processes.run(2, run_rank, "gpt2-dropout", recomputing, SGD)
    for a, b in zip(kept, again, strict=True):
        for parameter, gradient in a["history"][-1]["gradients"].items():
            assert np.array_equal(gradient, b["history"][-1]["gradients"][parameter]), parameter


def held(ranges: tuple[tuple[int, int], ...]) -> int:
    return sum(last - first for first, last in ranges)


SHARES_TO_TRAIN = [
    ("gpt2", "1f1b", 4, 5, {"recompute": "full"}, 0.4),
    ("t5", "1f1b", 4, 4, {"recompute": "full"}, 0.3),
    ("t5", "shifted-critical-path", 4, 4, {}, 0.4),
    ("residual", "gpipe", 2, 3, {"recompute": "full"}, 0.5),
    ("vit", "early-recompute", 2, 4, {}, 0.5),
    ("gpt2", "chimera", 4, 4, {"recompute": "full"}, 0.5),
    ("gpt2", "chimera", 4, 4, {"recompute": "full", "scale": "halving"}, 0.5),
    ("t5", "interleaved-1f1b", 2, 3, {"recompute": "full"}, 0.5),
]


@pytest.mark.parametrize(("model", "name", "pp", "micro_batches", "options", "share"), SHARES_TO_TRAIN)
def test_stages_that_keep_a_share_train(processes, model, name, pp, micro_batches, options, share):
    schedule = build_schedule(name, devices=pp, micro_batches=micro_batches, **options)
    graph = captured(model, 2).graph
    plan = make_plan(
        model,
        dp=1,
        pp=pp,
        micro_batch_size=2 * schedule.parts,
        micro_batches=micro_batches,
        schedule=name,
        options=options,
        stages=uniform(graph, schedule.stages),
    )
    plan = Shares(graph, plan).plan(share)
    assert any(0 < held(stage.kept) < held(stage.operations) for stage in plan.stages)
    ranks = processes.run(pp, run_rank, model, plan, SGD)
    reference = plain_pytorch(model, micro_batch_size=2, global_batch=plan.global_batch, optimizer=SGD)
    assert_parity(ranks, reference)
    for rank in ranks:
        for buffer, value in rank["history"][-1]["buffers"].items():
            assert_close(value, reference[-1]["buffers"][buffer], buffer)


def test_any_list_of_operations_runs(processes):
    """Two stages on each device in a V, and micro-batches in pairs: no schedule of ours, but a right one."""
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
    """Three stages on the first device: what stage 0 makes goes to 1 and 2, and its gradients come from both."""
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
