"""Measure how long a search takes to make and bound plans: python -m tests.benchmarks.estimates [RECIPE ...]

Makes the Plan of every candidate of each recipe, with its exact memory and the lower bound of its time, and prints what
that took of the processor. Nothing is simulated. Captures do not count; with a warm cache they take a few seconds each.
"""

import sys
from time import process_time
from unittest.mock import patch

from tabulate import tabulate

from auto3d.cost.memory import segments
from auto3d.errors import InputError
from auto3d.search.bound import least_s
from auto3d.search.make import PlanMaker
from auto3d.search.space import Domain
from auto3d.share import Share
from launch.model.candidates import task
from launch.model.costs import cost_model, planning_subject
from launch.recipe.load import load
from launch.recipe.settings import search_space
from launch.report.release import Target
from tests.targets import end

RECIPES = ("gpt20b", "gpt8.3b", "gpt175b", "llama3-70b")
RECOMPUTE = ("none", "full", "auto")
HEADINGS = ["recipe", "recompute", "candidates", "plans", "estimates", "segments", "CPU s", "candidates/s"]


def measure(name: str, recompute: str) -> tuple:
    """A row of the table. Estimates are those of one device; segments are runs of operations that were counted."""
    recipe = load(name, [f"search.recompute=[{recompute}]"])
    subject = planning_subject(recipe)
    model = cost_model(recipe, subject)
    domain = Domain(search_space(recipe.values), model.cluster, task(recipe))
    maker = PlanMaker(subject, model, task(recipe))
    kinds = domain.choices["sequence_parallel"]
    degrees = {(one.micro_batch_size, one.tp, kind and one.tp > 1) for one in domain.degrees for kind in kinds}
    maker.prepare((samples, Share(tp=tp, sequence_parallel=kind)) for samples, tp, kind in sorted(degrees))
    estimates, of_device = 0, model.memory.of_device

    def counted(*arguments):
        nonlocal estimates
        estimates += 1
        return of_device(*arguments)

    model.memory.of_device = counted
    begin, candidates, plans = process_time(), 0, 0
    with patch.object(segments, "segment_of", wraps=segments.segment_of) as runs:
        for candidate in domain:
            candidates += 1
            try:
                model.slowest_pipeline_s(maker.plan(candidate), least_s)
                plans += 1
            except InputError:
                pass
    spent = process_time() - begin
    return name, recompute, candidates, plans, estimates, runs.call_count, f"{spent:.2f}", round(candidates / spent)


def main() -> None:
    rows = []
    for name in sys.argv[1:] or RECIPES:
        for recompute in RECOMPUTE:
            rows.append(measure(name, recompute))
            print(*rows[-1], flush=True)
    print(tabulate(rows, HEADINGS, tablefmt="github", disable_numparse=True))
    slowest = min(row[-1] for row in rows)
    end([Target(what="candidates made and bounded, least", found=slowest, wish=100, unit=" per s", least=True)])


if __name__ == "__main__":
    main()
