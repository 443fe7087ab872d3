"""Compare our runtime with torch.distributed.pipelining, and time our executor: python -m tests.benchmarks.runtime

Both train the same GPT-2, cut at the same blocks, with the same weights, data, loss and optimizer, on as many processes
with one thread each, over gloo. They take turns: one waits while the other runs. Torch runs the stages of the captured
program as launch/peers/torch_pipelining.py does, since its tracer does not capture whole models of transformers. The
head is not tied to the embedding, since torch does not sum the gradients of tied weights.
"""

import ctypes
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.capture.model import CapturedModel, capture
from auto3d.cluster import place_ranks
from auto3d.data import DataSettings, InputField
from auto3d.plan import TORCH_PIPELINING, Plan, stages_of_operations
from auto3d.runtime import rank
from auto3d.runtime.process.world import World, join, leave
from auto3d.runtime.rank import build_rank
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.runtime.watch.peak_memory import PeakMemory
from launch.peers.rank import PeerRank
from launch.peers.torch_pipelining import build as build_torch_pipelining
from launch.report.release import Target
from launch.run.ranks import Report, run_ranks
from tests.targets import end

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY = 8, 256, 4, 128, 1024
MICRO_BATCH_SIZE, MICRO_BATCHES = 2, 8
SEED = 1
TIMEOUT_S = 120
CASES = [(schedule, ranks) for ranks in (2, 4) for schedule in ("1f1b", "gpipe")]
REPETITIONS = 25
ITERATIONS = 2  # iterations per repetition, so that one may overlap with the next
EMPTY_MICRO_BATCHES = 256
M_MMAP_THRESHOLD = -3  # mallopt(3): allocations from this size on get separate pages

Iteration = Callable[[int], float | torch.Tensor | None]
"""Runs one iteration; returns the mean loss if this rank knows it."""

