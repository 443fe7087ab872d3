"""Synthesized schedules against the best by rule: python -m tests.benchmarks.synthesis [gains] [times] [emulated]

Solves the cases of tests/synthesis/cases.py, and writes tables and drawings to results/synthesis. ``gains``: each case
in SECONDS of processor time. ``times``: some cases in less and in more time. ``emulated``: some cases on real
processes. Without arguments, all three (an hour). Each part ends with its targets; the exit code is 1 if one is missed.
"""

import csv
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from statistics import fmean, median

from tabulate import tabulate
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.capture.model import capture
from auto3d.cluster import place_ranks
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan
from auto3d.runtime.emulation import Emulation
from auto3d.runtime.measurement import Environment
from auto3d.schedule import schedule_of
from auto3d.schedule.operation import Schedule
from auto3d.schedule.order_text import order_options
from auto3d.simulate.costs import MessageCost
from auto3d.simulate.draw_svg import draw_svg
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.certificate import certificate
from auto3d.synthesis.problem import Problem
from auto3d.synthesis.structures import Solution, merged, solve, structures
from tests.benchmarks.emulated import DATA, ITERATIONS, MICRO_BATCH_SIZE, SEQUENCE, WIDTH, measured
from tests.synthesis.cases import ONE_COPY, Case, cases
from tests.targets import Target, end

FOLDER = Path("results/synthesis")
SECONDS = 20.0
TIMES = (1.0, 3.0, 10.0)
TIMED = (
    "cap: equal, 75%, 8 x 32",
    "cap: GPT-1.4B, 50%, 8 x 32",
    "speed: LLaMA-3 8B, 75%, 16 x 128",
)
EMULATED = (
    "encoder-decoder: T5-11B, 8 x 32",
    "cap: T5-11B, 100%, 8 x 32",
    "cap: equal, 75%, 8 x 32",
    "cap: LLaMA-3 8B, 75%, 16 x 64",
    "head: LLaMA-3 8B, 16 x 32",
    "encoder-decoder: T5-11B, 16 x 32",
    "cap: GPT-1.4B, 75%, 8 x 16",
    "cap, recompute: GPT-1.4B, 50%, 8 x 16",
    "mixed devices, cap: GPT-1.4B, 100%, 8 x 16",
)
DRAWN = ("cap: GPT-1.4B, 75%, 8 x 32", "encoder-decoder: T5-11B, 8 x 32")
WORK_S = 0.08  # emulated time of one micro-batch on the busiest device
TOLERANCE = 0.03  # between emulated and simulated gains
MEAN_GAIN = 8.0  # per cent
NEAR = 0.01  # difference to the best that counts as none


@dataclass(frozen=True, kw_only=True)
class Row:
    """One solved case. Times are in units of a case: seconds, or those of equal stages."""

    case: str
    micro_batches: int
    devices: int
    by_rule: str  # empty if none fits the memory
    by_rule_time: float
    found: str
    found_time: float
    gain: float
    bound: float
    gap: float
    reason: str
    seconds: float  # processor time given
    taken: float  # processor time, with structures, seeds and bounds


def name_of(case: Case) -> str:
    return f"{case.group}: {case.name}, {case.bare.devices} x {case.bare.micro_batches}"


def solved(task: tuple[Case, float]) -> tuple[Row, Solution]:
    case, seconds = task
    begin = time.process_time()
    possible = structures(case.bare)
    solution = solve(possible, seconds=seconds)
    taken = time.process_time() - begin
    makespan, rule = solution.by_rule or (nan, None)
    found = solution.synthesis
    proof = certificate([each.problem for each in possible], found.schedule, found.makespan, seconds=0)
    row = Row(
        case=name_of(case),
        devices=case.bare.devices,
        micro_batches=case.bare.micro_batches,
        by_rule="" if rule is None else _label(rule.name, rule),
        by_rule_time=makespan,
        found=_label(solution.structure.placement, found.schedule),
        found_time=found.makespan,
        gain=1 - found.makespan / makespan,
        bound=proof.lower_bound,
        gap=proof.gap,
        reason=proof.reason,
        seconds=seconds,
        taken=taken,
    )
    return row, solution


def _label(name: str, schedule: Schedule) -> str:
    """``name``, the stages per device if they are several, and how many stages recompute."""
    chunks = schedule.stages // schedule.devices
    label = name + (f", {chunks} stages" if chunks > 1 else "")
    return label + (f", {len(schedule.recompute)} recompute" if schedule.recompute else "")


