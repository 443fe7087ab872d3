"""Trains plans on the simulated CUDA and compares them with the CPU; plants faults, which must be found.

Each plan runs on ranks with a simulated GPU each, and again on CPUs: losses, norms, gradients, parameters and buffers
of every iteration must agree to 1e-5, and a line says whether they are equal in bits. They are compared with plain
PyTorch, too: on a CPU in float32, and in low precision on a simulated GPU, whose rules of autocast are others: the CPU
runtime then has the program that was captured for the GPU. CPU ranks add as the simulated NCCL does (ordered_sums.py).
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["AUTO3D_TEST_DEVICE"] = "cuda"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # until a process has been forked from this one

import click
import numpy as np
import torch
import transformers

from auto3d.plan import SUB_PIPELINED, Plan
from auto3d.runtime.checkpoint.format import Checkpoints
from auto3d.runtime.evaluation.run import evaluate
from auto3d.runtime.process.arithmetic import set_arithmetic
from auto3d.runtime.process.gpu_environment import set_gpu_environment
from auto3d.runtime.process.world import World
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.runtime.training import Training
from auto3d.schedule import samples_at_once
from tests import models
from tests.cuda import trainer
from tests.cuda.simulated import faults, graphs
from tests.cuda.simulated.ordered_sums import order_sums
from tests.distributed import test_uneven
from tests.distributed.parity import ADAMW, SGD, assert_parity, make_plan, parameters_after, plain_pytorch, run_rank
from tests.distributed.parity_report import error_of_ranks, gradient_error
from tests.processes import ProcessPool


@dataclass(frozen=True)
class Case:
    """A model, the plan that ``make`` makes for it, and what is said of that: its degrees, and others of its axes."""

    name: str
    model: str
    axes: tuple[tuple[str, Any], ...]
    make: Callable[[], Plan]
    optimizer: OptimizerSettings = SGD

    @property
    def ranks(self) -> int:
        axes = dict(self.axes)
        return axes.get("dp", 1) * axes.get("tp", 1) * sum(axes.get("replicas", (axes.get("pp", 1),)))

    @property
    def low_precision(self) -> bool:
        """Whether autocast is on, whose rules differ between CPUs and GPUs."""
        return "@" in self.model

    @property
    def allowed(self) -> float:
        """The largest difference from the CPU runtime, relative to the largest element of each tensor."""
        return ALLOWED_IN_LOW_PRECISION if self.low_precision and self.model.startswith("t5") else ALLOWED


def case(name: str, model: str, optimizer: OptimizerSettings = SGD, **axes: Any) -> Case:
    """A plan by the arguments of ``make_plan``; of stages with different numbers of ``replicas``, if there are any."""
    if "replicas" in axes:
        make = partial(test_uneven.make_plan, model, **axes)
    else:
        make = partial(make_plan, model, **({"dp": 1, "pp": 1} | axes))
    return Case(name, model, tuple(axes.items()), make, optimizer)


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
    case("slices", "gpt2-4-heads-dropout", pp=2, schedule="seq1f1b", options={"slices": 2}),
    case("uneven replicas", "gpt2", replicas=[2, 1]),
    case("bfloat16", "gpt2-dropout@bfloat16", pp=2),
    case("bfloat16, recomputed", "t5@bfloat16", pp=2, options={"recompute": "full"}),
    case("bfloat16, ZeRO-1", "gpt2@bfloat16", dp=2, shard_optimizer=True),
    case("bfloat16, sequence", "llama-grouped-query@bfloat16", tp=2, sequence_parallel=True),
    case("bfloat16, tensor", "gpt2-4-heads@bfloat16", tp=2),
    case("data, tensor and pipeline", "gpt2-4-heads", dp=2, pp=2, tp=2, sequence_parallel=True),
)

ALLOWED = 1e-5  # difference from the CPU runtime, relative to the largest element of each tensor
# In bfloat16, 8 roundings of 2^-8. It is for plain PyTorch where sums over tensor-parallel ranks round, and for the CPU
# runtime of T5: a GPU rounds the gradient of attention's bias for each sample before it adds, a CPU their sum, and a
# weight that differs in its last bit may round to another copy in the next iteration.
ALLOWED_IN_LOW_PRECISION = 2**-5
# The error of tensor-parallel gradients in low precision from plain PyTorch in float32, in times of that of plain
# PyTorch in low precision: a product that is split rounds its parts and their sum, where the whole product rounds once.
ALLOWED_FROM_FLOAT32 = 2
EVALUATED = case("evaluated", "gpt2-4-heads-dropout", ADAMW, tp=2)
SCRIPT = case("Trainer", "a count", pp=2)
GRAPH = case("CUDA graph", "two layers")
Run = Callable[[Case, ProcessPool, ProcessPool], tuple[bool, str]]


def begin_on_device(rank: int, *, fault: str = "") -> None:
    """Prepare a process that will use a simulated GPU, with ``fault`` of ``faults.IN_THE_ENGINE`` planted, if any."""
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    faults.refuse_host_reads()
    if fault:
        os.environ["SIMULATED_NCCL_DELAY_US"] = "20000"  # what does not wait for NCCL is earlier
        of, method, replacement, _ = faults.IN_THE_ENGINE[fault]
        setattr(of, method, replacement)
    set_gpu_environment()
    set_arithmetic(torch.device("cuda"), tf32=False, deterministic=True)


def begin_on_cpu(rank: int) -> None:
    models.DEVICE = "cpu"
    order_sums()


@contextmanager
def device_of(world: World, *, on_device: bool) -> Iterator[torch.device]:
    """The device of this rank, which a capture inside uses, too; at the end no thread may have used another GPU."""
    if not on_device:
        yield torch.device("cpu")
        return
    device = torch.device("cuda", world.rank)
    torch.cuda.set_device(device)
    yield device
    has_context = ctypes.CDLL(None).simulated_has_context
    other = [each for each in range(torch.cuda.device_count()) if has_context(each) and each != device.index]
    assert not other, f"rank {world.rank} {faults.OTHER_CONTEXT} {other}"


def train(world: World, of: Case, *, on_device: bool) -> list[dict]:
    """What the runtime gives for ``of`` on this rank."""
    models.DEVICE = "cuda" if on_device or of.low_precision else "cpu"  # a CPU finds the GPU's programs stored
    with device_of(world, on_device=on_device) as device:
        return run_rank(world, of.model, of.make(), of.optimizer, device=device)


def evaluated(world: World, of: Case, folder: Path, *, on_device: bool) -> dict[str, np.ndarray]:
    """The losses of a training that evaluates between its iterations, the results of that, and the last state.

    It writes checkpoints into a subfolder of ``folder``.
    """
    with device_of(world, on_device=on_device) as device:
        plan, data = of.make(), models.TRAINED[of.model][1]
        settings = TrainingSettings(
            iterations=2,
            optimizer=of.optimizer,
            device=device.type,
            threads_per_rank=1,
            timeout_s=60,
        )
        checkpoints = Checkpoints(folder=folder / device.type, every=1)
        model = models.captured(of.model, samples_at_once(plan))
        training = Training(model, plan, settings, data, world, checkpoints=checkpoints)
        found: dict[str, np.ndarray] = {}
        for number, result in training.iterations():
            found[f"loss {number}"] = np.array(result.loss)
            if number == 0:
                of_evaluation = evaluate(training, data, samples=plan.global_batch, outputs=("logits",))
                found["losses of the evaluation"] = np.array(of_evaluation.losses)
                found |= {name: tensor.numpy() for name, tensor in of_evaluation.outputs.items()}
        training.result()  # waits until the last checkpoint is complete
        return found | {name: part.tensor.detach().cpu().numpy() for name, part in training.rank.state().items()}


def reference(world: World, of: Case, device: torch.device, after: list[dict[str, np.ndarray]]) -> list[dict]:
    """Plain PyTorch on ``device``, whose iterations begin with the parameters ``after`` the last, if there are any.

    Autocast keeps no copies of weights: it would add the gradients of all uses of a copy in low precision.
    """
    plan = of.make()
    options = {"micro_batch_size": samples_at_once(plan), "global_batch": plan.global_batch, "optimizer": of.optimizer}
    torch.set_autocast_cache_enabled(False)
    try:
        return plain_pytorch(of.model, device=device, after=after, **options)
    finally:
        torch.set_autocast_cache_enabled(True)


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
            largest = max(largest, *(relative_difference(x, y) for x, y in pairs))
    return largest


def largest_difference(ours: list[dict[str, np.ndarray]], theirs: list[dict[str, np.ndarray]]) -> float:
    """The same of all arrays in dictionaries."""
    return max(
        relative_difference(mine[name], values[name])
        for mine, values in zip(ours, theirs, strict=True)
        for name in mine.keys() | values.keys()
    )


def relative_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    if np.array_equal(ours, theirs):
        return 0.0
    relative = float(np.abs(ours - theirs).max() / (np.abs(theirs).max() + 1e-2))
    return np.inf if np.isnan(relative) else relative


def against_cpu(of: Case, ours: list[dict], cpus: ProcessPool) -> tuple[float, str]:
    """The largest difference between what ranks on simulated GPUs found and the same ranks on CPUs, and its words."""
    theirs = cpus.run(of.ranks, partial(train, on_device=False), of)
    losses = ", ".join(f"{step['result'].loss:.6f}" for step in ours[0]["history"])
    found = difference(ours, theirs)
    return found, f"{in_words(found)}; losses {losses}"


def against_plain(
    of: Case, ours: list[dict], devices: ProcessPool, cpus: ProcessPool, figures: dict[str, float] | None = None
) -> str:
    """How ``ours`` differs from plain PyTorch; empty if it does not. Adds the largest errors to ``figures``."""
    figures = {} if figures is None else figures
    after = parameters_after(ours) if of.low_precision else []
    if of.low_precision:
        [expected] = devices.run(1, reference, of, torch.device("cuda", 0), after)
    else:
        [expected] = cpus.run(1, reference, of, torch.device("cpu"), after)
    if not dict(of.axes).get("shard_optimizer"):  # with it, a rank has the sums of its slice only
        figures["plain"] = error_of_ranks(ours, expected)
    if of.low_precision and dict(of.axes).get("tp", 1) > 1:
        wide = replace(of, model=of.model.partition("@")[0])
        [exact] = cpus.run(1, reference, wide, torch.device("cpu"), after)
        figures["float32"] = error_of_ranks(ours, exact)
        figures["plain from float32"] = gradient_error([gradients_of(expected)], gradients_of(exact))
        if figures["plain"] >= ALLOWED_IN_LOW_PRECISION:
            return f"gradients differ from plain PyTorch by {figures['plain']:.1e}"
        mine, of_plain = figures["float32"], figures["plain from float32"]
        if mine > ALLOWED_FROM_FLOAT32 * of_plain:
            return f"gradients differ from float32 by {mine:.1e}, those of plain PyTorch by {of_plain:.1e}"
        return ""
    try:
        assert_parity(ours, expected, tensors=of.optimizer is SGD)
    except AssertionError as wrong:
        return f"differs from plain PyTorch: {wrong}"
    return ""


def gradients_of(history: list[dict]) -> list[dict[str, np.ndarray]]:
    return [step["gradients"] for step in history]


def run(of: Case, devices: ProcessPool, cpus: ProcessPool) -> tuple[bool, str]:
    """Whether the numbers of ``of`` are right, and in which way."""
    ours = devices.run(of.ranks, partial(train, on_device=True), of)
    found, text = against_cpu(of, ours, cpus)
    if wrong := against_plain(of, ours, devices, cpus):
        return False, f"{text}; {wrong}"
    return found < of.allowed, text


def run_evaluated(of: Case, devices: ProcessPool, cpus: ProcessPool) -> tuple[bool, str]:
    """As ``run``, of ``evaluated``."""
    with TemporaryDirectory() as folder:
        ours = devices.run(of.ranks, partial(evaluated, on_device=True), of, Path(folder))
        theirs = cpus.run(of.ranks, partial(evaluated, on_device=False), of, Path(folder))
    found = largest_difference(ours, theirs)
    return found < ALLOWED, f"an evaluation between two iterations {in_words(found)}"


def run_graph(of: Case, devices: ProcessPool, cpus: ProcessPool) -> tuple[bool, str]:
    """As ``run``, of replays of a CUDA graph; what cannot be captured must be refused."""
    [error] = devices.run(1, graphs.refused)
    [ours] = devices.run(1, graphs.replayed)
    [theirs] = cpus.run(1, graphs.eager)
    if graphs.REFUSED not in error:
        return False, f"a graph with a read of the host: {error or 'no error'}"
    found = largest_difference(ours, theirs)
    compared = f"differ by {found:.1e} from" if found else "equal in bits to"
    return found < ALLOWED, f"{graphs.REPLAYS} replays {compared} a CPU"


def run_script(of: Case, devices: ProcessPool, cpus: ProcessPool) -> tuple[bool, str]:
    """As ``run``, of a script for auto3d's Trainer, and the same for transformers' on a CPU."""
    [script] = [each for each in trainer.scripts() if each.name == of.model]
    found = trainer.run(devices, script, dict(of.axes), cpus)
    note = f"by {found['error']:.1e}" if "error" in found else found["note"]
    return found["verdict"] == "right", f"differs from transformers' Trainer: {note}"


def in_words(difference: float) -> str:
    return f"differs from the CPU runtime by {difference:.1e}" if difference else "equal in bits to the CPU runtime"


def report(of: Case, devices: ProcessPool, cpus: ProcessPool, how: Run = run) -> bool:
    """Print what ``how`` finds; returns whether it is right."""
    begun = time.monotonic()
    try:
        right, text = how(of, devices, cpus)
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


def found_in_groups(devices: ProcessPool) -> Iterator[bool]:
    """Print, and return, whether a group that one rank alone uses first is found."""
    found = devices.run(2, faults.of_groups, ((0, 1), (0, 1))) == [3.0, 3.0]
    try:
        devices.run(2, faults.of_groups, ((0, 1), (1, 0)))
        found = False
    except AssertionError as error:
        found &= "NCCL error" in str(error)
    print(f"{'found' if found else 'MISSED'}: a group used first by one rank only", flush=True)
    yield found


def found_in_engine(fault: str, cpus: ProcessPool) -> bool:
    """Print, and return, whether parity shows ``fault``, which is planted in the engine."""
    [of] = [each for each in CASES if each.name == faults.IN_THE_ENGINE[fault][-1]]
    with ProcessPool(of.ranks, begin=partial(begin_on_device, fault=fault)) as devices:
        try:
            right, text = run(of, devices, cpus)
        except AssertionError as error:  # a rank has ended, or hangs: no wrong number has been seen
            text = str(error).strip().splitlines()[-1]
            right = not any(line in text for line in (faults.HOST_READ, faults.OTHER_CONTEXT))
    print(f"{'MISSED' if right else 'found'}: {fault} ({of.name}): {text}", flush=True)
    return not right


@click.command()
@click.argument("names", nargs=-1)
@click.option("--ranks", type=int, default=3, show_default=True, help="The largest number of ranks.")
@click.option("--plant/--no-plant", default=True, show_default=True, help="Whether faults are planted.")
def main(names: tuple[str, ...], ranks: int, plant: bool) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    runs = [*((each, run) for each in CASES), (EVALUATED, run_evaluated), (SCRIPT, run_script), (GRAPH, run_graph)]
    chosen = [(of, how) for of, how in runs if of.ranks <= ranks and (not names or of.name in names)]
    # This process runs no backward and captures nothing, so that what is forked from it can use CUDA.
    with ProcessPool(ranks, begin=begin_on_device) as devices, ProcessPool(ranks, begin=begin_on_cpu) as cpus:
        right = [report(of, devices, cpus, how) for of, how in chosen]
        if plant:
            right += found_in_streams(devices)
            right += found_in_groups(devices)
            right += [found_in_engine(fault, cpus) for fault in faults.IN_THE_ENGINE]
    print(f"{sum(right)} of {len(right)} are as they should be")
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