TOKENS = DataSettings(
    source="synthetic",
    files=(),
    sequence_length=SEQUENCE,
    vocabulary_size=VOCABULARY,
    inputs={"input_ids": InputField(kind="tokens"), "labels": InputField(kind="tokens")},
)
FEATURES = DataSettings(
    source="synthetic",
    files=(),
    sequence_length=1,
    vocabulary_size=2,
    inputs={"value": InputField(kind="normal", shape=(1,))},
)
ADAMW = OptimizerSettings(
    optimizer="adamw",
    learning_rate=1e-3,
    weight_decay=0.01,
    momentum=0.0,
    betas=(0.9, 0.999),
    learning_rate_schedule="constant",
    warmup_iterations=0,
    clip_norm=0.0,
)
SETTINGS = TrainingSettings(iterations=1000, optimizer=ADAMW, device="cpu", threads_per_rank=1, timeout_s=TIMEOUT_S)


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=LAYERS, n_embd=HIDDEN, n_head=HEADS, n_positions=SEQUENCE, vocab_size=VOCABULARY, use_cache=False,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Empty(nn.Module):
    """A model whose two stages compute as little as possible."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return (value * self.first * self.second).mean()


def plan_of(captured: CapturedModel, schedule: str, stage_of: list[int], micro_batches: int) -> Plan:
    ranks = stage_of[-1] + 1
    return Plan(
        graph=captured.graph.fingerprint,
        dp=1,
        tp=1,
        pp=ranks,
        global_batch=micro_batches * captured.graph.micro_batch_size,
        micro_batch_size=captured.graph.micro_batch_size,
        schedule=schedule,
        schedule_options={},
        stages=stages_of_operations(stage_of),
        placement=place_ranks(dp=1, pp=ranks),
        seed=SEED,
    )


def stage_of_blocks(captured: CapturedModel, stages: int) -> list[int]:
    """The stage of each operation: cuts between transformer blocks, with equally many on each stage."""
    found, stage = [], 0
    for node in captured.graph.nodes:
        if node.module.startswith("transformer.h."):
            stage = int(node.module.split(".")[2]) * stages // LAYERS
        found.append(stage)
    return found


def ours(captured: CapturedModel, world: World, schedule: str) -> Iteration:
    stage_of = stage_of_blocks(captured, world.size)
    built = build_rank(captured, plan_of(captured, schedule, stage_of, MICRO_BATCHES), SETTINGS, TOKENS, world)

    def run(iteration: int) -> float:
        (result,) = built.executor.run(built.programs[0], iteration)
        return result.loss

    return run


def theirs(captured: CapturedModel, world: World, schedule: str) -> Iteration:
    plan = plan_of(captured, schedule, stage_of_blocks(captured, world.size), MICRO_BATCHES)
    peer = PeerRank(
        world=world,
        plan=replace(plan, engine=TORCH_PIPELINING),
        captured=captured,
        settings=SETTINGS,
        data=TOKENS,
        device=torch.device("cpu"),
        state=None,
    )
    return build_torch_pipelining(peer)


SYSTEMS = {"ours": ours, "torch": theirs}
System = Callable[[World], Iteration]  # builds what one rank trains


@dataclass(frozen=True)
class Times:
    """Times of one iteration in each repetition, and the losses of the first iterations."""

    seconds: list[float]
    processor_s: list[float]  # processor time of all ranks together
    losses: list[float]


def times(systems: Mapping[str, System], ranks: int, repetitions: int = REPETITIONS) -> dict[str, Times]:
    """System -> its times. Each system has its own processes, and all but one wait while that one computes."""
    context = multiprocessing.get_context("fork")
    turns, found = context.Barrier(len(systems)), context.SimpleQueue()
    on_ranks(ranks * len(systems), partial(take_turns, systems, ranks, repetitions, turns, found))
    return dict(found.get() for _ in systems)


def take_turns(
    systems: Mapping[str, System],
    ranks: int,
    repetitions: int,
    turns: Barrier,
    found: SimpleQueue,
    world: World,
    report: Report,
) -> None:
    index, rank = divmod(world.rank, ranks)
    name = list(systems)[index]
    meeting_point = f"{world.meeting_point}-{index}"
    world = replace(world, rank=rank, local_rank=rank, size=ranks, meeting_point=meeting_point)
    begin(world)
    run = systems[name](world)
    losses = torch.zeros(ITERATIONS, dtype=torch.float64)
    for iteration in range(ITERATIONS):
        losses[iteration] = run(iteration) or 0
    dist.broadcast(losses, src=ranks - 1)
    taken = Times([], [], losses.tolist())
    for turn in range(len(systems) * repetitions):
        if rank == 0:
            turns.wait(TIMEOUT_S)
        repetition, place = divmod(turn, len(systems))
        if index != (repetition + place) % len(systems):
            continue
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        for iteration in range(ITERATIONS * (1 + repetition), ITERATIONS * (2 + repetition)):
            run(iteration)
        processor_s = torch.tensor(time.process_time() - used)
        dist.all_reduce(processor_s)  # also serves as a barrier
        taken.seconds.append((time.perf_counter() - start) / ITERATIONS)
        taken.processor_s.append(float(processor_s) / ITERATIONS)
    if rank == 0:
        found.put((name, taken))
    leave()


def peak_bytes(system: System, fragments: bool, world: World, report: Report) -> list[int]:
    """Peak memory of each rank in its first iterations, beyond the memory that it had before it built its stage.

    Without ``fragments``, every tensor has separate pages, so that freed memory goes back to the system.
    """
    begin(world)
    memory = PeakMemory(torch.device("cpu"))
    if not fragments:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
        rank.keep_freed_memory = lambda: None  # it would move tensors to the heap again
    run = system(world)
    Path("/proc/self/clear_refs").write_text("5")  # the building of a stage shall not count
    for iteration in range(3):
        run(iteration)
    found = [0] * world.size
    dist.all_gather_object(found, memory.bytes())
    leave()
    return found


def executor_seconds(captured: CapturedModel, world: World, report: Report) -> tuple[float, int]:
    """(processor seconds of an iteration of stages that compute nearly nothing, number of its operations)."""
    begin(world)
    plan = plan_of(captured, "1f1b", [0, 1, 1], EMPTY_MICRO_BATCHES)
    built = build_rank(captured, plan, SETTINGS, FEATURES, world)
    found = []
    for iteration in range(10):
        start = time.thread_time()
        list(built.executor.run(built.programs[0], iteration))
        found.append(time.thread_time() - start)
    leave()
    return median(found[2:]), 2 * EMPTY_MICRO_BATCHES + 2


def begin(world: World) -> None:
    torch.set_num_threads(1)
    join(world, device=torch.device("cpu"), timeout_s=TIMEOUT_S)


def on_ranks(ranks: int, target: Callable) -> object:
    outcome = run_ranks(ranks, target, limit_s=1800)
    assert outcome.error == "", outcome.error
    return outcome.result


def one_core_ms() -> float:
    """Processor time, in ms, of forward and backward of one micro-batch through the whole model on one core."""
    model, found = gpt2(), []
    tokens = torch.randint(VOCABULARY, (MICRO_BATCH_SIZE, SEQUENCE))
    for _ in range(10):
        start = time.process_time()
        model(input_ids=tokens, labels=tokens).loss.backward()
        found.append(time.process_time() - start)
    return 1000 * median(found)


def in_mib(sizes: list[int]) -> str:
    return " ".join(f"{size / 2**20:.0f}" for size in sizes)


def main() -> None:
    torch.set_num_threads(1)
    captured = capture(gpt2, TOKENS.input_specs(), MICRO_BATCH_SIZE)
    rows, targets = [], []
    for schedule, ranks in CASES:
        systems = {name: partial(system, captured, schedule=schedule) for name, system in SYSTEMS.items()}
        found = times(systems, ranks)
        torch.testing.assert_close(*(torch.tensor(one.losses) for one in found.values()), rtol=1e-4, atol=1e-5)
        peaks = {
            (name, fragments): on_ranks(ranks, partial(peak_bytes, system, fragments))
            for (name, system), fragments in product(systems.items(), (False, True))
        }
        more = max(a - b for a, b in zip(peaks["ours", False], peaks["torch", False], strict=True)) / 2**20
        case = f"{schedule} on {ranks} ranks"
        targets.append(Target(what=f"{case}, a rank's peak beyond torch's", found=more, wish=1, unit=" MiB"))
        samples = MICRO_BATCHES * MICRO_BATCH_SIZE
        for name, one in found.items():
            ratio = median(
                theirs_s / ours_s for ours_s, theirs_s in zip(one.seconds, found["torch"].seconds, strict=True)
            )
            if name == "ours":
                what = f"{case}, throughput over torch's"
                targets.append(Target(what=what, found=ratio, wish=1, held=0.95, unit=" ×", least=True))
            rows.append(
                (
                    schedule,
                    ranks,
                    name,
                    f"{samples / median(one.seconds):.1f}",
                    f"{samples / max(one.seconds):.1f} to {samples / min(one.seconds):.1f}",
                    f"{ratio:.3f}",
                    f"{median(one.processor_s):.3f}",
                    in_mib(peaks[name, False]),
                    in_mib(peaks[name, True]),
                )
            )
            print("  ", *rows[-1], file=sys.stderr, flush=True)
    empty = capture(Empty, FEATURES.input_specs(), 1)
    executor_s, operations = on_ranks(2, partial(executor_seconds, empty))
    headings = [
        "schedule", "ranks", "runtime", "samples/s", "slowest to fastest", "of torch's", "processor s/iteration",
        "peak MiB of each rank", "with the heap's fragments",
    ]  # fmt: skip
    print(tabulate(rows, headings, "github", disable_numparse=True))
    print(f"\nGPT-2 of {LAYERS} layers × {HIDDEN}, {SEQUENCE} tokens, in {MICRO_BATCHES} micro-batches of")
    print(f"{MICRO_BATCH_SIZE}, one of which a core computes in {one_core_ms():.0f} ms. Medians of {REPETITIONS}")
    print(f"repetitions of {ITERATIONS} iterations in turn; the ratio is that of the repetitions. Peaks are of three")
    print("iterations, beyond what the process had before it built its stage, libraries not counted.")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; torch {torch.__version__}.\n")
    print(f"The executor's own time: {1e6 * executor_s / operations:.0f} µs of processor time per operation, with its")
    print(f"messages and the little that empty stages compute (1F1B, 2 ranks, {EMPTY_MICRO_BATCHES} micro-batches).")
    own_us = 1e6 * executor_s / operations
    end(
        [*targets, Target(what="the executor's own time of an operation", found=own_us, wish=200, held=400, unit=" µs")]
    )


if __name__ == "__main__":
    main()
