"""Stages with different numbers of replicas on real processes equal plain PyTorch on one process."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from auto3d.capture.graph import Graph
from auto3d.cluster import place_ranks
from auto3d.data import Batches
from auto3d.partition import PartitionRequest, partition
from auto3d.partition.cost import analytic
from auto3d.partition.merak import shard
from auto3d.partition.methods.uniform import uniform
from auto3d.partition.stage import cut
from auto3d.plan import NO_OVERLAP, SUB_PIPELINED, Plan, PlanError, StagePlan, stages_between
from auto3d.runtime.process.world import join, leave
from auto3d.runtime.rank import build_rank, check_plan, predicted_memory
from auto3d.runtime.replicas import rank_program, resplit_dimensions
from auto3d.runtime.settings import TrainingSettings
from auto3d.schedule import build_schedule, samples_at_once
from auto3d.search.partitioned import plan_of
from tests.distributed.parity import SGD, assert_close, assert_parity, plain_pytorch, run_rank, with_split
from tests.models import TEXT, captured
from tests.processes import ProcessPool
from tests.soak import soak


def make_plan(
    model: str,
    replicas: list[int],
    *,
    dp: int = 1,
    micro_batch_size: int = 6,
    micro_batches: int = 2,
    schedule: str = "1f1b",
    options: dict | None = None,
    stages: tuple[StagePlan, ...] | None = None,
    tp: int = 1,
    tensor_overlap: str = NO_OVERLAP,
) -> Plan:
    """``replicas`` has the number of replicas of each pipeline device's stages."""
    options = options or {}
    shape = build_schedule(schedule, devices=len(replicas), micro_batches=micro_batches, **options)
    whole = captured(model, micro_batch_size // shape.sample_parts)
    for count in set(replicas):
        whole.at(whole.graph.micro_batch_size // count)  # captured before the ranks are forked, which inherit it
    graph = whole.graph
    of_stage = {stage: replicas[device] for (stage, _), device in shape.device_of.items()}
    plan = Plan(
        graph=graph.fingerprint,
        dp=dp,
        tp=tp,
        pp=len(replicas),
        global_batch=dp * micro_batches * micro_batch_size,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        schedule_options=options,
        stages=tuple(
            replace(stage, replicas=of_stage[index])
            for index, stage in enumerate(stages or uniform(graph, shape.stages))
        ),
        placement=place_ranks(dp=dp, pp=len(replicas), tp=tp, replicas=replicas),
        seed=5,
        tensor_overlap=tensor_overlap,
    )
    return with_split(plan, whole)


def of_one_process(model: str, plan: Plan, *, slices: int = 1) -> list[dict]:
    """Plain PyTorch with the micro-batches of ``plan``, each run in so many ``slices``."""
    size = samples_at_once(plan) // slices
    return plain_pytorch(model, micro_batch_size=size, global_batch=plan.global_batch, optimizer=SGD)


def assert_equals_one_process(pool: ProcessPool, model: str, plan: Plan) -> None:
    assert_parity(pool.run(plan.ranks, run_rank, model, plan, SGD), of_one_process(model, plan))


@pytest.mark.parametrize(
    ("replicas", "schedule"),
    [
        ([2, 1], "1f1b"),
        # Other tests of this file and of test_sharded_optimizer.py tie embeddings on stages of 1 and 3 replicas.
        *soak(*product(([1, 3], [3, 1], [1, 2, 1], [2, 2]), ("gpipe", "1f1b")), ([2, 1], "gpipe")),
    ],
    ids=str,
)
def test_tied_embeddings_on_stages_of_any_replicas(processes, replicas, schedule):
    assert_equals_one_process(processes, "gpt2", make_plan("gpt2", replicas, schedule=schedule))


@pytest.mark.parametrize(
    ("model", "replicas"),
    [
        ("t5", [2, 1]),
        *soak(("vit", [2, 1]), ("t5", [1, 2, 1]), ("t5", [1, 3]), ("bert", [3, 1]), ("llama-tied", [1, 1, 2])),
    ],
    ids=str,
)
def test_skips_copies_and_other_models(processes, model, replicas):
    """T5's encoder output skips stages; its position bias comes from weights, so all replicas have the same copy."""
    plan = make_plan(model, replicas)
    stages = cut(captured(model, 6).graph, plan.stages)
    crossing = {transfer.value.name for stage in stages for transfer in stage.received}
    split = resplit_dimensions(captured(model, 6), plan, stages).keys()
    assert split
    if len(replicas) == 2:
        assert bool(crossing - split) == (model == "t5"), "a value that all replicas have crosses, too"
    assert_equals_one_process(processes, model, plan)


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "early-recompute", "zb-h1"])
@pytest.mark.parametrize("replicas", [[2, 1], [1, 2], [1, 3], [3, 1], [1, 2, 1], [2, 1, 1], [1, 1, 2]], ids=str)
@pytest.mark.parametrize("model", ["gpt2", "t5", "bert-pretraining", "vit", "swin", "llama", "llama-tied"])
def test_every_model_under_every_order(processes, model, replicas, schedule):
    stages = None
    if model == "bert-pretraining":  # all its losses are on one stage
        graph = captured(model, 6).graph
        bounds = [span.operations[0][0] for span in uniform(graph, len(replicas))]
        first_loss = next(i for i, node in enumerate(graph.nodes) if node.operator == "aten.cross_entropy_loss.default")
        stages = stages_between([*(min(bound, first_loss) for bound in bounds), len(graph.nodes)])
    assert_equals_one_process(processes, model, make_plan(model, replicas, schedule=schedule, stages=stages))


