"""Each row of docs/features.md is true: its names exist, its figures are those of a file in results/."""

import difflib
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import auto3d
from auto3d.partition.methods import METHODS
from auto3d.schedule import SCHEDULES
from auto3d.search.algorithms import ALGORITHMS
from launch.commands.group import VERBS
from launch.papers.item import names
from launch.recipe.data_schema import SOURCES
from launch.recipe.keys import documented_keys
from tests.distributed import test_uneven
from tests.distributed.parity import SGD, assert_parity, make_plan, plain_pytorch, run_rank
from tests.promises.running import ROOT

TABLE = (ROOT / "docs/features.md").read_text()
ROWS = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", TABLE, re.MULTILINE)[2:])  # without heading and rule
CHECKS: dict[str, Callable[..., None]] = {}


def row(feature: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(check: Callable[..., None]) -> Callable[..., None]:
        CHECKS[feature] = check
        return check

    return add


@cache
def result(name: str) -> str:
    return (ROOT / "results" / name).read_text()


def named(state: str) -> set[str]:
    """What ``state`` has between backticks."""
    return set(re.findall(r"`([^`]+)`", state))


def trains_like_one_process(processes: Any, model: str, plan: auto3d.Plan, *, samples: int) -> None:
    ranks = processes.run(plan.ranks, run_rank, model, plan, SGD)
    expected = plain_pytorch(model, micro_batch_size=samples, global_batch=plan.global_batch, optimizer=SGD)
    assert_parity(ranks, expected, tensors=not plan.shard_optimizer)


@row("capture")
def _(state: str, processes: Any) -> None:
    (most,) = re.findall(r"Over (\d+) models", state)
    (total,) = re.findall(r"^\| all +\|(.*)\|$", result("zoo.md"), re.MULTILINE)
    models, right, refused, *others = (cell.strip() for cell in total.split("|"))
    assert int(models) > int(most)
    assert int(right) + int(refused) == int(models)
    assert not any(others), "an entry is broken, wrong, crashed, hung or unclear"


@row("partition")
def _(state: str, processes: Any) -> None:
    assert named(state) == METHODS.keys()


@row("schedules")
def _(state: str, processes: Any) -> None:
    assert all(family.source and family.summary for family in SCHEDULES.values())
    assert "schedule" in VERBS


@row("data and pipeline parallelism")
def _(state: str, processes: Any) -> None:
    (summary,) = re.findall(r"^auto3d: (.*?)\. The tracer", result("parity.md"), re.MULTILINE)
    assert re.fullmatch(
        r"\d{3} right, \d+ refused; tensor-parallel: \d+ right; asynchronous: \d+ refused, \d+ right", summary
    )
    rows = set(re.findall(r"^\| ([\w-]+)", result("parity.md"), re.MULTILINE))
    by_rule = {name for name, family in SCHEDULES.items() if not family.explicit and not family.asynchronous}
    assert by_rule - rows == set()


@row("replicas of single stages (RaNNC)")
def _(state: str, processes: Any) -> None:
    plan = test_uneven.make_plan("gpt2", [1, 2])
    ranks = processes.run(plan.ranks, run_rank, "gpt2", plan, SGD)
    assert_parity(ranks, plain_pytorch("gpt2", micro_batch_size=6, global_batch=plan.global_batch, optimizer=SGD))


@row("asynchronous schedules (PipeDream, PipeDream-2BW)")
def _(state: str, processes: Any) -> None:
    assert {name for name, family in SCHEDULES.items() if family.asynchronous} >= {"pipedream", "pipedream-2bw"}
    assert re.search(r"asynchronous: (?:\d+ refused, )?\d+ right", result("parity.md"))


@row("ZeRO-1")
def _(state: str, processes: Any) -> None:
    plan = make_plan("gpt2", dp=2, pp=2, shard_optimizer=True)
    trains_like_one_process(processes, "gpt2", plan, samples=2)


@row("Trainer scripts")
def _(state: str, processes: Any) -> None:
    before, after = ((ROOT / f"examples/causal_lm_{when}.py").read_text().splitlines() for when in ("before", "after"))
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert "three changed lines" in state
    assert len(changed) <= 3
    assert all(callable(getattr(auto3d, name)) for name in ("Trainer", "TrainingArguments", "init"))


@row("data of one's own")
def _(state: str, processes: Any) -> None:
    assert set(SOURCES) >= {"dataset", "json", "parquet", "tokens", "text"}


@row("precision")
def _(state: str, processes: Any) -> None:
    takes = {name: takes for name, _, takes, _ in documented_keys()}
    assert takes["training.precision"] == "one of float32, bfloat16, float16"


@row("optimizers")
def _(state: str, processes: Any) -> None:
    meaning = {name: meaning for name, _, _, meaning in documented_keys()}["training.optimizer"]
    assert all(name.lower() in meaning for name in ("AdamW", "SGD", "Adafactor", "Muon", "torch"))
    (run,) = re.findall(r"classes: (\d+) run", result("optimizers.md"))
    (most,) = re.findall(r"over (\d+) other classes", state)
    assert int(run) > int(most)


@row("emulated devices")
def _(state: str, processes: Any) -> None:
    (most,) = re.findall(r"within (\d+) % of the simulator", state)
    differences = [float(found) for found in re.findall(r"\| +([+-][\d.]+)%", result("emulated/README.md"))]
    assert max(map(abs, differences)) <= int(most)
    assert re.search(r"^\| +16 \|", result("emulated/README.md"), re.MULTILINE)


@cache
def scored() -> dict[str, tuple[float | None, float | None]]:
    """Set -> mean errors of the simulated times and of the memory, in percent."""

    def percent(cell: str) -> float | None:
        return None if cell.strip() == "–" else float(cell.strip().removesuffix("%"))

    pattern = r"^\| (\S.*?) +\| (?:auto3d-simulated|simulator)\b[^|]*\|[^|]*\|([^|]*)\|[^|]*\|([^|]*)\|"
    return {
        name: (percent(time), percent(memory))
        for name, time, memory in re.findall(pattern, result("published/README.md"), re.MULTILINE)
    }


@row("cost model")
def _(state: str, processes: Any) -> None:
    said = re.search(
        r"(\d+) % on 16 T4, (\d+) % on a node of A100, (\d+) % on up to 3,072 A100, (\d+) % on up to 256 H100; of "
        r"memory, ([\d.]+) % on B200 and (\d+) % on H100",
        state,
    )
    assert said, state
    h100 = scored()["h100-llama: 3.57B, MFU ≥ 10%"]
    times = [scored()[name][0] for name in ("t4x16-gpt2", "a100-node", "megatron-sc21")]
    memory = scored()["b200-llama70b: 4 and 32 micro-batches"][1]
    for figure, found in zip(said.groups(), [*times, h100[0], memory, h100[1]], strict=True):
        assert found is not None
        assert abs(float(figure) - found) <= (0.05 if "." in figure else 0.5)


@row("yardstick")
def _(state: str, processes: Any) -> None:
    said = re.search(r"step times within ([\d.]+) and ([\d.]+) %", state)
    assert said
    for most, trace in zip(said.groups(), ("trace_dp2_pp4", "trace_dp4_pp4_tp4"), strict=True):
        time = scored()[trace][0]
        assert time is not None
        assert time <= float(most)
    assert "yardstick" in VERBS


@row("search")
def _(state: str, processes: Any) -> None:
    algorithms = named(state) - {"auto3d tune"}
    assert algorithms == ALGORITHMS.keys() - {"exhaustive", "rannc-any-depth"}
    keys = {name.removeprefix("search.") for name, *_ in documented_keys() if name.startswith("search.")}
    assert keys >= {"dp", "tp", "pp", "micro_batch_size", "schedule", "recompute", "partition", "placement", "replicas"}
    assert keys >= {"sync", "shard_optimizer", "sequence_parallel"}


@row("tensor parallelism")
def _(state: str, processes: Any) -> None:
    plan = make_plan("gpt2-4-heads", dp=1, tp=2, pp=2, sequence_parallel=True)
    trains_like_one_process(processes, "gpt2-4-heads", plan, samples=2)


@row("tables of papers")
def _(state: str, processes: Any) -> None:
    claims = result("papers/README.md")
    for paper in ("Merak", "RaNNC", "Chimera", "AMP"):
        assert any(name.startswith(f"{paper.lower()}-") for name in names())
    assert not [name for name in names() if name not in claims]


@row("checkpoints")
def _(state: str, processes: Any) -> None:
    assert "export" in VERBS
    keys = {name for name, *_ in documented_keys()}
    assert keys >= {"model.weights", "training.checkpoint_every", "training.deterministic"}


@row("watching")
def _(state: str, processes: Any) -> None:
    takes = {name: takes for name, _, takes, _ in documented_keys()}["training.report_to"]
    assert takes == "one of tensorboard, wandb"


@row("SLURM")
def _(state: str, processes: Any) -> None:
    (faults,), (trials,) = re.findall(r"\[(\d+) faults\]", state), re.findall(r"\[(\d+) trials\]", state)
    assert f"{faults} faults:" in result("slurm/faults.md")
    assert f"## {trials} trials" in result("slurm/README.md")


@row("devices")
def _(state: str, processes: Any) -> None:
    records = [json.loads(line) for line in result("cuda/parity.jsonl").splitlines()]
    assert {each["verdict"] for each in records} <= {"right", "failed"}, "a plan on a GPU was wrong"
    assert max(each["ranks"] for each in records if each["verdict"] == "right") == 4
    assert "On an H100, plans of up to four ranks" in state
    assert "H100" in result("cuda/README.md").partition("## Parity")[0]


@pytest.mark.parametrize("feature", ROWS)
def test_a_row_is_true(feature: str, processes: Any):
    CHECKS[feature](ROWS[feature], processes)


def test_every_check_is_of_a_row():
    assert CHECKS.keys() == ROWS.keys()
