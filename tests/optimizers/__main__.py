"""Try all optimizer classes of some packages: python -m tests.optimizers [--only PATTERN] [--write] (20 minutes)

Each trains a small LLaMA under several plans, and goes on from a checkpoint under another one. What comes is compared
with the same class in a plain loop on one process. The packages are the extra `optimizers` of the project.

Exits with 1 if a class gives wrong numbers or crashes.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tabulate import tabulate
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.checkpoint.format import Checkpoints
from auto3d.runtime.optimizer.classes import averages, check_resumes, is_elementwise, traits_of
from auto3d.runtime.process.world import World
from auto3d.runtime.settings import OptimizerSettings, ParameterGroup, TrainingSettings
from auto3d.runtime.training import train
from auto3d.schedule import samples_at_once
from tests.distributed.parity import CLIP_NORM, make_plan, plain_pytorch, run_rank
from tests.distributed.test_checkpoint import tensors
from tests.models import TRAINED, captured
from tests.processes import ProcessPool

PACKAGES = {  # module -> the package that has it
    "torch.optim": "torch",
    "transformers.optimization": "transformers",
    "pytorch_optimizer": "pytorch_optimizer",
    "torch_optimizer": "torch_optimizer",
    "lion_pytorch": "lion-pytorch",
    "prodigyopt": "prodigyopt",
    "schedulefree": "schedulefree",
    "came_pytorch": "came-pytorch",
    "adan_pytorch": "adan-pytorch",
    "madgrad": "madgrad",
    "dadaptation": "dadaptation",
    "pytorch_ranger": "pytorch_ranger",
}
FILE = Path(__file__).resolve().parents[2] / "results/optimizers.md"
MODEL = "llama-grouped-query"  # without biases: the gradients of those of keys are rounding alone
ITERATIONS, ENDS_AFTER = 4, 2
RATE = 1e-3
NOISE = 1e-5  # smaller gradients, beside the largest one, may be rounding alone, of which some classes take the sign
ROUNDING = 3e-7  # relative changes of the gradients of other plain loops, as another order of sums makes them
OTHERS = 3  # number of these loops
BOUND = 0.001  # allowed difference, as a fraction of the largest update of a parameter
OUTSIDE = 0.001  # fraction of elements that may differ more: a quantised state may move to its next step
FACTOR = 4  # allowed difference, in what rounding changes at most: much where a class computes in bfloat16
PLANS = {
    "dp 2 × pp 2": lambda: make_plan(MODEL, dp=2, pp=2),
    "ZeRO-1, dp 4": lambda: make_plan(MODEL, dp=4, pp=1, shard_optimizer=True),
    "tp 2 × pp 2": lambda: make_plan(MODEL, dp=1, pp=2, tp=2),
}
RESUMED = "resumed, pp 4"
RUNS, REFUSED, WRONG, CRASHES = "runs", "refused", "wrong", "crashes"

TEXT = """# Classes of optimizers

Made by `python -m tests.optimizers --write`, measured on CPUs. Each class that these packages export ({packages})
trains a small LLaMA for {iterations} iterations under each plan, and goes on under another plan from a checkpoint after
{ends_after} of them, written under ZeRO-1 where the class allows it. It runs if all weights are those that the same
class gives in a plain loop on one process; in a checkpoint those of evaluation, where it has others. They may differ by
{bound:.1%} of the largest update of a weight and {factor} times of what changes at most there, in {others} loops, if
its gradients change by {rounding:g}; {outside:.1%} of the elements of a weight may differ by more. Elements whose
gradient is below {noise:g} of the largest one are left out: some classes take the sign of what is nothing but rounding.
A class that updates matrices only has them, and AdamW has the rest.

{classes} classes: {run} run, {everywhere} of them under every plan; {refused} are refused before a training.

{table}

## Why classes are refused

{reasons}