@pytest.mark.parametrize(
    ("model", "schedule", "replicas", "options"),
    [
        ("gpt2", "interleaved-1f1b", [1, 3], {"sync": "eager"}),
        ("t5", "zb-v", [2, 1], {}),
        ("gpt2", "chimera", [2, 2], {"scale": "halving"}),
        *soak(("gpt2", "1f1b", [1, 2], {"recompute": "full"}), ("t5", "early-recompute", [2, 1, 1], {})),
    ],
    ids=str,
)
def test_other_schedules(processes, model, schedule, replicas, options):
    """Several stages on a device, between which messages stay local; recomputation; split backwards; halved batches."""
    size = 12 if "scale" in options else 6  # 6 samples at once
    plan = make_plan(model, replicas, micro_batch_size=size, schedule=schedule, options=options)
    assert_equals_one_process(processes, model, plan)


@pytest.mark.parametrize(
    ("model", "replicas", "options"),
    [
        ("gpt2", [1, 2], {}),
        *soak(("t5", [2, 1], {"recompute": "full"}), ("llama", [1, 3], {}), ("gpt2", [3, 2], {})),
    ],
    ids=str,
)
def test_halves_on_stages_of_different_replicas(model, replicas, options):
    """Sub-pipelined tensor parallelism: a half of a replica's samples lies across the halves of other replicas."""
    plan = make_plan(model, replicas, micro_batch_size=12, options=options, tp=2, tensor_overlap=SUB_PIPELINED)
    program = rank_program(captured(model, 12), plan, 1)
    received = (each for stage in cut(program.captured.graph, program.plan.stages) for each in stage.received)
    assert {each.value.name for each in received} & program.derived.half_of.keys(), "halves cross between stages"
    with ProcessPool(plan.ranks) as pool:
        assert_equals_one_process(pool, model, plan)


@pytest.mark.parametrize(
    ("model", "replicas", "options", "tp"),
    [
        ("gpt2", [1, 2], {}, 1),
        ("llama", [2, 1], {"recompute": "full"}, 2),
        *soak(("two-losses", [2, 2], {}, 1), ("llama", [3, 1], {"slices": 4}, 1), ("gpt2", [1, 2], {}, 2)),
    ],
    ids=str,
)
def test_slices_of_the_sequence_on_replicas(model, replicas, options, tp):
    """Each replica has its samples of every slice, and may share the weights of its stage with others."""
    plan = make_plan(model, replicas, schedule="seq1f1b", options={"slices": 2} | options, tp=tp)
    with ProcessPool(plan.ranks) as pool:
        assert_equals_one_process(pool, model, plan)


def test_two_pipes_over_devices_of_different_replicas():
    """Chimera on four devices; the inner two have two ranks each."""
    with ProcessPool(6) as pool:
        plan = make_plan("gpt2", [1, 2, 2, 1], micro_batches=4, micro_batch_size=4, schedule="chimera")
        assert_equals_one_process(pool, "gpt2", plan)


