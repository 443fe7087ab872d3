"""Every peer gives auto3d's losses on real processes, from the same weights, data, optimizer and clipping."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from auto3d.capture.model import CapturedModel, capture
from auto3d.capture.skeleton import seeded
from auto3d.cluster import place_ranks
from auto3d.data import DataSettings, InputField
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import AUTO3D, DDP, DEEPSPEED_PIPELINE, ENGINES, TORCH_PIPELINING, ZERO_1, ZERO_2, ZERO_3, Plan
from auto3d.runtime.measurement import CommunicationCalls, Status
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.runtime.training import TrainingResult, train
from launch.peers import ddp
from launch.peers.communication import log_communication
from launch.peers.limits import DEEPSPEED
from launch.peers.training import FILES, train_by_peer
from launch.run.ranks import Outcome, run_ranks
from tests.models import SEQUENCE, gpt2
from tests.soak import soak

SAMPLES, GLOBAL_BATCH, ITERATIONS = 2, 16, 4
DATA = DataSettings(
    source="synthetic",
    sequence_length=SEQUENCE,
    inputs={"input_ids": InputField(kind="tokens"), "labels": InputField(kind="tokens")},
)
OPTIMIZER = OptimizerSettings(
    optimizer="adamw",
    learning_rate=1e-2,  # high: a gradient that is off by a factor changes later losses by more than rounding
    weight_decay=0.1,
    momentum=0.0,
    betas=(0.9, 0.95),
    learning_rate_schedule="linear",
    warmup_iterations=1,
    clip_norm=0.5,  # below all norms that occur
)
SETTINGS = TrainingSettings(iterations=ITERATIONS, optimizer=OPTIMIZER, device="cpu", threads_per_rank=1, timeout_s=60)
FLOAT_BYTES = 4
WITH_DROPOUT = (TORCH_PIPELINING, DEEPSPEED_PIPELINE)  # they run auto3d's stages, and so its seeds


@cache
def model(dropout: float = 0.0, tied: bool = False) -> CapturedModel:
    return capture(partial(gpt2, dropout=dropout, tie_word_embeddings=tied), DATA.input_specs(), SAMPLES)


def plan_of(
    captured: CapturedModel, engine: str, dp: int = 1, pp: int = 1, *, schedule: str = "1f1b", stages: int = 0
) -> Plan:
    return Plan(
        graph=captured.graph.fingerprint,
        dp=dp,
        tp=1,
        pp=pp,
        global_batch=GLOBAL_BATCH,
        micro_batch_size=SAMPLES,
        schedule=schedule,
        stages=uniform(captured.graph, stages or pp),
        placement=place_ranks(dp=dp, pp=pp),
        seed=7,
        engine=engine,
    )


def trained(captured: CapturedModel, plan: Plan, state: dict[str, torch.Tensor] | None = None) -> TrainingResult:
    by = train if plan.engine == AUTO3D else train_by_peer

    def run(world, report):
        return by(captured, plan, SETTINGS, DATA, world, state=state)

    outcome = run_ranks(plan.ranks, run, limit_s=120)
    assert outcome.status is Status.OK, outcome.error
    return outcome.result


@cache
def ours(captured_with_dropout: bool = False, tied: bool = False) -> list[float]:
    captured = model(0.1 if captured_with_dropout else 0.0, tied)
    return trained(captured, plan_of(captured, AUTO3D)).loss


def agree(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)


PIPELINES = [
    pytest.param(TORCH_PIPELINING, 1, 2, "gpipe", 2, id="torch gpipe", marks=pytest.mark.soak),
    pytest.param(TORCH_PIPELINING, 2, 2, "1f1b", 2, id="torch 1f1b with DDP"),
    pytest.param(TORCH_PIPELINING, 1, 2, "interleaved-1f1b", 4, id="torch interleaved"),
    pytest.param(
        TORCH_PIPELINING, 1, 2, "interleaved-zero-bubble", 4, id="torch interleaved I W", marks=pytest.mark.soak
    ),
    pytest.param(TORCH_PIPELINING, 1, 2, "looped-bfs", 4, id="torch looped", marks=pytest.mark.soak),
    pytest.param(TORCH_PIPELINING, 1, 2, "zb-v", 4, id="torch zb-v"),
    pytest.param(DEEPSPEED_PIPELINE, 2, 2, "1f1b", 2, id="deepspeed"),
]


# A later test has the sums and gathers of ZeRO-2 in each iteration.
DATA_PARALLEL = [engine for engine in FILES if engine not in (*WITH_DROPOUT, ZERO_2, ZERO_3)]


@pytest.mark.parametrize("engine", [*DATA_PARALLEL, *soak(ZERO_2, ZERO_3)])
def test_a_data_parallel_peer_gives_our_losses(engine):
    """The embedding is tied to the head, which all of them train."""
    if engine in DEEPSPEED:
        pytest.importorskip("deepspeed")
    captured = model(tied=True)
    result = trained(captured, plan_of(captured, engine, dp=2))
    agree(result.loss, ours(tied=True))
    assert len(result.iteration_s) == ITERATIONS
    assert len(result.peak_bytes) == 2
    assert min(result.iteration_s + result.peak_bytes) > 0


@pytest.mark.parametrize(("engine", "dp", "pp", "schedule", "stages"), PIPELINES)
def test_a_pipeline_of_a_peer_gives_our_losses_with_dropout(engine, dp, pp, schedule, stages):
    if engine in DEEPSPEED:
        pytest.importorskip("deepspeed")
    captured = model(dropout=0.1)
    result = trained(captured, plan_of(captured, engine, dp, pp, schedule=schedule, stages=stages))
    agree(result.loss, ours(captured_with_dropout=True))
    assert result.loss != pytest.approx(ours(), rel=1e-4), "dropout changes the losses"


@pytest.mark.soak
@pytest.mark.parametrize("zero", [False, True], ids=["", "ZeRO-1"])
def test_deepspeeds_pipeline_gives_our_losses_with_a_tied_embedding(zero):
    pytest.importorskip("deepspeed")
    captured = model(tied=True)
    plan = replace(plan_of(captured, DEEPSPEED_PIPELINE, 2, 2), shard_optimizer=zero)
    agree(trained(captured, plan).loss, ours(tied=True))


def test_peers_begin_with_the_weights_of_a_file():
    captured = model()
    with seeded(99):
        state = {name: tensor.detach() for name, tensor in gpt2(tie_word_embeddings=False).named_parameters()}
    expected = trained(captured, plan_of(captured, AUTO3D), state).loss
    assert expected != pytest.approx(ours(), rel=1e-4), "other weights, other losses"
    agree(trained(captured, plan_of(captured, "ddp", dp=2), state).loss, expected)
    agree(trained(captured, plan_of(captured, TORCH_PIPELINING, pp=2), state).loss, expected)


def logged(engine: str, *, dp: int = 1, pp: int = 1) -> list[dict[str, CommunicationCalls]]:
    """What each rank logs per iteration, by operation; the first iteration is warm-up."""
    captured = model(tied=dp > 1)
    plan = plan_of(captured, engine, dp, pp)

    def run(world, report):
        return log_communication(captured, plan, replace(SETTINGS, iterations=2), DATA, world, first=1)

    outcome = run_ranks(plan.ranks, run, limit_s=120)
    assert outcome.status is Status.OK, outcome.error
    for rank in outcome.result:
        assert min(calls.seconds for calls in rank) > 0
    return [{calls.operation: calls for calls in rank} for rank in outcome.result]


@pytest.mark.parametrize(("engine", "sums"), [*soak((ZERO_1, 1)), (ZERO_2, GLOBAL_BATCH // SAMPLES // 2)])
def test_deepspeeds_log_has_the_bytes_of_all_gradients_and_parameters(engine, sums):
    """ZeRO-1 sums gradients once per iteration, ZeRO-2 after each micro-batch; both gather the updated shards."""
    pytest.importorskip("deepspeed")
    parameters = FLOAT_BYTES * sum(parameter.numel() for parameter in gpt2(tie_word_embeddings=True).parameters())
    for rank in logged(engine, dp=2):
        norm = FLOAT_BYTES
        assert rank["all_reduce"].calls == sums + 1
        assert rank["all_reduce"].message_bytes == sums * parameters + norm
        assert rank["all_gather_into_tensor"].message_bytes == parameters / 2


@pytest.mark.soak
def test_deepspeeds_log_has_what_zero_3_gathers_and_scatters():
    """ZeRO-3 gathers asynchronously, and scatters the gradients of each micro-batch."""
    pytest.importorskip("deepspeed")
    parameters = FLOAT_BYTES * sum(parameter.numel() for parameter in gpt2(tie_word_embeddings=True).parameters())
    for rank in logged(ZERO_3, dp=2):
        assert rank["reduce_scatter_tensor"].message_bytes == GLOBAL_BATCH // SAMPLES // 2 * parameters
        assert rank["all_gather_into_tensor"].message_bytes >= parameters / 2


def test_deepspeeds_log_has_the_messages_between_stages():
    pytest.importorskip("deepspeed")
    message = FLOAT_BYTES * SAMPLES * SEQUENCE * gpt2().config.n_embd
    for rank in logged(DEEPSPEED_PIPELINE, pp=2):
        for operation in ("send", "recv"):
            assert rank[operation].calls == GLOBAL_BATCH // SAMPLES
            assert rank[operation].message_bytes == GLOBAL_BATCH // SAMPLES * message


def failing(fault: Callable[[], object]) -> Outcome:
    """The outcome of a DDP training whose rank 1 meets ``fault`` where its first iteration should be."""
    captured = model()
    plan = plan_of(captured, DDP, dp=2)

    def run(world, report):
        build = ddp.build
        if world.rank == 1:
            ddp.build = lambda rank: build(rank) and (lambda iteration: fault())
        return train_by_peer(captured, plan, SETTINGS, DATA, world)

    return run_ranks(plan.ranks, run, limit_s=60)


def test_a_rank_of_a_peer_that_dies_is_named():
    outcome = failing(lambda: os._exit(7))
    assert outcome.status is Status.FAILED
    assert "rank 1" in outcome.error
    assert "in iteration 1 of ddp" in outcome.error
    assert "7" in outcome.error


def test_a_peer_without_enough_memory_is_a_result():
    outcome = failing(lambda: torch.empty(2**50))
    assert outcome.status is Status.OOM
    assert "in iteration 1 of ddp, ran out of memory" in outcome.error


def test_every_engine_but_ours_has_a_file():
    assert {*FILES, AUTO3D} == set(ENGINES)
    assert FILES[ZERO_1] == FILES[ZERO_3]
