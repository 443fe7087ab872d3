"""What each peer refuses, and that it refuses nothing else."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from auto3d.capture.graph import Graph
from auto3d.cluster import place_ranks
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import AUTO3D, ENGINES, EngineRefusalError, Plan, PlanError
from auto3d.runtime.emulated.settings import Emulation
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from launch.peers import limits
from launch.peers.limits import check_engine
from tests.models import captured

PIPELINES = ("torch-pipelining", "deepspeed-pipeline")
SETTINGS = TrainingSettings(iterations=1)
OTHERS = tuple(engine for engine in ENGINES if engine not in (AUTO3D, *PIPELINES))


@cache
def graph_of(model: str) -> Graph:
    return captured(model, 2).graph


def plan_of(engine: str, *, model: str = "llama", dp: int = 1, tp: int = 1, pp: int = 1, stages: int = 0) -> Plan:
    graph = graph_of(model)
    return Plan(
        graph=graph.fingerprint,
        dp=dp,
        tp=tp,
        pp=pp,
        global_batch=8,
        micro_batch_size=2,
        schedule="1f1b",
        stages=uniform(graph, stages or pp),
        placement=place_ranks(dp=dp, tp=tp, pp=pp),
        seed=1,
        engine=engine,
    )


def refusal(
    plan: Plan, *, model: str = "llama", settings: TrainingSettings = SETTINGS, unequal_targets: bool = False
) -> str:
    """Why the plan's engine refuses it; empty if it does not."""
    reason = ""
    try:
        check_engine(plan, lambda: graph_of(model), settings, unequal_targets=unequal_targets)
    except EngineRefusalError as error:
        refused, reason = error.plan, str(error)
    assert not reason or (refused == plan and reason.startswith(f"{plan.engine} "))
    return reason


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """DeepSpeed counts as installed, whether it is or not."""
    monkeypatch.setattr(limits, "find_spec", lambda name: object())


def test_a_plan_has_a_known_engine():
    with pytest.raises(PlanError, match="engine: 'megatron' is not known; use one of auto3d, torch-pipelining"):
        plan_of("megatron")


@pytest.mark.parametrize("engine", OTHERS)
def test_a_data_parallel_peer_trains_data_parallel_plans_only(engine):
    assert refusal(plan_of(engine, dp=2)) == ""
    assert refusal(plan_of(engine)) == ""
    assert "has no pipeline; the plan has pp = 2" in refusal(plan_of(engine, pp=2))


@pytest.mark.parametrize("engine", PIPELINES)
def test_a_pipeline_trains_pipelines_only(engine):
    assert refusal(plan_of(engine, dp=2, pp=2)) == ""
    assert "needs 2 stages or more" in refusal(plan_of(engine, dp=2))


@pytest.mark.parametrize("engine", [*PIPELINES, *OTHERS])
def test_what_no_peer_trains(engine):
    fits = plan_of(engine, pp=2) if engine in PIPELINES else plan_of(engine, dp=2)
    assert refusal(fits) == ""
    recomputing = replace(fits, schedule_options={"recompute": "full"})
    assert "without recomputation" in refusal(recomputing)
    assert "search.sync=[lazy]" in refusal(replace(fits, schedule_options={"sync": "eager"}))
    assert "no asynchronous schedule" in refusal(replace(fits, schedule="pipedream-2bw"))
    assert "no replicas" in refusal(
        replace(
            fits,
            stages=tuple(replace(stage, replicas=2) for stage in fits.stages),
            placement=place_ranks(dp=2 * fits.dp, pp=fits.pp),
        )
    )
    assert "no tensor parallelism" in refusal(plan_of(engine, tp=2))
    assert "training.compute=real" in refusal(fits, settings=replace(SETTINGS, emulation=Emulation()))


@pytest.mark.parametrize("engine", [*PIPELINES, *OTHERS])
def test_no_peer_leaves_out_a_setting_of_the_training(engine):
    fits = plan_of(engine, pp=2) if engine in PIPELINES else plan_of(engine, dp=2)

    def trained_with(**optimizer: Any) -> str:
        return refusal(fits, settings=replace(SETTINGS, optimizer=OptimizerSettings(**optimizer)))

    assert "training.precision is bfloat16" in refusal(fits, settings=replace(SETTINGS, precision="bfloat16"))
    assert "training.compile=false" in refusal(fits, settings=replace(SETTINGS, compile=True))
    assert "data.packing=packed" in refusal(fits, unequal_targets=True)
    assert "training.offload_optimizer=false" in trained_with(offload=True)
    for clipping in ({"clip_value": 0.1}, {"clip_ratio": 0.1}):
        assert "training.clip_value=0 and training.clip_ratio=0" in trained_with(**clipping)
    assert "training.weight_decay_exempt=[]" in trained_with(exempt=("*.bias",), weight_decay=0.1)
    assert trained_with(exempt=("*.bias",)) == ""
    assert trained_with(optimizer="torch.optim.RMSprop") == ""
    slices = engine not in (*PIPELINES, "ddp")
    assert ("adafactor combines the elements" in trained_with(optimizer="adafactor")) == slices


