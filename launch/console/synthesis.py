"""`auto3d schedule synthesize`: prints the best order of a bare problem beside the best schedule by rule."""

from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from time import perf_counter

from rich.console import Console
from tabulate import tabulate

from auto3d.schedule.order_text import write_recompute
from auto3d.simulate.draw_terminal import draw_terminal
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.certificate import SOLVER_SECONDS, Certificate, certificate
from auto3d.synthesis.problem import peaks
from auto3d.synthesis.structures import Solution, Structure, solve, structures, weights_on
from auto3d.words import counted
from launch.console.output import print_json
from launch.console.progress import work_progress
from launch.console.schedule import write_files
from launch.model.problem_file import read_problem
from launch.model.simulated_schedule import figures_of


def print_synthesis(
    path: str, out: Console, err: Console, *, seconds: float, seed: int, as_json: bool, files: dict[str, str | None]
) -> None:
    """Solve the problem in ``path``, print the order and write ``files``: format (save, svg, trace, csv) -> path.

    Progress goes to ``err``.
    """
    bare = read_problem(path)
    open_structures = structures(bare)
    began = perf_counter()
    with work_progress(err) as tell:

        def search(structure: Structure, least: float) -> None:
            kind = f"{structure.placement}, {counted(structure.problem.stages, 'stage')}"
            tell(f"searching orders for {seconds:g} s: {kind}" + (f"; best so far {least:.6g}" if least < inf else ""))

        solution = solve(open_structures, seconds=seconds, seed=seed, tell=search)
        took = perf_counter() - began
        tell(f"found {solution.synthesis.makespan:.6g}; proving how good it is")
        certified = certificate(
            [structure.problem for structure in open_structures],
            solution.synthesis.schedule,
            solution.synthesis.makespan,
            seconds=SOLVER_SECONDS,
        )
    timeline = simulate(solution.synthesis.schedule, solution.structure.problem.costs)
    made_by = f"auto3d schedule synthesize {Path(path).name}: makespan {timeline.makespan:.6g}"
    written = write_files(timeline, files, made_by=made_by)
    problem = solution.structure.problem
    held = peaks(problem, solution.synthesis.schedule)
    weights = weights_on(bare, solution.synthesis.schedule)
    if as_json:
        print_json(asdict(figures_of(timeline)) | _record(solution, certified, weights, held, took))
        return
    out.print(draw_terminal(timeline, width=out.width, colour=bool(out.color_system) and not out.no_color))
    print(_table(bare.memory, weights, held))
    print(f"\n{_summary(solution)}\ncertificate     {certified}")
    print(f"Simulated, not measured: {counted(len(open_structures), 'structure')} searched in {took:.1f} s")
    if written:
        print(f"written: {', '.join(written)}")


def _record(
    solution: Solution, certified: Certificate, weights: list[float], held: list[float], took: float
) -> dict[str, object]:
    """What the figures of any schedule do not have."""
    by_rule = solution.by_rule
    return {
        "placement": solution.structure.placement,
        "begun_from": solution.synthesis.begun_from,
        "memory": [kept + most for kept, most in zip(weights, held, strict=True)],
        "by_rule": None if by_rule is None else {"schedule": by_rule[1].name, "makespan": by_rule[0]},
        "gain": None if by_rule is None else _gain(solution),
        "certificate": asdict(certified) | {"gap": certified.gap},
        "seconds": took,
    }


def _table(memory: Sequence[float], weights: list[float], held: list[float]) -> str:
    rows = [
        [f"P{device}", f"{kept:.4g}", f"{most:.4g}", "unlimited" if has == inf else f"{has:.4g}"]
        for device, (kept, most, has) in enumerate(zip(weights, held, memory, strict=True))
    ]
    headings = ["device", "weights", "activations\nat the peak", "memory"]
    return tabulate(rows, headings, colalign=["left", *["right"] * 3], disable_numparse=True)


def _summary(solution: Solution) -> str:
    schedule, synthesis = solution.synthesis.schedule, solution.synthesis
    own = f"synthesized     {synthesis.makespan:.6g}: {solution.structure.placement} placement"
    own += f", stages {write_recompute(schedule.recompute, schedule.stages)} recompute" if schedule.recompute else ""
    if solution.by_rule is None:
        return f"best by rule    none fits the memory\n{own}"
    makespan, best = solution.by_rule
    return f"best by rule    {makespan:.6g}: {best.name}\n{own}; {_gain(solution):.1%} less time"


def _gain(solution: Solution) -> float:
    """The fraction of the time of the best schedule by rule that the order saves."""
    assert solution.by_rule is not None
    makespan, _ = solution.by_rule
    return 1 - solution.synthesis.makespan / makespan if makespan else 0.0
