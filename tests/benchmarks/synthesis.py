"""Synthesized schedules against the best by rule: python -m tests.benchmarks.synthesis [gains] [times] [emulated]

Solves the cases of tests/synthesis/cases.py, and writes tables and drawings to results/synthesis. ``gains``: each case
in SECONDS of processor time. ``times``: some cases in less and in more time. ``emulated``: the cases of the gains on
real processes. Without arguments, all three (an hour). ``gains emulated`` solves each case once. Each part ends with
its targets; the exit code is 1 if one is missed.
"""

import csv
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from math import nan
from pathlib import Path
from statistics import fmean, median
from typing import ClassVar

from tabulate import tabulate
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.capture.model import CapturedModel, capture
from auto3d.cluster import place_ranks
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan
from auto3d.runtime.emulated.settings import Emulation
from auto3d.runtime.measurement import Environment
from auto3d.schedule.operation import Schedule
from auto3d.schedule.order_text import order_options
from auto3d.simulate.draw_svg import draw_svg
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.certificate import certificate
from auto3d.synthesis.problem import Problem
from auto3d.synthesis.structures import Solution, merged, solve, structures
from launch.report.release import Target
from tests.benchmarks.emulated import DATA, ITERATIONS, MICRO_BATCH_SIZE, SEQUENCE, WIDTH, measured
from tests.synthesis.cases import Case, cases
from tests.targets import end

FOLDER = Path("results/synthesis")
SECONDS = 30.0
TIMES = (1.0, 3.0, 10.0)
TIMED = (
    "cap: equal, 75%, 8 x 32",
    "cap: GPT-1.4B, 50%, 8 x 32",
    "speed: LLaMA-3 8B, 75%, 16 x 128",
)
DRAWN = ("cap: GPT-1.4B, 75%, 8 x 32", "encoder-decoder: T5-11B, 8 x 32")
WORK_S = 0.1  # emulated time of one micro-batch on the busiest device
WORK_WITHOUT_LINKS_S = 0.2  # the same if simulated messages take no time: real ones take some, which must be small
TOLERANCE = 3.0  # per cent, between emulated and simulated iterations and gains
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


@cache
def all_solved() -> list[tuple[Case, Row, Solution]]:
    """All cases, solved in SECONDS each."""
    every = list(cases())
    results = solved_all((case, SECONDS) for case in every)
    return [(case, row, solution) for case, (row, solution) in zip(every, results, strict=True)]


def is_hard(row: Row) -> bool:
    """Whether stages or devices differ, messages take time or a cap binds, and a schedule by rule fits the memory."""
    return not row.case.startswith("equal:") and bool(row.by_rule)


def gains() -> list[Target]:
    """The table of gains, and the drawings."""
    rows = [row for _, row, _ in all_solved()]
    for case, row, solution in all_solved():
        if row.case in DRAWN:
            draw(case, row, solution)
    write_csv("gains", [{field: _figure(value) for field, value in vars(row).items()} for row in rows])
    table = [
        [row.case, row.by_rule or "none fits", f"{row.by_rule_time:.4g}", row.found, f"{row.found_time:.4g}",
         "" if not row.by_rule else f"{round(row.gain, 6) + 0:.1%}", f"{row.gap:.1%}"]
        for row in rows
    ]  # fmt: skip
    headings = ["case, devices x micro-batches", "best by rule", "time", "found: placement", "time", "gain", "within"]
    hard = [row for row in rows if is_hard(row)]
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


