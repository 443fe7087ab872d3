"""Emulated devices against the simulator: python -m tests.benchmarks.emulated

Runs 8 and 16 real processes on this machine's cores, with equal stages, F:B = 1:2, and one or two micro-batches per
device. Exits with 1 unless every time per iteration is within TOLERANCE of the simulated one, and the schedules of each
size are in the simulator's order. If permitted, the ranks get real-time scheduling (SCHED_RR), so that they wake on
time whatever else the machine does. results/emulated/README.md has the figures.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from statistics import median

from tabulate import tabulate
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.capture.model import CapturedModel, capture
from auto3d.cluster import place_ranks
from auto3d.data import DataSettings, InputField
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan
from auto3d.runtime.emulated.settings import Emulation
from auto3d.runtime.measurement import Environment, Status
from auto3d.runtime.process.world import World
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.runtime.training import TrainingResult, train
from auto3d.schedule import schedule_of
from auto3d.simulate.simulate import simulate
from launch.report.release import Target
from launch.run.ranks import Report, run_ranks
from tests.targets import end

FORWARD_S = 0.04  # forward of one micro-batch on one stage
WARMUP, ITERATIONS = 1, 3
TOLERANCE = 0.03
TIE = 1e-9  # relative difference below which two simulated times are equal
TIMEOUT_S = 120
SEQUENCE, WIDTH, MICRO_BATCH_SIZE = 256, 64, 4
MESSAGE_BYTES = SEQUENCE * WIDTH * MICRO_BATCH_SIZE * 4
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
HEADS = ["devices", "micro-batches", "schedule", "simulated", "emulated", "spread", "difference"]
ALIGN = ["right", "right", "left", *["right"] * 4]
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
)
EMULATION = Emulation(forward_s=FORWARD_S, backward_s=2 * FORWARD_S)


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


def in_real_time() -> bool:
    """Ask for real-time scheduling of this process; returns whether it was granted."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True


def measured(
    captured: CapturedModel, plan: Plan, emulation_of: Callable[[int], Emulation] = lambda rank: EMULATION
) -> tuple[list[float], bool]:
    """(seconds of each iteration after the warm-up, whether the ranks had real-time scheduling)."""

    def run(world: World, report: Report) -> tuple[TrainingResult, bool]:
        granted = in_real_time()
        settings = replace(SETTINGS, emulation=emulation_of(world.rank))
        return train(captured, plan, settings, DATA, world), granted

    outcome = run_ranks(plan.ranks, run, limit_s=TIMEOUT_S)
    assert outcome.status is Status.OK, outcome.error
    result, granted = outcome.result
    return result.iteration_s[WARMUP:], granted


def main() -> None:
    captured = capture(gpt2, DATA.input_specs(), MICRO_BATCH_SIZE)
    rows, errors, disordered = [], [0.0], []
    for devices in DEVICES:
        for micro_batches in (devices, 2 * devices):
            times: dict[str, tuple[float, float]] = {}  # schedule -> simulated and measured
            for name, options in SCHEDULES:
                plan = plan_of(captured, name, options, devices, micro_batches)
                schedule = schedule_of(plan)
                costs = EMULATION.costs(captured.graph, plan.stages, schedule, dp=1)
                simulated = simulate(schedule, costs).makespan
                iterations, granted = measured(captured, plan)
                time = median(iterations)
                label = " ".join((name, *options.values()))
                times[label] = simulated, time
                spread = max(iterations) - min(iterations)
                figures = [f"{figure:.4f}" for figure in (simulated, time, spread)]
                rows.append([devices, micro_batches, label, *figures, f"{time / simulated - 1:+.2%}"])
                errors.append(abs(time / simulated - 1))
            for a, b in combinations(times, 2):
                (simulated_a, time_a), (simulated_b, time_b) = times[a], times[b]
                if abs(simulated_a - simulated_b) > TIE and (simulated_a < simulated_b) != (time_a < time_b):
                    disordered.append(f"D={devices} N={micro_batches}: {a} and {b} are in the other order")
    print(tabulate(rows, HEADS, tablefmt="github", disable_numparse=True, colalign=ALIGN))
    here = Environment.here("cpu")
    print(
        f"\nSeconds per iteration. Emulated: real processes and messages, operations that wait. Forward {FORWARD_S} s, "
        f"backward {2 * FORWARD_S} s per stage and micro-batch; messages of {MESSAGE_BYTES // 1024} KiB and gradient "
        f"syncs of true size, 0 s for the simulator. Median of {ITERATIONS} iterations after {WARMUP} of warm-up, "
        f"spread from fastest to slowest, {'with' if granted else 'without'} real-time scheduling; {here.device}, "
        f"{here.cores} cores, load average {os.getloadavg()[1]:.1f}, torch {here.torch}, Python {here.python}."
    )
    print("\n".join(disordered) or "all in the simulator's order")
    end(
        [
            Target(what="largest error of an iteration", found=100 * max(errors), wish=100 * TOLERANCE, unit=" %"),
            Target(what="pairs of schedules in another order", found=len(disordered), wish=0),
        ]
    )


if __name__ == "__main__":
    main()
