"""Compares plans on ranks that share a GPU with plain PyTorch on it: python -m tests.cuda.parity FILE (root's rights)

It appends a line per case, in JSON, to FILE. The exit code is 1 if a case is wrong or fails.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, TextIO

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["AUTO3D_TEST_DEVICE"] = "cuda"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # hides the GPU from this process, which runs backwards

import click
import torch
import transformers

from auto3d.plan import SUB_PIPELINED, Plan
from auto3d.runtime.process.world import World
from auto3d.runtime.settings import OptimizerSettings
from tests.cuda.one_gpu import GPU, begin_on_own_host
from tests.cuda.records import all_right, timed
from tests.distributed import grid, tensor_grid
from tests.distributed.parity import ADAMW, SGD, assert_parity, make_plan, parameters_after, plain_pytorch, run_rank
from tests.distributed.parity_report import error_of_ranks
from tests.processes import ProcessPool


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    make: Callable[[], Plan]
    ranks: int
    optimizer: OptimizerSettings = SGD


CHOSEN: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("one rank", "gpt2-dropout", {}),
    ("1f1b", "gpt2-dropout", {"pp": 2}),
    ("data", "gpt2-dropout", {"dp": 2}),
    ("tensor", "gpt2-4-heads", {"tp": 2}),
    ("sequence", "llama-grouped-query", {"tp": 2, "sequence_parallel": True}),
    ("sub-pipelined", "gpt2-4-heads", {"tp": 2, "tensor_overlap": SUB_PIPELINED}),
    ("ZeRO-1", "gpt2", {"dp": 2, "shard_optimizer": True}),
    ("zero bubble", "t5-dropout", {"pp": 2, "schedule": "zb-h1"}),
    ("chimera", "bert-dropout", {"pp": 2, "schedule": "chimera"}),
    ("interleaved", "gpt2-dropout", {"pp": 2, "schedule": "interleaved-1f1b"}),
    ("recomputed", "vit-dropout", {"pp": 2, "options": {"recompute": "full"}}),
    ("bfloat16", "gpt2-dropout@bfloat16", {"pp": 2}),
    ("bfloat16, recomputed", "t5@bfloat16", {"pp": 2, "options": {"recompute": "full"}}),
    ("bfloat16, ZeRO-1", "gpt2@bfloat16", {"dp": 2, "shard_optimizer": True}),
    ("data, tensor and pipeline", "gpt2-4-heads", {"dp": 2, "pp": 2, "tp": 2, "sequence_parallel": True}),
)


def cases() -> Iterator[Case]:
    """A plan of every kind, and the samples of the grids that the suite runs on the CPU."""
    for name, model, axes in CHOSEN:
        degrees = {name: axes.get(name, 1) for name in ("dp", "tp", "pp")}
        ranks = degrees["dp"] * degrees["tp"] * degrees["pp"]
        label = f"{name}, {', '.join(f'{name} {degree}' for name, degree in degrees.items())}"
        of_zero = ADAMW if name == "ZeRO-1" else SGD
        yield Case(label, model, partial(make_plan, model, **(axes | degrees)), ranks, of_zero)
    for cell in Random(1).sample(grid.sample(), len(grid.sample())):
        yield Case(str(cell), cell.model, partial(grid.plan_of, cell), cell.devices * cell.dp)
    for split in tensor_grid.sample():
        yield Case(str(split), split.model, partial(tensor_grid.plan_of, split), split.dp * split.tp * split.pp)


def reference(world: World, model: str, arguments: dict[str, Any]) -> list[dict]:
    """Plain PyTorch on the GPU."""
    return plain_pytorch(model, device=GPU, **arguments)


def run(pool: ProcessPool, case: Case) -> dict[str, Any]:
    """Train ``case`` and compare it with plain PyTorch on the same GPU and, in float32, that with the CPU."""
    model = case.model
    plan = case.make()
    ranks = pool.run(plan.ranks, partial(run_rank, device=GPU), model, plan, case.optimizer)
    arguments: dict[str, Any] = {
        "micro_batch_size": grid.SAMPLES,
        "optimizer": case.optimizer,
        "global_batch": plan.global_batch,
        "seed": plan.seed,
    }
    if "@" in model:  # in low precision, each iteration begins with the weights of our run (test_precision.py)
        arguments["after"] = parameters_after(ranks)
    [expected] = pool.run(1, reference, model, arguments)
    found: dict[str, Any] = {"losses": [step["loss"] for step in expected]}
    if not plan.shard_optimizer:  # with it, a rank has the sums of its slice only
        found["error"] = error_of_ranks(ranks, expected)
    try:
        assert_parity(ranks, expected, tensors=case.optimizer is SGD)
        found["verdict"] = "right"
    except AssertionError as difference:
        found |= {"verdict": "wrong", "note": str(difference)}
    if "dropout" not in model and "@" not in model:  # the CPU draws other numbers
        on_cpu = plain_pytorch(model, **arguments)
        found["loss differs from the CPU's by"] = max(
            abs(a["loss"] / b["loss"] - 1) for a, b in zip(expected, on_cpu, strict=True)
        )
    return found


def record(pool: ProcessPool, case: Case) -> dict[str, Any]:
    return {"case": case.name, "model": case.model, "ranks": case.ranks} | timed(lambda: run(pool, case))


@click.command()
@click.argument("file", type=click.File("a"))
@click.option("--seconds", type=float, default=float("inf"), help="Begin no case after these seconds.")
@click.option("--of", type=(int, int), default=(0, 1), metavar="K N", help="Every Nth case, from number K on.")
@click.option("--ranks", type=int, default=8, show_default=True, help="The largest number of ranks.")
def main(file: TextIO, seconds: float, of: tuple[int, int], ranks: int) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with ProcessPool(ranks, start="spawn", begin=begin_on_own_host) as pool:
        chosen = [case for case in cases() if case.ranks <= ranks][of[0] :: of[1]]
        sys.exit(not all_right((record(pool, case) for case in chosen), file, seconds))


if __name__ == "__main__":
    main()
