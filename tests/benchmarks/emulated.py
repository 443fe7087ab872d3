"""Emulated devices against the simulator: python -m tests.benchmarks.emulated

16 processes on whatever cores there are; equal stages, F:B = 1:2. Exits with 1 unless every measured time per iteration is
within TOLERANCE of the simulated one, and the schedules of one size are in its order.
"""

import os
import platform
import sys
from itertools import combinations
from statistics import median

import torch
from tabulate import tabulate
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.capture.export import export
from auto3d.capture.specialize import CapturedModel, specialize
from auto3d.cluster import place_ranks
from auto3d.partition.uniform import uniform
from auto3d.plan import Plan
from auto3d.runtime.data import DataSettings, InputField
from auto3d.runtime.emulation import Emulation
from auto3d.runtime.measurement import Status
from auto3d.runtime.optimizer import OptimizerSettings
from auto3d.runtime.training import TrainingSettings, schedule_of, stages_of, train
from auto3d.simulate.simulate import simulate
from launch.ranks import run_ranks

FORWARD_S = 0.025
WARMUP, ITERATIONS = 1, 5
TOLERANCE = 0.03
TIMEOUT_S = 120
SEQUENCE, WIDTH, MICRO_BATCH_SIZE = 256, 64, 4  # messages of 256 KiB
DEVICES = (8, 16)
SCHEDULES = (
    ("gpipe", {}),
    ("1f1b", {}),
    ("early-recompute", {}),
    ("shifted-critical-path", {}),
    ("chimera", {}),
    ("chimera", {"scale": "doubling"}),
    ("zb-h1", {}),
)
DATA = DataSettings(
    source="synthetic",
    files=(),
    sequence_length=SEQUENCE,
    vocabulary_size=256,
    inputs={"input_ids": InputField(kind="tokens"), "labels": InputField(kind="tokens")},
)
SETTINGS = TrainingSettings(
    iterations=WARMUP + ITERATIONS,
    optimizer=OptimizerSettings(
        optimizer="sgd",
        learning_rate=0.1,
        weight_decay=0.0,
        momentum=0.0,
        betas=(0.9, 0.999),
        learning_rate_schedule="constant",
        warmup_iterations=0,
        clip_norm=1.0,
    ),
    device="cpu",
    threads_per_rank=1,
    timeout_s=60,
    emulation=Emulation(forward_s=FORWARD_S, backward_s=2 * FORWARD_S),
)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=max(DEVICES), n_embd=WIDTH, n_head=2, n_positions=SEQUENCE, vocab_size=256, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def plan_of(captured: CapturedModel, name: str, options: dict, devices: int, micro_batches: int) -> Plan:
    return Plan(
        graph=captured.graph.fingerprint,
        dp=1,
        tp=1,
        pp=devices,
        global_batch=micro_batches * MICRO_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        schedule=name,
        schedule_options=options,
        stages=uniform(captured.graph, devices),
        placement=place_ranks(dp=1, pp=devices),
        seed=1,
    )


def measured(captured: CapturedModel, plan: Plan) -> list[float]:
    """Seconds of each iteration after the warm-up."""
    outcome = run_ranks(
        plan.ranks, lambda world, report: train(captured, plan, SETTINGS, DATA, world), timeout_s=TIMEOUT_S
    )
    assert outcome.status is Status.OK, outcome.error
    return outcome.result.iteration_s[WARMUP:]


def main() -> int:
    captured = specialize(export(gpt2, DATA.input_specs()), MICRO_BATCH_SIZE)
    wrong = []
    for devices in DEVICES:
        for micro_batches in (devices, 2 * devices):
            found = {}
            for name, options in SCHEDULES:
                plan = plan_of(captured, name, options, devices, micro_batches)
                schedule = schedule_of(plan)
                costs = SETTINGS.emulation.costs(captured.graph, stages_of(captured, plan), schedule)
                label = " ".join((name, *options.values()))
                times = measured(captured, plan)
                found[label] = simulate(schedule, costs).makespan, median(times), max(times) - min(times)
                simulated, time, spread = found[label]
                print(devices, micro_batches, label, f"{simulated:.4f} {time:.4f} {spread:.4f} {time/simulated-1:+.2%}", os.getloadavg()[0], flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
