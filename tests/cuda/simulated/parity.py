"""Trains plans on the simulated CUDA and compares them with the CPU; plants faults, which must be found.

Each plan runs on ranks with a simulated GPU each, and again on CPUs: losses, norms, gradients, parameters and buffers
of every iteration must agree to 1e-5, and a line says whether they are equal in bits. They are compared with plain
PyTorch, too: on a CPU in float32, and in low precision on a simulated GPU, whose rules of autocast are others.
"""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["AUTO3D_TEST_DEVICE"] = "cuda"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # until a process has been forked from this one

import click
import numpy as np
import torch
import transformers

from auto3d.plan import SUB_PIPELINED
from auto3d.runtime.process.arithmetic import set_arithmetic
from auto3d.runtime.process.gpu_environment import set_gpu_environment
from auto3d.runtime.process.world import World
from auto3d.runtime.settings import OptimizerSettings
from tests import models
from tests.cuda.simulated import faults
from tests.distributed import grid
from tests.distributed.parity import ADAMW, SGD, assert_parity, make_plan, parameters_after, plain_pytorch, run_rank
from tests.processes import ProcessPool


@dataclass(frozen=True)
class Case:
    """A plan, by the arguments of ``make_plan``."""

    name: str
    model: str
    axes: tuple[tuple[str, Any], ...]
    optimizer: OptimizerSettings = SGD

    @property
    def plan(self) -> dict[str, Any]:
        return {"dp": 1, "pp": 1, "tp": 1} | dict(self.axes)

    @property
    def ranks(self) -> int:
        return self.plan["dp"] * self.plan["pp"] * self.plan["tp"]


def case(name: str, model: str, optimizer: OptimizerSettings = SGD, **axes: Any) -> Case:
    return Case(name, model, tuple(axes.items()), optimizer)


CASES = (
    case("one rank", "gpt2-dropout"),
    case("1f1b", "gpt2-dropout", pp=2),
    case("data", "gpt2-dropout", dp=2),
    case("tensor", "gpt2-4-heads", tp=2),
    case("AdamW", "gpt2", ADAMW, pp=2),
    case("sequence", "llama-grouped-query", tp=2, sequence_parallel=True),
    case("sub-pipelined", "gpt2-4-heads", tp=2, tensor_overlap=SUB_PIPELINED),
    case("ZeRO-1", "gpt2", ADAMW, dp=2, shard_optimizer=True),
    case("zero bubble", "t5-dropout", pp=2, schedule="zb-h1"),
    case("chimera", "bert-dropout", pp=2, schedule="chimera"),
    case("interleaved", "gpt2-dropout", pp=2, schedule="interleaved-1f1b"),
    case("recomputed", "vit-dropout", pp=2, options={"recompute": "full"}),
    case("bfloat16", "gpt2-dropout@bfloat16", pp=2),
    case("bfloat16, recomputed", "t5@bfloat16", pp=2, options={"recompute": "full"}),
    case("bfloat16, ZeRO-1", "gpt2@bfloat16", dp=2, shard_optimizer=True),
    case("data, tensor and pipeline", "gpt2-4-heads", dp=2, pp=2, tp=2, sequence_parallel=True),
)


def begin_on_device(rank: int, *, fault: str = "") -> None:
    """Prepare a process that will use a simulated GPU, with ``fault`` of ``faults.IN_THE_ENGINE`` planted, if any."""
    if fault:
        of, method, replacement, _ = faults.IN_THE_ENGINE[fault]
        setattr(of, method, replacement)
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    set_gpu_environment()
    set_arithmetic(torch.device("cuda"), tf32=False, deterministic=True)


def begin_on_cpu(rank: int) -> None:
    models.DEVICE = "cpu"


def train(world: World, of: Case, *, on_device: bool) -> list[dict]:
    """What the runtime gives for ``of`` on this rank."""
    device = torch.device("cuda", world.rank) if on_device else torch.device("cpu")
    trained = run_rank(world, of.model, make_plan(of.model, **of.plan), of.optimizer, device=device)
    if on_device and (folder := os.environ.get("SIMULATED_CUDA_OPERATORS")):
        import_module("simulated_cuda").write_operators(f"{folder}/{os.getpid()}.txt")
    return trained


def reference(world: World, of: Case, device: torch.device, after: list[dict[str, np.ndarray]]) -> list[dict]:
    """Plain PyTorch on ``device``, whose iterations begin with the parameters ``after`` the last, if there are any."""
    options: dict[str, Any] = {"micro_batch_size": grid.SAMPLES, "optimizer": of.optimizer}
    return plain_pytorch(of.model, device=device, after=after, **options)