@pytest.mark.parametrize(("dp", "replicas"), [(1, [2, 2]), *soak((1, [4]), (2, [2]))], ids=str)
def test_equal_replicas_are_data_parallelism(processes, dp, replicas):
    """Even dropout equals one process: each slice is seeded as a micro-batch of its own."""
    plan = make_plan("gpt2-dropout", replicas, dp=dp, micro_batch_size=4)
    first = processes.run(4, run_rank, "gpt2-dropout", plan, SGD)
    alone = make_plan("gpt2-dropout", [1], micro_batch_size=4 // replicas[0], micro_batches=2 * dp * replicas[0])
    (single,) = processes.run(1, run_rank, "gpt2-dropout", alone, SGD)
    for rank in first:
        for name, value in rank["history"][-1]["gradients"].items():
            assert_close(value, single["history"][-1]["gradients"][name], name)


def test_dropout_on_uneven_replicas_is_the_same_again(processes):
    plan = make_plan("gpt2-dropout", [2, 1])
    once, again = (processes.run(3, run_rank, "gpt2-dropout", plan, SGD) for _ in range(2))
    kept = processes.run(3, run_rank, "gpt2-dropout", replace(plan, schedule_options={"recompute": "full"}), SGD)
    for a, b, c in zip(once, again, kept, strict=True):
        for name, value in a["history"][-1]["parameters"].items():
            assert np.array_equal(value, b["history"][-1]["parameters"][name]), name
            assert np.array_equal(value, c["history"][-1]["parameters"][name]), name
    one, other = once[0]["history"][0]["result"], once[2]["history"][0]["result"]
    assert one == other, "all ranks know the loss"
    without = processes.run(3, run_rank, "gpt2", make_plan("gpt2", [2, 1]), SGD)
    assert without[0]["history"][0]["result"] != one, "dropout is on"


def test_ranks_predict_the_memory_that_the_plan_does(processes):
    """A rank runs a slice of its stage's samples, which the estimate of the whole plan takes into account."""
    plan = make_plan("gpt2", [2, 1])
    settings = TrainingSettings(iterations=1, optimizer=SGD, device="cpu", threads_per_rank=1, timeout_s=60)
    expected = predicted_memory(captured("gpt2", 6), plan, settings)
    ranks = processes.run(3, run_rank, "gpt2", plan, SGD)
    assert [rank["predicted"] for rank in ranks] == [expected[0], expected[0], expected[1]]


def test_batch_statistics_are_those_of_a_slice(processes):
    """If their stage has one replica they equal one process; with two, they equal micro-batches of half the size."""
    graph = captured("residual", 6).graph
    normal = next(i for i, node in enumerate(graph.nodes) if node.operator == "aten.batch_norm.default")
    plan = make_plan("residual", [1, 3], stages=stages_between([0, normal + 1, len(graph.nodes)]))
    reference = of_one_process("residual", plan)
    ranks = processes.run(4, run_rank, "residual", plan, SGD)
    assert_parity(ranks, reference)
    statistics = ranks[0]["history"][-1]["buffers"]
    assert statistics
    for name, value in statistics.items():
        assert_close(value, reference[-1]["buffers"][name], name)

    plan = make_plan("residual", [2, 2], micro_batch_size=8)
    assert_parity(processes.run(4, run_rank, "residual", plan, SGD), of_one_process("residual", plan, slices=2))


@pytest.mark.soak  # tests/launch/commands/test_partition.py trains such a plan, and other tests compare replicas
@pytest.mark.parametrize(("model", "memory"), [("bert-pretraining", 0.7), ("t5", 0.8)])
def test_what_rannc_finds_is_a_plan_that_trains(processes, model, memory):
    """``memory``, a fraction of the weights' size, is so small that the model is cut and its middle replicated."""

    def graph_at(size: int) -> Graph:
        return captured(model, size).graph

    weights = sum(value.bytes for value in graph_at(1).parameters.values())
    request = PartitionRequest(
        graph_at=graph_at,
        costs_of=partial(analytic, memory_bytes=4 * weights * memory),
        cuts=shard(graph_at(1)).bounds,
        stages=None,
        micro_batch_size=1,
        global_batch=16,
        nodes=1,
        devices_per_node=4,
        equal_slices=True,
    )
    found = partition("rannc", request)
    plan = plan_of(found, request, seed=5)
    assert [stage.replicas for stage in plan.stages] == [1, 2, 1]
    assert plan.micro_batches == found.micro_batches > 1
    assert plan.schedule_options == {"recompute": "full"}, "RaNNC's memory estimate assumes this"
    assert_equals_one_process(processes, model, plan)


# Split data loading


def run_and_record(world, plan: Plan, corpus: str) -> tuple[list[int], set[str], int, list[tuple]]:
    """Train; returns the numbers of the samples that this rank made, their inputs, how often it opened its file, and
    the (iteration, micro-batch, replica) that it read to compare them."""
    made: list[tuple[int, tuple[str, ...]]] = []
    compared: list[tuple] = []
    opened: list[str] = []
    sample, open_bytes, fingerprints = Batches._sample, Path.read_bytes, Batches.fingerprints

    def record_sample(self: Batches, number: int, names: Collection[str], stored: int, counts: bool) -> tuple:
        made.append((number, tuple(names)))
        return sample(self, number, names, stored, counts)

    def record_fingerprints(self: Batches, *read: int) -> np.ndarray | None:
        compared.append(read)
        return fingerprints(self, *read)

    def record_file(self: Path) -> bytes:
        opened.append(str(self))
        return open_bytes(self)

    settings = TrainingSettings(iterations=2, optimizer=SGD, device="cpu", threads_per_rank=1, timeout_s=60)
    join(world, device=torch.device("cpu"), timeout_s=60)
    Batches._sample, Path.read_bytes, Batches.fingerprints = record_sample, record_file, record_fingerprints
    try:
        data = replace(TEXT, files=(corpus,))
        rank = build_rank(captured("gpt2", samples_at_once(plan)), plan, settings, data, world)
        for iteration in range(2):
            list(rank.executor.run(rank.programs[iteration], iteration))
        inputs = {name for _, names in made for name in names}
        return [number for number, _ in made], inputs, opened.count(corpus), compared
    finally:
        Batches._sample, Path.read_bytes, Batches.fingerprints = sample, open_bytes, fingerprints
        leave()


@pytest.mark.parametrize(
    ("dp", "replicas", "loads"),
    [
        (1, [2, 1, 1], [("input_ids", 0, 2), ("input_ids", 1, 2), None, ("labels", 0, 1)]),
        (1, [1, 3], [("input_ids", 0, 1), ("labels", 0, 3), ("labels", 1, 3), ("labels", 2, 3)]),
        (2, [2], [("both", 0, 2), ("both", 1, 2)] * 2),
        (1, [1, 1, 1, 1], [("input_ids", 0, 1), None, None, ("labels", 0, 1)]),
    ],
    ids=str,
)
def test_a_rank_loads_its_own_samples_of_its_own_inputs(processes, tmp_path, dp, replicas, loads):
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(bytes(range(256)) * 4)
    plan = make_plan("gpt2", replicas, dp=dp)
    found = processes.run(plan.ranks, run_and_record, plan, str(corpus))
    for rank, ((samples, names, openings, compared), load) in enumerate(zip(found, loads, strict=True)):
        if load is None:
            assert (samples, names, openings, compared) == ([], set(), 0, []), "it never opens the corpus"
            continue
        name, replica, replicas_here = load
        assert openings == 1
        assert names == ({"input_ids", "labels"} if name == "both" else {name})
        pipeline = plan.position(rank)[1]["pipeline"]
        micro_batches = [2 * pipeline, 2 * pipeline + 1]
        of_neighbour = []
        if (readers := dp * replicas_here) > 1:
            other, next_pipeline = divmod((replica * dp + pipeline + 1) % readers, dp)
            of_neighbour = [(each, 2 * next_pipeline + place, other) for each in range(2) for place in range(2)]
        assert compared == of_neighbour
        numbers = [6 * m + i for m in micro_batches for i in range(6) if i * replicas_here // 6 == replica]
        assert samples == [iteration * plan.global_batch + number for iteration in range(2) for number in numbers]


# Bad input


def test_a_value_of_several_samples_is_refused_between_different_replicas():
    """The loss itself, which the next stage averages: no replica has the loss of the whole micro-batch."""
    model = captured("averaging", 4)
    after_loss = model.graph.producer[model.graph.loss] + 1
    stages = stages_between([0, after_loss, len(model.graph.nodes)])
    for replicas, words in (([2, 1], "0 has 2 replicas and sends"), ([1, 2], "0 has 1 replica and sends")):
        plan = make_plan("averaging", replicas, micro_batch_size=4, stages=stages)
        with pytest.raises(PlanError, match=words) as caught:
            resplit_dimensions(model, plan, cut(model.graph, plan.stages))
        assert "cannot be split by samples, so both must have equally many" in str(caught.value)
    equal = make_plan("averaging", [2, 2], micro_batch_size=4, stages=stages)
    assert resplit_dimensions(model, equal, cut(model.graph, equal.stages)) == {}


def test_replicas_that_do_not_fit_the_schedule_are_refused():
    plan = make_plan("gpt2", [1, 3], schedule="interleaved-1f1b")
    model = captured("gpt2", 6)
    settings = TrainingSettings(iterations=1, optimizer=SGD, device="cpu", threads_per_rank=1, timeout_s=60)
    check_plan(model, plan, settings)
    mixed = replace(plan, stages=(replace(plan.stages[0], replicas=2), *plan.stages[1:]))
    with pytest.raises(PlanError, match=r"stages: 0, 2 are on one device of schedule interleaved-1f1b, and have 2, 1"):
        check_plan(model, mixed, settings)
    turned = replace(plan, placement=place_ranks(dp=1, pp=2, replicas=[3, 1]))
    with pytest.raises(PlanError, match=r"placement: \[0, 1, 2\] are the ranks of device 0, .* dp × replicas = 1 × 1"):
        check_plan(model, turned, settings)
    halves = make_plan("gpt2", [2, 2], micro_batch_size=4, schedule="chimera", options={"scale": "halving"})
    assert samples_at_once(halves) == 2
    with pytest.raises(
        PlanError, match="micro_batch_size: 6; schedule chimera runs it in 2 parts, each divided among 2 replicas"
    ):
        samples_at_once(replace(halves, micro_batch_size=6, global_batch=12))