{names}
"""


@dataclass(kw_only=True)
class Tried:
    """A class, and what came of it."""

    name: str
    refusal: str = ""  # why it is refused whatever the plan
    results: dict[str, str] = field(default_factory=dict)  # plan -> RUNS, WRONG, CRASHES, or why it is refused there

    @property
    def faults(self) -> list[str]:
        return [plan for plan, result in self.results.items() if result.startswith((WRONG, CRASHES))]


def classes() -> Iterator[str]:
    """The import path of each class of optimizers of PACKAGES, once."""
    seen: set[type] = {torch.optim.Optimizer}
    for module in map(import_module, PACKAGES):
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind not in seen:
                seen.add(kind)
                yield f"{module.__name__}:{name}"


def settings_of(name: str) -> OptimizerSettings:
    """The class for all parameters, or for the matrices if it updates nothing else, and AdamW for the others."""
    alone = OptimizerSettings(optimizer=name, learning_rate=RATE, clip_norm=CLIP_NORM)
    if 1 in traits_of(alone).dimensions:
        return alone
    return replace(alone, optimizer="adamw", groups=(ParameterGroup(dimensions=2, optimizer=name),))


def in_a_plain_loop(name: str, settings: OptimizerSettings, module: nn.Module) -> list[tuple]:
    """The class as a script on one process makes it."""
    module_name, _, class_name = name.partition(":")
    kind = getattr(import_module(module_name), class_name)
    options = {"weight_decay": 0.0} if "weight_decay" in signature(kind).parameters else {}
    parameters = list(module.parameters())
    if not settings.groups:
        return [_constant(_in_training(kind(parameters, lr=RATE, **options)))]
    matrices, others = ([each for each in parameters if (each.dim() == 2) is wanted] for wanted in (True, False))
    adamw = torch.optim.AdamW(others, lr=RATE, weight_decay=0.0)
    return [_constant(_in_training(kind(matrices, lr=RATE, **options))), _constant(adamw)]


def _in_training(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if averages(type(optimizer)):
        optimizer.train()
    return optimizer


def _constant(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, LRScheduler]:
    return optimizer, LambdaLR(optimizer, lambda _: 1.0)


class Expected:
    """The parameters at the end of the plain loop, and how far others may be from them."""

    def __init__(self, name: str, settings: OptimizerSettings) -> None:
        (history, evaluated), *loops = (self._history(name, settings, seed) for seed in range(1 + OTHERS))
        others = [each for each, _ in loops]
        self._last: Mapping[str, np.ndarray] = history[-1]["parameters"]
        self._evaluated = evaluated
        self.names = self._last.keys()
        first = history[0]["parameters"]
        self._bound = {
            name: BOUND * abs(last - first[name]).max()
            + FACTOR * max(abs(last - other[-1]["parameters"][name]).max() for other in others)
            + 1e-6
            for name, last in self._last.items()
        }
        largest = max(abs(gradient).max() for gradient in history[0]["gradients"].values())
        self._counts = {
            name: np.all([abs(one["gradients"][name]) > NOISE * largest for one in history], axis=0) for name in first
        }

    @staticmethod
    def _history(name: str, settings: OptimizerSettings, seed: int) -> tuple[list[dict], dict[str, np.ndarray]]:
        """A plain loop, and its last weights as an evaluation has them.

        With a ``seed`` other than 0, its gradients are rounded at random.
        """
        loop: dict[str, Any] = {}
        random = torch.Generator().manual_seed(seed)
        rounding = ROUNDING if seed else 0.0

        def change(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                parameter.grad.mul_(1 + rounding * torch.randn(parameter.shape, generator=random))

        def make(module: nn.Module) -> list[tuple]:
            made = in_a_plain_loop(name, settings, module)
            loop.update(module=module, optimizers=[optimizer for optimizer, _ in made])
            for optimizer, _ in made:
                optimizer.register_step_pre_hook(change)
            return made

        torch.manual_seed(0)
        history = plain_pytorch(MODEL, micro_batch_size=2, optimizer=settings, iterations=ITERATIONS, optimizers=make)
        for optimizer in loop["optimizers"]:
            if averages(type(optimizer)):
                optimizer.eval()
        return history, {name: each.detach().numpy().copy() for name, each in loop["module"].named_parameters()}

    def differs(self, name: str, found: np.ndarray, shard=None, *, evaluated: bool = False) -> bool:
        last, counts = (self._evaluated if evaluated else self._last)[name], self._counts[name]
        if shard is not None:
            last, counts = (shard.of(torch.from_numpy(each)).numpy() for each in (last, counts))
        outside = (abs(found - last)[counts] > self._bound[name]).sum()
        return bool(outside > OUTSIDE * found.size) or not np.isfinite(found).all()


def saved(world: World, plan: Plan, settings: OptimizerSettings, folder: Path, iterations: int) -> None:
    """Train as one rank, from the newest checkpoint in ``folder``; writes one at the end."""
    how = TrainingSettings(iterations=iterations, optimizer=settings, device="cpu", threads_per_rank=1, timeout_s=60)
    checkpoints = Checkpoints(folder=folder, every=iterations)
    train(captured(MODEL, samples_at_once(plan)), plan, how, TRAINED[MODEL][1], world, checkpoints=checkpoints)


def tried(pool: ProcessPool, name: str) -> Tried:
    """Compare the class ``name`` with a plain loop, under each plan."""
    one = Tried(name=name)
    try:
        settings = settings_of(name)
        elementwise = is_elementwise(OptimizerSettings(optimizer=name, learning_rate=RATE, clip_norm=CLIP_NORM))
    except InputError as error:
        one.refusal = str(error)
        return one
    try:
        expected = Expected(name, settings)
    except Exception as error:  # the class may fail on a whole model on one process, too
        one.refusal = f"it fails in a plain loop: {str(error).splitlines()[0]}"
        return one
    for what, make in PLANS.items():
        plan = make()
        if not elementwise and (plan.shard_optimizer or plan.tp > 1):
            one.results[what] = "it combines the elements of a weight"
            continue
        with _Noting(one, what):
            for rank in pool.run(plan.ranks, run_rank, MODEL, plan, settings, None, None, ITERATIONS):
                for parameter, found in rank["history"][-1]["parameters"].items():
                    if expected.differs(parameter, found, rank["shards"].get(parameter)):
                        one.results[what] = f"{WRONG}: {parameter}"
    try:
        check_resumes([OptimizerSettings(optimizer=name, learning_rate=RATE, clip_norm=CLIP_NORM)])
    except InputError as error:
        one.results[RESUMED] = str(error)
        return one
    with tempfile.TemporaryDirectory() as temporary, _Noting(one, RESUMED):
        folder = Path(temporary)
        first = PLANS["ZeRO-1, dp 4" if elementwise else "dp 2 × pp 2"]()
        pool.run(4, saved, first, settings, folder, ENDS_AFTER)
        pool.run(4, saved, make_plan(MODEL, dp=1, pp=4), settings, folder, ITERATIONS)
        for stored, tensor in tensors(folder, ITERATIONS).items():
            parameter = stored.removeprefix("model.")
            if parameter in expected.names and expected.differs(parameter, tensor.numpy(), evaluated=True):
                one.results[RESUMED] = f"{WRONG}: {parameter}"
    return one


class _Noting:
    """Note that what is inside runs, unless it says otherwise or raises."""

    def __init__(self, one: Tried, what: str) -> None:
        self._one, self._what = one, what

    def __enter__(self) -> None:
        self._one.results[self._what] = RUNS

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, AssertionError):  # the pool raises it, and its last line says what a rank met
            self._one.results[self._what] = f"{CRASHES}: {str(error).strip().splitlines()[-1]}"
        return isinstance(error, AssertionError)


def report(found: list[Tried]) -> str:
    """The page."""
    run = [one for one in found if one.results]
    plans = [*PLANS, RESUMED]
    rows = [[one.name.replace(":", "."), *(_short(one.results[plan]) for plan in plans)] for one in run]
    reasons = Counter(_reason(one) for one in found if one.refusal)
    names = [[one.name.replace(":", "."), one.refusal] for one in found if one.refusal]
    packages = ", ".join(f"{package} {version(package)}" for package in PACKAGES.values())
    everywhere = sum(all(result == RUNS for result in one.results.values()) for one in run)
    return TEXT.format(
        packages=packages,
        iterations=ITERATIONS,
        ends_after=ENDS_AFTER,
        bound=BOUND,
        factor=FACTOR,
        outside=OUTSIDE,
        rounding=ROUNDING,
        others=OTHERS,
        noise=NOISE,
        classes=len(found),
        run=len(run),
        everywhere=everywhere,
        refused=len(names),
        table=tabulate(rows, headers=["class", *plans], tablefmt="github"),
        reasons=tabulate(reasons.most_common(), headers=["reason", "classes"], tablefmt="github"),
        names=tabulate(names, headers=["class", "message"], tablefmt="github"),
    )


def _short(result: str) -> str:
    return result if result == RUNS or result.startswith((WRONG, CRASHES)) else REFUSED


def _reason(one: Tried) -> str:
    """The refusal without what belongs to the class alone."""
    text = one.refusal.replace(one.name, "it")
    if text.startswith("optimizer"):
        text = text.partition(": ")[2]
    return re.sub(r" \(.*?\)", "", text.partition(";")[0].partition(": ")[0])


@click.command()
@click.option("--only", default="", help="Regular expression of the import paths to try.")
@click.option("--write", is_flag=True, help=f"Write {FILE}.")
def main(only: str, write: bool) -> None:
    """Train with the optimizer classes of several packages, and compare them with plain loops."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # before anything runs: the pool forks this process
    for make in PLANS.values():
        captured(MODEL, samples_at_once(make()))
    found = []
    with ProcessPool(4) as pool:
        for name in classes():
            if re.search(only, name):
                found.append(tried(pool, name))
                results = ", ".join(f"{plan}: {_short(result)}" for plan, result in found[-1].results.items())
                print(f"{name}: {found[-1].refusal or results}", flush=True)
    faults = [one.name for one in found if one.faults]
    print(f"{len(found)} classes; {sum(bool(one.results) for one in found)} run; faults: {', '.join(faults) or 'none'}")
    if write:
        FILE.write_text(report(found))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
