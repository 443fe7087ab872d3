"""Host time of each thing that an operation of the schedule does: python -m tests.benchmarks.host [--write]

It trains the recipe `tiny` (1F1B on 2 ranks, 8 micro-batches of 2 samples, one thread per rank, observed as in
`auto3d train`) with samples of 8 tokens. With --write the table goes to results/host/table.md. Calls are counted
exactly. Times are processor time of the rank's thread by cProfile, less what profiling costs each call; the least of
several iterations.
"""

import sys
import time
from cProfile import Profile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from types import CodeType

import torch.distributed as dist
from tabulate import tabulate

from auto3d.capture.model import CapturedModel
from auto3d.cluster import place_ranks
from auto3d.data import TrainingData
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan
from auto3d.runtime.clock import CpuClock
from auto3d.runtime.process.world import World, leave
from auto3d.runtime.rank import build_rank
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.watch.observer import OperationTimes
from launch.model.build import captured_model
from launch.model.data import training_data
from launch.recipe.load import load
from launch.recipe.settings import training_settings
from launch.report.release import Target
from launch.run.ranks import Report
from tests.benchmarks.runtime import begin, on_ranks
from tests.targets import end

TABLE = Path(__file__).parents[2] / "results/host/table.md"
RANKS, MICRO_BATCH_SIZE, MICRO_BATCHES = 2, 2, 8
TOKENS = 8  # so few that operators leave the host's code in the caches
WARM_UP, PROFILED, TIMED = 3, 15, 30  # iterations
CALLS = 100_000  # of an empty function, to see what profiling costs a call

FORWARD, BACKWARD, OTHER = "forward's operators", "backward's operators, in autograd's engine", "everything else"
PARTS = {  # thing -> parts of the names of the files whose functions do it
    "lookup and loop": ("runtime/executor.py",),
    "messages": ("runtime/messages/exchange.py", "schedule/program.py"),
    "messages, inside torch": ("torch/distributed/",),
    "waits": ("runtime/waiting.py", "runtime/run_ahead.py"),
    "phases": ("runtime/activity.py", "schedule/operation.py", "/enum.py"),
    "observers": ("runtime/watch/observer.py", "runtime/clock.py"),
    "contexts": ("/contextlib.py", "runtime/out_of_memory.py", "autograd/grad_mode.py", "utils/_contextlib.py"),
    "dataclasses": ("<string>",),
    "inputs": (
        "runtime/samples/inputs.py",
        "runtime/samples/loading.py",
        "runtime/samples/neighbours.py",
        "runtime/samples/same_samples.py",
        "auto3d/data/",
        "numpy/",
    ),
    "stages and their dictionaries": (
        "runtime/stage/module.py",
        "runtime/stage/segment_computation.py",
        "runtime/stage/target_counts.py",
    ),
    "weights of a version": ("runtime/weights/versions.py",),
    "dropout seeds": ("runtime/randomness.py",),
    "accumulation of gradients": ("runtime/weights/gradients.py", "runtime/weights/low_precision.py"),
    "autograd's entry and exit": ("torch/autograd/", "torch/_tensor.py"),
    "stage programs": ("<eval_with_key>", "torch/fx/", "torch/nn/", "torch/_ops.py", "_jit_internal.py"),
    FORWARD: (),
    BACKWARD: (),
    "sums, norm and update": (
        "runtime/messages/gradient_sync.py",
        "runtime/messages/totals.py",
        "torch/optim/",
        "torch/compiler/",
    ),
    OTHER: (),
}
COMPUTED = (FORWARD, BACKWARD, "stage programs", "sums, norm and update")  # what no executor can save


@dataclass
class Cost:
    """What a part of the work costs per operation."""

    python_calls: float = 0.0
    c_calls: float = 0.0
    us: float = 0.0  # processor time


def part_of(code: CodeType | str) -> str:
    """The part to which a function belongs that is not of C."""
    file = code if isinstance(code, str) else code.co_filename
    return next((part for part, names in PARTS.items() if any(name in file for name in names)), OTHER)


def part_of_c(code: CodeType | str, caller: str) -> str:
    """The part to which a function of C belongs that a function of the part ``caller`` calls."""
    if "run_backward" in str(code):
        return BACKWARD
    return FORWARD if caller == "stage programs" else caller


def profile_of(run: partial) -> Profile:
    profile = Profile(time.thread_time_ns, 1e-3)  # microseconds
    profile.runcall(run)
    return profile


