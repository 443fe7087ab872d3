"""Sub-pipelined against plain tensor parallelism on a slow link: python -m tests.benchmarks.sub_pipelined [REPETITIONS]

Two ranks, each in its own network namespace, exchange over a link whose rate tc limits; this needs root. Their model
is K layers of two blocks each, and a block is a column-parallel and a row-parallel product. Between the two an operator
sleeps for as long as the compute of its samples is meant to take, so that the time does not depend on what else this
machine computes. Everything else is real: capture, tensor-parallel program, runtime, gloo, the packets.

The formulas are those of Merak (TPDS 2023, section 5.3), for a layer that computes for Tm in the forward and 2 Tm in
the backward, and communicates for Ta in each. Ta is the time of its bytes on the link; the rest, such as copying these
bytes, is not in the formulas. Exits with 1 if sub-pipelined training is less than 1.4 times as fast as plain where
Tm = Ta, or slower than 0.97 times where the link is not limited.
"""

import ctypes
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from torch import nn

from auto3d.capture.model import CapturedModel, capture
from auto3d.data import DataSettings, InputField
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import NO_OVERLAP, SUB_PIPELINED, TENSOR_OVERLAPS, Plan
from auto3d.runtime.process.world import World
from auto3d.runtime.rank import build_rank
from auto3d.runtime.replicas import capture_slices
from auto3d.tensor.rules import RULES
from auto3d.tensor_placement import Split
from launch.report.release import Target
from launch.run.ranks import Report
from tests.benchmarks.runtime import ITERATIONS, SEED, SETTINGS, System, Times, on_ranks, take_turns
from tests.targets import end, nothing_measured

LAYERS, SEQUENCE, HIDDEN, INNER = 4, 64, 1024, 8
MICRO_BATCH_SIZE, MICRO_BATCHES = 4, 2
RANKS = 2
FORWARD_S = 0.15  # Tm: the compute of one layer's forward of one micro-batch
EXCHANGED_BYTES = 2 * MICRO_BATCH_SIZE * SEQUENCE * HIDDEN * 4  # each rank sends one value per block, in each direction
SHARES = (1.0, 0.5, 0.0)  # Ta / Tm; 0 is a link that nothing limits
LEAST = {1.0: 1.4, 0.0: 0.97}  # Ta / Tm -> how many times as fast sub-pipelined training must be
REPETITIONS = 5
CLONE_NEWNET = 0x40000000
LINK = "auto3d-link"
NAMESPACES = Path("/run/netns")  # folder of `ip netns`
DATA = DataSettings(
    source="synthetic",
    files=(),
    sequence_length=SEQUENCE,
    vocabulary_size=2,
    inputs={"value": InputField(kind="normal", shape=(SEQUENCE, HIDDEN))},
)


def _sleep(value: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds * value.shape[0])
    return value.clone()


@torch.library.custom_op("auto3d_benchmark::compute", mutates_args=())
def compute(value: torch.Tensor, seconds: float) -> torch.Tensor:
    """``value``, after ``seconds`` for each sample, and twice as long in the backward."""
    return _sleep(value, seconds)


@torch.library.custom_op("auto3d_benchmark::compute_backward", mutates_args=())
def compute_backward(gradient: torch.Tensor, seconds: float) -> torch.Tensor:
    return _sleep(gradient, 2 * seconds)


for _operator in (compute, compute_backward):
    _operator.register_fake(lambda value, seconds: torch.empty_like(value))
compute.register_autograd(
    lambda ctx, gradient: (compute_backward(gradient, ctx.seconds), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "seconds", inputs[1]),
)
RULES["compute"] = RULES["relu"]  # each element by itself


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        inner = torch.ops.auto3d_benchmark.compute(self.first(value), FORWARD_S / 2 / MICRO_BATCH_SIZE)
        return value + self.second(torch.tanh(inner))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.blocks = nn.Sequential(*(Block() for _ in range(2 * LAYERS)))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.blocks(value * self.scale).square().mean()


def plan_of(captured: CapturedModel, overlap: str) -> Plan:
    split = {}
    for name, value in captured.graph.parameters.items():
        if value.shape in ((INNER, HIDDEN), (HIDDEN, INNER)):
            split[name] = Split(value.shape.index(INNER), (INNER,))
    return Plan(
        graph=captured.graph.fingerprint,
        dp=1,
        tp=RANKS,
        pp=1,
        global_batch=MICRO_BATCHES * MICRO_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        schedule="1f1b",
        stages=uniform(captured.graph, 1),
        placement=(tuple(range(RANKS)),),
        seed=SEED,
        split=split,
        tensor_overlap=overlap,
    )


def iteration_of(captured: CapturedModel, plan: Plan, world: World):
    built = build_rank(captured, plan, SETTINGS, DATA, world)

    def run(iteration: int) -> float:
        (result,) = built.executor.run(built.programs[0], iteration)
        return result.loss

    return run