def test_deepspeed_shards_elementwise_optimizers_only():
    sharded = replace(plan_of("deepspeed-pipeline", dp=2, pp=2), shard_optimizer=True)
    adafactor = replace(SETTINGS, optimizer=OptimizerSettings(optimizer="adafactor"))
    assert "combines the elements of a weight" in refusal(sharded, settings=adafactor)


def test_who_shards_the_optimizer():
    def sharded(engine: str, **degrees: int) -> str:
        return refusal(replace(plan_of(engine, **degrees), shard_optimizer=True))

    assert sharded("deepspeed-pipeline", dp=2, pp=2) == ""
    assert "whole optimizer state" in sharded("torch-pipelining", dp=2, pp=2)
    assert "fsdp and deepspeed-zero shard it" in sharded("ddp", dp=2)
    for engine in OTHERS[:3]:
        assert "always shards" in sharded(engine, dp=2)


@pytest.mark.parametrize(
    ("engine", "schedule", "stages", "reason"),
    [
        ("torch-pipelining", "gpipe", 2, ""),
        ("torch-pipelining", "interleaved-1f1b", 4, ""),
        ("torch-pipelining", "interleaved-zero-bubble", 4, ""),
        ("torch-pipelining", "looped-bfs", 4, ""),
        ("torch-pipelining", "zb-v", 4, ""),
        ("torch-pipelining", "zb-h1", 2, "looped-bfs, zb-v, and not zb-h1"),
        ("torch-pipelining", "chimera", 2, "and not chimera"),
        ("deepspeed-pipeline", "gpipe", 2, "has one schedule: 1f1b"),
    ],
)
def test_schedules_of_peers(engine, schedule, stages, reason):
    found = refusal(replace(plan_of(engine, pp=2, stages=stages), schedule=schedule))
    assert reason in found
    assert bool(reason) == bool(found)


def test_torch_interleaves_groups_of_one_size():
    plan = replace(plan_of("torch-pipelining", pp=2, stages=4), schedule="interleaved-1f1b")
    own = plan.micro_batches // max(1, plan.micro_batches // 2)
    assert refusal(replace(plan, schedule_options={"group": own})) == ""
    assert "fewer on some" in refusal(replace(plan, stages=plan.stages, schedule_options={"fewer": 1}))
    assert f"use group={own}" in refusal(replace(plan, schedule_options={"group": plan.micro_batches}))


def test_a_weight_of_two_stages_is_tied_by_deepspeed_only():
    tied = refusal(plan_of("torch-pipelining", model="gpt2", pp=2), model="gpt2")
    assert "transformer.wte.weight is on stages 0 and 1" in tied
    assert refusal(plan_of("deepspeed-pipeline", model="gpt2", pp=2), model="gpt2") == ""
    several = refusal(plan_of("deepspeed-pipeline", model="reused", pp=5), model="reused")
    assert "between the same stages only" in several
    assert several.count("is on stages") == 2


def test_a_value_that_skips_a_stage_is_refused():
    assert not refusal(plan_of("deepspeed-pipeline", model="t5", pp=2), model="t5")
    skip = refusal(plan_of("deepspeed-pipeline", model="t5", pp=3), model="t5")
    assert "encoder_dropout_dropout_1 goes from stage 0 to stage 2" in skip


@pytest.mark.parametrize("engine", PIPELINES)
def test_another_order_of_ranks_is_refused(engine):
    other = replace(plan_of(engine, dp=2, pp=2), placement=((0, 2), (1, 3)))
    assert "search.placement=[megatron]" in refusal(other)


def test_a_peer_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(limits, "find_spec", lambda name: None)
    assert "pip install 'deepspeed" in refusal(plan_of("deepspeed-zero", dp=2))
    assert refusal(plan_of("ddp", dp=2)) == ""
    assert limits.engine_version("deepspeed-zero") == ""


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_a_measurement_names_the_peers_version():
    assert limits.engine_version("deepspeed-zero:stage=3").startswith("deepspeed ")
    assert limits.engine_version("ddp") == ""