def solved_all(tasks: Iterable[tuple[Case, float]]) -> Iterator[tuple[Row, Solution]]:
    """The results of ``solved`` in the order of ``tasks``, on all cores."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for row, solution in pool.map(solved, tasks):
            print(f"{row.case}, {row.seconds:g} s: {row.gain:.1%}, gap {row.gap:.1%}", file=sys.stderr, flush=True)
            yield row, solution


def write_csv(name: str, rows: Sequence[dict[str, object]]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_table(name: str, headings: Sequence[str], rows: Sequence[Sequence[str]], words: str) -> None:
    """A file of Markdown: ``words``, then a table whose first column is text."""
    aligned = ["left", *["right"] * (len(headings) - 1)]
    table = tabulate(rows, headings, tablefmt="github", disable_numparse=True, colalign=aligned)
    (FOLDER / f"{name}.md").write_text(f"{words}\n\n{table}\n")


def gains() -> list[Target]:
    """All cases in SECONDS each: the table of gains, and the drawings."""
    rows = []
    for row, solution in solved_all((case, SECONDS) for case in cases()):
        rows.append(row)
        if row.case in DRAWN:
            draw(row, solution)
    write_csv("gains", [{field: _figure(value) for field, value in vars(row).items()} for row in rows])
    table = [
        [row.case, row.by_rule or "none fits", f"{row.by_rule_time:.4g}", row.found, f"{row.found_time:.4g}",
         "" if not row.by_rule else f"{round(row.gain, 6) + 0:.1%}", f"{row.gap:.1%}"]
        for row in rows
    ]  # fmt: skip
    headings = ["case, devices x micro-batches", "best by rule", "time", "found: placement", "time", "gain", "within"]
    hard = [row for row in rows if not row.case.startswith("equal:") and row.by_rule]
    mean = 100 * fmean(row.gain for row in hard)
    most = 100 * fmean(1 - row.bound / row.by_rule_time for row in hard)
    means = ", ".join(
        f"{100 * fmean(row.gain for row in hard if row.micro_batches == each * row.devices):.1f} % at N = {each}D"
        for each in (2, 4)
    )
    near = sum(row.gap <= NEAR for row in hard)
    write_table(
        "gains", headings, table,
        f"Mean gain of the {len(hard)} cases in which stages or devices differ, messages take time or a cap binds: "
        f"{mean:.1f} % ({means}); by the lower bounds it cannot exceed {most:.1f} %. {near} of the orders found are "
        f"proved to be within {NEAR:.0%} of the best possible.",
    )  # fmt: skip
    equal = max(row.found_time / row.by_rule_time - 1 for row in rows if row.case.startswith("equal:"))
    return [
        Target(what="mean gain where stages differ or a cap binds", found=mean, wish=MEAN_GAIN, unit=" %", least=True),
        Target(what="loss on equal stages without cap", found=100 * equal, wish=1e-6, unit=" %"),
    ]


def _figure(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def draw(row: Row, solution: Solution) -> None:
    """Drawings of the best schedule by rule and of the one that was found."""
    assert solution.by_rule is not None
    case = next(case for case in cases() if name_of(case) == row.case)
    by_rule = solution.by_rule[1]
    problem = merged(case.bare, by_rule)
    assert problem is not None
    name = "-".join("".join(letter if letter.isalnum() else " " for letter in row.case.lower()).split())
    FOLDER.mkdir(parents=True, exist_ok=True)
    for which, schedule, costs in (
        ("by-rule", by_rule, problem.costs),
        ("found", solution.synthesis.schedule, solution.structure.problem.costs),
    ):
        (FOLDER / f"{name}-{which}.svg").write_text(draw_svg(simulate(schedule, costs)))


def speed_case() -> Case:
    """16 devices and 128 micro-batches."""
    small = chosen(["cap: LLaMA-3 8B, 75%, 16 x 64"])[0]
    return Case(name=small.name, group="speed", bare=replace(small.bare, micro_batches=128))


def chosen(names: Sequence[str]) -> list[Case]:
    found = {name_of(case): case for case in cases()}
    return [speed_case() if name.startswith("speed:") else found[name] for name in names]


def times() -> list[Target]:
    """Some cases in several times: the table of gains against time."""
    tasks = [(case, seconds) for case in chosen(TIMED) for seconds in TIMES]
    rows = [row for row, _ in solved_all(tasks)]
    write_csv("times", [{field: _figure(value) for field, value in vars(row).items()} for row in rows])
    table, soon = [], []
    for first in range(0, len(rows), len(TIMES)):
        mine = rows[first : first + len(TIMES)]
        best = min(row.found_time for row in mine)
        near = next(row for row in mine if row.found_time <= (1 + NEAR) * best)
        soon.append(near)
        cells = [f"{row.gain:.1%} in {row.taken:.1f} s" for row in mine]
        table.append([mine[0].case, *cells, f"{near.taken:.1f} s", f"{mine[-1].gap:.1%}"])
    headings = [
        "case",
        *(f"{seconds:g} s" for seconds in TIMES),
        f"within {NEAR:.0%} of the best",
        "within, at the end",
    ]
    write_table("times", headings, table, "Gain, and processor time with everything, by the time given to the search.")
    return [Target(what=f"{soon[-1].case}, to {NEAR:.0%}", found=soon[-1].taken, wish=10.0, unit=" s")]


def emulated() -> list[Target]:
    """Some cases with real processes and messages: the best schedule by rule, and the one that was found."""
    selected = [_silent(case) for case in chosen(EMULATED)]
    results = solved_all((case, SECONDS) for case in selected)
    found = [(case, row, solution) for case, (row, solution) in zip(selected, results, strict=True)]
    stages = max(solution.structure.problem.stages for _, _, solution in found)
    captured = capture(lambda: gpt2(stages), DATA.input_specs(), MICRO_BATCH_SIZE)
    rows, targets, granted = [], [], False
    for case, row, solution in found:
        assert solution.by_rule is not None
        by_rule = solution.by_rule[1]
        rule_problem = merged(case.bare, by_rule)
        assert rule_problem is not None
        iterations = {}
        for label, schedule, problem in (
            (row.by_rule, by_rule, rule_problem),
            ("synthesized", solution.synthesis.schedule, solution.structure.problem),
        ):
            plan = Plan(
                graph=captured.graph.fingerprint,
                dp=1,
                tp=1,
                pp=schedule.devices,
                global_batch=schedule.micro_batches * MICRO_BATCH_SIZE,
                micro_batch_size=MICRO_BATCH_SIZE,
                schedule="synthesized",
                schedule_options=order_options(replace(schedule, name="synthesized")),
                stages=uniform(captured.graph, schedule.stages),
                placement=place_ranks(dp=1, pp=schedule.devices),
                seed=1,
            )
            emulation = emulation_of(problem, WORK_S / busiest(case, rule_problem))
            simulated = simulate(schedule_of(plan), emulation.costs(captured.graph, plan.stages, schedule)).makespan
            seconds, granted = measured(captured, plan, lambda rank, emulation=emulation: emulation)
            iterations[label] = simulated, median(seconds)
            spread = max(seconds) - min(seconds)
            difference = median(seconds) / simulated - 1
            rows.append(
                [row.case, label, *(f"{one:.4f}" for one in (*iterations[label], spread)), f"{difference:+.2%}"]
            )
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
        (rule_simulated, rule_real), (simulated, real) = iterations.values()
        gained = [1 - simulated / rule_simulated, 1 - real / rule_real]
        rows.append([row.case, "gain", *(f"{gain:.1%}" for gain in gained), "", f"{gained[1] - gained[0]:+.2%}"])
        targets.append(
            Target(what=f"{row.case}, lost gain", found=100 * (gained[0] - gained[1]), wish=100 * TOLERANCE, unit=" %")
        )
    here = Environment.here("cpu")
    headings = ["case", "schedule", "simulated", "emulated", "spread", "difference"]
    write_csv("emulated", [dict(zip(headings, row, strict=True)) for row in rows])
    write_table(
        "emulated", headings, rows,
        f"Seconds per iteration, median of {ITERATIONS} after a warm-up, {'with' if granted else 'without'} real-time "
        f"scheduling; {here.cores} cores, load average {os.getloadavg()[1]:.1f}, torch {here.torch}.",
    )  # fmt: skip
    return targets


def _silent(case: Case) -> Case:
    """``case`` as emulation has it for the simulator: messages take no time, and no stage has copies to sum."""
    messages = (MessageCost(),) * (case.bare.stages - 1)
    return replace(case, bare=replace(case.bare, messages=messages, placements=ONE_COPY))


def gpt2(layers: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers, n_embd=WIDTH, n_head=2, n_positions=SEQUENCE, vocab_size=256, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def busiest(case: Case, problem: Problem) -> float:
    """The time of one micro-batch on the busiest device if stages are merged as in ``problem``."""
    costs, work = problem.costs, [0.0] * case.bare.devices
    for (stage, _), device in problem.device_of.items():
        work[device] += (costs.forward[stage] + costs.backward[stage]) / costs.speed[device] / problem.pipes
    return max(work)


def emulation_of(problem: Problem, unit: float) -> Emulation:
    """The times of ``problem``, each of them ``unit`` times as long in seconds; messages take their own time.

    Stages run on one device each, or on devices of one speed.
    """
    costs = problem.costs
    speed = {stage: costs.speed[device] for (stage, _), device in problem.device_of.items()}

    def scaled(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(unit * time / speed[stage] for stage, time in enumerate(values))

    return Emulation(
        forward_s=scaled(costs.forward),
        backward_s=scaled(costs.backward),
        backward_input_s=scaled(costs.backward_input),
        backward_weight_s=scaled(costs.backward_weight),
        recompute_s=scaled(costs.recompute),
    )


PARTS: dict[str, Callable[[], list[Target]]] = {"gains": gains, "times": times, "emulated": emulated}


def main() -> None:
    end([target for name in sys.argv[1:] or PARTS for target in PARTS[name]()])


if __name__ == "__main__":
    main()