def difference(ours: list[dict], theirs: list[dict]) -> float:
    """The largest difference of two runs, of each tensor relative to its largest element; 0 if all bits are equal."""
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        for one, other in zip(a["history"], b["history"], strict=True):
            pairs = [(np.float64(one["result"].loss), np.float64(other["result"].loss))]
            pairs.append((np.float64(one["result"].grad_norm), np.float64(other["result"].grad_norm)))
            for kind in ("gradients", "parameters", "buffers"):
                assert one[kind].keys() == other[kind].keys(), f"other {kind}"
                pairs += [(one[kind][name], other[kind][name]) for name in one[kind]]
            for x, y in pairs:
                if not np.array_equal(x, y):
                    relative = float(np.abs(x - y).max() / (np.abs(y).max() + 1e-2))
                    largest = max(largest, np.inf if np.isnan(relative) else relative)
    return largest


def run(of: Case, devices: ProcessPool, cpus: ProcessPool) -> tuple[bool, str]:
    """Whether the numbers of ``of`` are right, and in which way."""
    ours = devices.run(of.ranks, partial(train, on_device=True), of)
    theirs = cpus.run(of.ranks, partial(train, on_device=False), of)
    losses = ", ".join(f"{step['result'].loss:.6f}" for step in ours[0]["history"])
    found = difference(ours, theirs)
    equal = "equal in bits to the CPU runtime" if found == 0 else f"differs from the CPU runtime by {found:.1e}"
    text = f"{equal}; losses {losses}"
    low_precision = "@" in of.model  # whose rules of autocast differ between CPUs and GPUs
    if low_precision:
        [expected] = devices.run(1, reference, of, torch.device("cuda", 0), parameters_after(ours))
    else:
        [expected] = cpus.run(1, reference, of, torch.device("cpu"), [])
    try:
        assert_parity(ours, expected, tensors=of.optimizer is SGD)
    except AssertionError as wrong:
        return False, f"{text}; differs from plain PyTorch: {wrong}"
    return low_precision or found < 1e-5, text


def report(of: Case, devices: ProcessPool, cpus: ProcessPool) -> bool:
    """Print what ``run`` finds; returns whether it is right."""
    begun = time.monotonic()
    try:
        right, text = run(of, devices, cpus)
    except AssertionError as error:
        right, text = False, f"failed: {error}"
    axes = ", ".join(f"{name} {value}" for name, value in of.axes) or "one rank"
    verdict = "right" if right else "WRONG"
    print(f"{verdict}: {of.name} ({of.model}, {axes}): {text} ({time.monotonic() - begun:.0f} s)", flush=True)
    return right


def found_in_streams(devices: ProcessPool) -> Iterator[bool]:
    """Print, and return, whether each fault of a program of streams and sums is found."""
    [streams] = devices.run(1, faults.of_streams)
    for name, (right_without, right_with) in streams.items():
        found = right_without and not right_with
        print(f"{'found' if found else 'MISSED'}: {name}", flush=True)
        yield found
    sums = devices.run(2, faults.of_sums, (3, 3))
    right = sums == [9.0, 9.0]
    try:
        devices.run(2, faults.of_sums, (3, 4))
        right = False
    except AssertionError:
        pass  # NCCL has ended the processes and named both
    print(f"{'found' if right else 'MISSED'}: a sum of different numbers of elements", flush=True)
    yield right


def found_in_engine(fault: str, cpus: ProcessPool) -> bool:
    """Print, and return, whether parity shows ``fault``, which is planted in the engine."""
    [of] = [each for each in CASES if each.name == faults.IN_THE_ENGINE[fault][-1]]
    with ProcessPool(of.ranks, begin=partial(begin_on_device, fault=fault)) as devices:
        try:
            right, text = run(of, devices, cpus)
        except AssertionError as error:  # a rank has ended, or hangs: no wrong number has been seen
            right, text = True, str(error).strip().splitlines()[-1]
    print(f"{'MISSED' if right else 'found'}: {fault} ({of.name}): {text}", flush=True)
    return not right


@click.command()
@click.argument("names", nargs=-1)
@click.option("--ranks", type=int, default=2, show_default=True, help="The largest number of ranks.")
@click.option("--plant/--no-plant", default=True, show_default=True, help="Whether faults are planted.")
def main(names: tuple[str, ...], ranks: int, plant: bool) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    chosen = [each for each in CASES if each.ranks <= ranks and (not names or each.name in names)]
    # This process runs no backward and captures nothing, so that what is forked from it can use CUDA.
    with ProcessPool(ranks, begin=begin_on_device) as devices, ProcessPool(ranks, begin=begin_on_cpu) as cpus:
        right = [report(each, devices, cpus) for each in chosen]
        if plant:
            right += found_in_streams(devices)
            right += [found_in_engine(fault, cpus) for fault in faults.IN_THE_ENGINE]
    print(f"{sum(right)} of {len(right)} are as they should be")
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
