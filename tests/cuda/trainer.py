"""Compares auto3d's Trainer with transformers' on a GPU: python -m tests.cuda.trainer FILE (root's rights)

It appends a line per script and plan, in JSON, to FILE. The exit code is 1 if a script is wrong or fails.
"""

import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["AUTO3D_TEST_DEVICE"] = "cuda"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # hides the GPU from this process

import click
import torch
import transformers

from auto3d import Trainer, TrainingArguments
from auto3d.runtime.process.world import World
from tests.cuda.one_gpu import begin_on_own_host
from tests.cuda.records import all_right, timed
from tests.processes import ProcessPool
from tests.trainer import small, test_optimizers
from tests.trainer.scripts import begin, free_port

OURS = (Trainer, TrainingArguments)
THEIRS = (transformers.Trainer, transformers.TrainingArguments)
KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_mean", "eval_seen")
TOLERANCE, IN_BFLOAT16 = 1e-4, 0.02  # relative differences


@dataclass(frozen=True)
class Script:
    name: str
    make: Callable[..., transformers.Trainer]  # takes the two classes, then arguments of a TrainingArguments

    @property
    def tolerance(self) -> float:
        return IN_BFLOAT16 if "bfloat16" in self.name else TOLERANCE


def of_model(name: str, *classes: type, **options: Any) -> transformers.Trainer:
    [(_, trainer)] = small.trainers(partial(small.trainer, classes=classes), [name], **options)
    return trainer


def of_model_in_bfloat16(name: str, *classes: type, **options: Any) -> transformers.Trainer:
    return of_model(name, *classes, bf16=True, **options)


def live(name: str, *classes: type, **options: Any) -> transformers.Trainer:
    return small.live(partial(small.trainer, classes=classes), name, **options)


def scripts() -> list[Script]:
    kinds: tuple[tuple[Any, Callable[..., transformers.Trainer]], ...] = (
        (small.MODELS, of_model),
        (small.OWN_LOSSES, small.with_own_loss),
        (test_optimizers.SCRIPTS, test_optimizers.made),
        (small.LIVE, live),
    )
    found = [Script(name, partial(make, name)) for names, make in kinds for name in names]
    return found + [Script(f"{name}, bfloat16", partial(of_model_in_bfloat16, name)) for name in ("a count", "experts")]


def train(
    world: World, script: Script, folder: str, port: int | None, *, use_cpu: bool = False, **degrees: int
) -> list[float]:
    """The numbers of its log, in transformers' Trainer if ``degrees`` is empty."""
    begin(world, Path(folder), port, ours=bool(degrees), **degrees)
    classes = OURS if degrees else THEIRS
    trainer = script.make(*classes, use_cpu=use_cpu, gradient_accumulation_steps=4 // degrees.get("dp", 1))
    assert trainer.args.device.type == ("cpu" if use_cpu else "cuda")
    with redirect_stdout(StringIO()):  # its log is returned
        trainer.train()
    return [entry[key] for entry in trainer.state.log_history for key in KEYS if key in entry]


def run(pool: ProcessPool, script: Script, degrees: dict[str, int], cpus: ProcessPool | None = None) -> dict[str, Any]:
    """Compare the Trainers; transformers' runs on ``cpus``, if they are given."""
    with TemporaryDirectory() as folder:
        [expected] = (cpus or pool).run(1, partial(train, use_cpu=cpus is not None), script, folder, None)
        ranks = pool.run(prod(degrees.values()), partial(train, **degrees), script, folder, free_port())
    if any(len(found) != len(expected) for found in ranks):
        return {"verdict": "wrong", "note": f"{len(expected)} numbers in its log; {[len(found) for found in ranks]}"}
    error = max(
        abs(found - right) / max(abs(right), 1e-12)
        for numbers in ranks
        for found, right in zip(numbers, expected, strict=True)
    )
    return {"verdict": "right" if error <= script.tolerance else "wrong", "error": error}


def record(pool: ProcessPool, script: Script, degrees: dict[str, int]) -> dict[str, Any]:
    known = {"case": script.name, "plan": ", ".join(f"{name} {degree}" for name, degree in degrees.items())}
    return known | timed(lambda: run(pool, script, degrees))


@click.command()
@click.argument("file", type=click.File("a"))
@click.option("--seconds", type=float, default=float("inf"), help="Begin no script after these seconds.")
@click.option("--of", type=(int, int), default=(0, 1), metavar="K N", help="Every Nth script, from number K on.")
@click.option("--degree", "degrees", type=(str, int), multiple=True, default=(("pp", 2),), metavar="NAME NUMBER")
def main(file: TextIO, seconds: float, of: tuple[int, int], degrees: tuple[tuple[str, int], ...]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    begin_rank = partial(begin_on_own_host, deterministic=False)  # cross entropy of an image's places has no other way
    with ProcessPool(prod(dict(degrees).values()), start="spawn", begin=begin_rank) as pool:
        records = (record(pool, script, dict(degrees)) for script in scripts()[of[0] :: of[1]])
        sys.exit(not all_right(records, file, seconds))


if __name__ == "__main__":
    main()