@contextmanager
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces with a link between them, until the end."""
    names = [f"auto3d-{os.getpid()}-{rank}" for rank in range(RANKS)]
    had_namespaces = NAMESPACES.exists()
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-netns", name, "link", "set", "lo", "up")
        _run("ip", "-netns", names[0], "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", names[1])
        for rank, name in enumerate(names):
            _run("ip", "-netns", name, "address", "add", f"10.199.0.{rank + 1}/24", "dev", LINK)
            _run("ip", "-netns", name, "link", "set", LINK, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        if not had_namespaces:  # `ip netns add` has made this folder and mounted it on itself
            subprocess.run(["umount", str(NAMESPACES)], check=False, capture_output=True)
            with suppress(OSError):
                NAMESPACES.rmdir()


def limit(names: list[str], bytes_s: float) -> None:
    """Limit each direction of the link to ``bytes_s``; 0 is no limit."""
    for name in names:
        subprocess.run(["tc", "-netns", name, "qdisc", "delete", "dev", LINK, "root"], check=False, capture_output=True)
        if bytes_s:
            rate = ["rate", f"{round(8 * bytes_s)}bit", "burst", "128kb", "latency", "2s"]
            _run("tc", "-netns", name, "qdisc", "add", "dev", LINK, "root", "tbf", *rate)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def times(systems: Mapping[str, System], names: list[str], repetitions: int) -> dict[str, Times]:
    """System -> its times, each rank in the namespace of its number. The systems take turns."""
    context = multiprocessing.get_context("fork")
    turns, found = context.Barrier(len(systems)), context.SimpleQueue()
    target = partial(take_turns, systems, RANKS, repetitions, turns, found)
    on_ranks(RANKS * len(systems), partial(in_namespace, names, target))
    return dict(found.get() for _ in systems)


def in_namespace(names: list[str], target, world: World, report: Report) -> None:
    with (NAMESPACES / names[world.rank % RANKS]).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = LINK
    with suppress(PermissionError):  # ranks and gloo's threads then wake on time, whatever else the machine does
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    target(world, report)


def formulas(compute_s: float, exchange_s: float) -> dict[str, float]:
    """Seconds of one iteration by Merak's formulas, which are those of a micro-batch."""
    both = max(3 * compute_s, 2 * compute_s + exchange_s, 2 * exchange_s)
    return {
        NO_OVERLAP: MICRO_BATCHES * LAYERS * (3 * compute_s + 2 * exchange_s),
        SUB_PIPELINED: MICRO_BATCHES * (0.75 * compute_s + exchange_s / 2 + (LAYERS - 0.25) * both),
    }


def main() -> None:
    if os.geteuid():
        nothing_measured("network namespaces need root")
    torch.set_num_threads(1)
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS
    captured = capture(Layers, DATA.input_specs(), MICRO_BATCH_SIZE)
    plans = {overlap: plan_of(captured, overlap) for overlap in TENSOR_OVERLAPS}
    for plan in plans.values():
        capture_slices(captured, plan)
    systems = {overlap: partial(iteration_of, captured, plan) for overlap, plan in plans.items()}
    rows, targets = [], []
    with namespaces() as names:
        for share in SHARES:
            limit(names, share and EXCHANGED_BYTES / (share * FORWARD_S))
            found = times(systems, names, repetitions)
            torch.testing.assert_close(*(torch.tensor(one.losses) for one in found.values()), rtol=1e-5, atol=1e-7)
            predicted = formulas(FORWARD_S, share * FORWARD_S)
            ratio = median(a / b for a, b in zip(*(found[each].seconds for each in TENSOR_OVERLAPS), strict=True))
            for overlap in TENSOR_OVERLAPS:
                seconds = found[overlap].seconds
                rows.append(
                    (
                        f"{share:g}",
                        overlap,
                        f"{1000 * predicted[overlap]:.0f}",
                        f"{1000 * median(seconds):.0f}",
                        f"{1000 * min(seconds):.0f} to {1000 * max(seconds):.0f}",
                        f"{predicted[NO_OVERLAP] / predicted[overlap]:.2f}",
                        f"{ratio if overlap == SUB_PIPELINED else 1:.2f}",
                    )
                )
            if share in LEAST:
                what = f"sub-pipelined over plain tensor parallelism, Ta / Tm = {share:g}"
                targets.append(Target(what=what, found=ratio, wish=LEAST[share], unit=" ×", least=True))
    headings = ["Ta / Tm", "tensor_overlap", "formula ms", "measured ms", "spread", "formula ×", "measured ×"]
    print(tabulate(rows, headings, "github", disable_numparse=True))
    print(f"\nTimes of one iteration of {MICRO_BATCHES} micro-batches through {LAYERS} layers; Tm is")
    print(f"{1000 * FORWARD_S:g} ms. Medians of {repetitions} repetitions of {ITERATIONS} iterations in turn.")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; torch {torch.__version__}.")
    end(targets)


if __name__ == "__main__":
    main()