def draw(case: Case, row: Row, solution: Solution) -> None:
    """Drawings of the best schedule by rule and of the one that was found."""
    assert solution.by_rule is not None
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
    """The cases of the gains with real processes: the best schedule by rule, and the one that was found."""
    found = [each for each in all_solved() if is_hard(each[1])]
    stages = max(solution.structure.problem.stages for _, _, solution in found)
    captured = capture(lambda: gpt2(stages), DATA.input_specs(), MICRO_BATCH_SIZE)
    rows, granted = [], False
    for case, row, solution in found:
        assert solution.by_rule is not None
        by_rule = solution.by_rule[1]
        rule_problem = merged(case.bare, by_rule)
        assert rule_problem is not None
        has_links = any(message.latency + message.forward for message in rule_problem.costs.messages)
        unit = (WORK_S if has_links else WORK_WITHOUT_LINKS_S) / busiest(case, rule_problem)
        iterations: list[float] = []  # simulated and emulated seconds: by rule, then of the order found
        spread = 0.0
        for schedule, problem in (
            (by_rule, rule_problem),
            (solution.synthesis.schedule, solution.structure.problem),
        ):
            seconds, granted = measured(captured, plan_of(captured, schedule), emulation_by_rank(problem, unit))
            iterations += [unit * simulate(schedule, problem.costs).makespan, median(seconds)]
            spread = max(spread, max(seconds) / min(seconds) - 1)
        rows.append(Emulated(row.case, row.by_rule, *iterations, spread))
        print(" | ".join(rows[-1].cells()), file=sys.stderr, flush=True)
    here = Environment.here("cpu")
    write_csv("emulated", [{field: _figure(value) for field, value in vars(row).items()} for row in rows])
    write_table(
        "emulated", Emulated.HEADINGS, [row.cells() for row in rows],
        f"Seconds per iteration, median of {ITERATIONS} after a warm-up, {'with' if granted else 'without'} real-time "
        f"scheduling; {here.cores} cores, load average {os.getloadavg()[1]:.1f}, torch {here.torch}. Each is followed "
        "by its difference to the simulator. The spread is that of the iterations of a run, from the fastest to the "
        "slowest.",
    )  # fmt: skip
    most = max(abs(difference) for row in rows for difference in (row.difference_by_rule, row.difference))
    lost = max(row.gain_simulated - row.gain for row in rows)
    return [
        Target(what="largest difference of an iteration to the simulator", found=100 * most, wish=TOLERANCE, unit=" %"),
        Target(what="largest part of a gain that is lost", found=100 * lost, wish=TOLERANCE, unit=" %"),
    ]


@dataclass(frozen=True)
class Emulated:
    """Seconds per iteration of one case."""

    HEADINGS: ClassVar = (
        "case, devices x micro-batches", "best by rule", "emulated", "", "found", "", "gain simulated", "emulated",
        "spread",
    )  # fmt: skip

    case: str
    by_rule: str
    by_rule_simulated: float
    by_rule_emulated: float
    simulated: float
    emulated: float
    spread: float  # largest of the two runs, relative

    @property
    def difference_by_rule(self) -> float:
        return self.by_rule_emulated / self.by_rule_simulated - 1

    @property
    def difference(self) -> float:
        return self.emulated / self.simulated - 1

    @property
    def gain_simulated(self) -> float:
        return 1 - self.simulated / self.by_rule_simulated

    @property
    def gain(self) -> float:
        return 1 - self.emulated / self.by_rule_emulated

    def cells(self) -> list[str]:
        """The row of the table, by HEADINGS."""
        times = [f"{self.by_rule_emulated:.3f}", f"{self.difference_by_rule:+.1%}"]
        times += [f"{self.emulated:.3f}", f"{self.difference:+.1%}"]
        return [self.case, self.by_rule, *times, f"{self.gain_simulated:.1%}", f"{self.gain:.1%}", f"{self.spread:.1%}"]


def plan_of(captured: CapturedModel, schedule: Schedule) -> Plan:
    """The plan that runs exactly the operations of ``schedule``."""
    return Plan(
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


def gpt2(layers: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers, n_embd=WIDTH, n_head=2, n_positions=SEQUENCE, vocab_size=256, use_cache=False,
            bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
        )
    )  # fmt: skip


def busiest(case: Case, problem: Problem) -> float:
    """The time of one micro-batch on the busiest device if stages are merged as in ``problem``."""
    costs, work = problem.costs, [0.0] * case.bare.devices
    for (stage, _), device in problem.device_of.items():
        work[device] += (costs.forward[stage] + costs.backward[stage]) / costs.speed[device] / problem.pipes
    return max(work)


def emulation_by_rank(problem: Problem, unit: float) -> Callable[[int], Emulation]:
    """The times of ``problem`` on each device, each of them ``unit`` times as long in seconds."""
    costs = problem.costs
    assert costs.overlap
    assert not any(costs.update)
    assert all(message.forward == message.backward for message in costs.messages)

    def emulation(rank: int) -> Emulation:
        def seconds(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(unit * time / costs.speed[rank] for time in values)

        return Emulation(
            forward_s=seconds(costs.forward),
            backward_s=seconds(costs.backward),
            backward_input_s=seconds(costs.backward_input),
            backward_weight_s=seconds(costs.backward_weight),
            recompute_s=seconds(costs.recompute),
            send_s=(*(unit * (message.latency + message.forward) for message in costs.messages), 0.0),
            sync_s=tuple(unit * time for time in costs.sync),
        )

    return emulation


PARTS: dict[str, Callable[[], list[Target]]] = {"gains": gains, "times": times, "emulated": emulated}


def main() -> None:
    end([target for name in sys.argv[1:] or PARTS for target in PARTS[name]()])


if __name__ == "__main__":
    main()