def costs_of_profiling() -> tuple[float, float]:
    """Microseconds by which profiling lengthens each call: in the function itself, and in its caller."""

    def empty() -> None:
        pass

    def caller() -> None:
        for _ in range(CALLS):
            empty()

    start = time.thread_time_ns()
    caller()
    alone_us = (time.thread_time_ns() - start) / 1e3
    us = {entry.code: entry.inlinetime for entry in profile_of(partial(caller)).getstats()}
    return us[empty.__code__] / CALLS, (us[caller.__code__] - alone_us) / CALLS


def costs_of(profile: Profile, operations: int, of_call: tuple[float, float]) -> dict[str, Cost]:
    """Part -> its cost per operation, from the profile of ``operations``."""
    found = {part: Cost() for part in PARTS}
    inner_us, outer_us = of_call
    for entry in profile.getstats():
        if isinstance(entry.code, str):
            continue  # functions of C count with their callers
        part = part_of(entry.code)
        called = entry.calls or ()
        found[part].python_calls += entry.callcount / operations
        found[part].us += (entry.inlinetime - entry.callcount * inner_us) / operations
        for each in called:
            found[part].us -= each.callcount * outer_us / operations
            if isinstance(each.code, str):
                cost = found[part_of_c(each.code, part)]
                cost.c_calls += each.callcount / operations
                cost.us += (each.inlinetime - each.callcount * inner_us) / operations
    return found


def measure(
    captured: CapturedModel, plan: Plan, settings: TrainingSettings, data: TrainingData, world: World, report: Report
) -> tuple[dict[str, Cost], float]:
    """(costs per operation by part, processor µs per operation without a profiler), each the mean over the ranks."""
    begin(world)
    rank = build_rank(captured, plan, settings, data, world)
    times = OperationTimes(CpuClock())
    rank.executor.observe(times)
    operations = len(rank.programs[0].steps)
    iterations = iter(range(settings.iterations))

    def run() -> None:
        number = next(iterations)
        list(rank.executor.run(rank.programs[number], number))
        times.take(0.0)

    def timed() -> float:
        start = time.thread_time_ns()
        run()
        return (time.thread_time_ns() - start) / 1e3 / operations

    for _ in range(WARM_UP):
        run()
    plain_us = [timed() for _ in range(TIMED)]
    of_call = costs_of_profiling()
    profiled = [costs_of(profile_of(partial(run)), operations, of_call) for _ in range(PROFILED)]
    least = {
        part: Cost(
            median(each[part].python_calls for each in profiled),
            median(each[part].c_calls for each in profiled),
            min(each[part].us for each in profiled),
        )
        for part in PARTS
    }
    found: list[tuple[dict[str, Cost], float]] = [(least, min(plain_us))] * world.size
    dist.all_gather_object(found, found[0])
    leave()
    of_parts = {
        part: Cost(*(mean(getattr(costs[part], name) for costs, _ in found) for name in Cost.__annotations__))
        for part in PARTS
    }
    return of_parts, mean(plain for _, plain in found)


def main() -> None:
    recipe = load("tiny", [f"data.sequence_length={TOKENS}"])
    captured = captured_model(recipe, MICRO_BATCH_SIZE)
    plan = Plan(
        graph=captured.graph.fingerprint,
        dp=1,
        tp=1,
        pp=RANKS,
        global_batch=MICRO_BATCHES * MICRO_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        schedule="1f1b",
        stages=uniform(captured.graph, RANKS),
        placement=place_ranks(dp=1, pp=RANKS),
        seed=1,
    )
    settings = training_settings(recipe.values, iterations=WARM_UP + PROFILED + TIMED)
    costs, plain_us = on_ranks(RANKS, partial(measure, captured, plan, settings, training_data(recipe)))
    rows = [(part, f"{c.python_calls:.1f}", f"{c.c_calls:.1f}", f"{c.us:.1f}") for part, c in costs.items()]
    executor = [cost for part, cost in costs.items() if part not in COMPUTED]
    for name, chosen in (("of these, not computation", executor), ("all", list(costs.values()))):
        calls, c_calls, us = (sum(getattr(cost, field) for cost in chosen) for field in Cost.__annotations__)
        rows.append((f"**{name}**", f"{calls:.1f}", f"{c_calls:.1f}", f"{us:.1f}"))
    headings = ["per operation", "Python calls", "calls of C", "µs of processor time"]
    table = tabulate(rows, headings, "github", disable_numparse=True, colalign=("left", "right", "right", "right"))
    print(table)
    print(f"\nWithout a profiler, an operation takes {plain_us:.0f} µs of processor time.")
    if "--write" in sys.argv:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(table + "\n")
    calls = sum(cost.python_calls for cost in executor)
    end([Target(what="Python calls of an operation that are not computation", found=calls, wish=75, held=120)])


if __name__ == "__main__":
    main()
