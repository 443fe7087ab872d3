"""AMP's mixed cluster by emulated trials: python -m tests.benchmarks.mixed

Compares the best plan of the exhaustive search on 12 V100 and 4 T4 with the best that Megatron-LM can run, and with the
best of AMP's three heuristics for it. Real
processes exchange messages of real size, and operations take the time that the cost model predicts for each rank's
device. One process stands for a whole tensor-parallel group: its operations include the group's collectives, and it
sends the messages of all ranks of the group. Messages stay on this machine and do not use the cluster's links.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from tabulate import tabulate

from auto3d.capture.model import CapturedModel, capture
from auto3d.cluster import place_ranks
from auto3d.cost.tables import WorkTables
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan
from auto3d.runtime.emulated.settings import Emulation
from auto3d.search.search import Search
from launch.model.search import search_recipe
from launch.recipe.load import load
from launch.report.release import Target
from tests.benchmarks.emulated import DATA, gpt2, measured
from tests.benchmarks.search import AXES, MIXED, TUNED
from tests.targets import end

FILE = Path("results/search/mixed.md")
SEARCHES = {
    "three heuristics of Megatron-LM": [*AXES, "search.algorithm=megatron"],
    "all plans of Megatron-LM": TUNED,
    "exhaustive": [*AXES, "search.algorithm=exhaustive"],
}
HEADS = ["search", "predicted (s)", "emulated (s)", "spread (s)", "processes", "plan"]

TEXT = """# AMP's mixed cluster by emulated trials

    python -m tests.benchmarks.mixed

On the cluster of AMP's released results (p3-mixed), under 1F1B. The best plan is, emulated, **{tuned[1]:.2f} times**
as fast ({tuned[0]:.2f} by the simulator) as the best of all plans that Megatron-LM can run: equal stages in its own
order of ranks, at any degrees and micro-batch size. It is {heuristics[1]:.2f} times as fast ({heuristics[0]:.2f} by
the simulator) as the best of the three heuristics that AMP compares with; AMP measured 1.37 times there, on a cluster
of other nodes (amp-mixed).

{table}

Emulated: real processes, schedules, messages and gradient syncs of true size; operations take the times of
the cost model on the device that a rank stands for. A tensor-parallel group is one process: its operations
take their time with the group's collectives, and it sends what its ranks send together. All travels through
one machine, not through the cluster's links, and there are no updates: so emulated times are not meant to
equal those of the simulator, which has both.
"""


def stand_in(captured: CapturedModel, plan: Plan) -> Plan:
    """A plan of a small model with the pipelines of ``plan``, where one process stands for a tensor-parallel group."""
    return replace(
        plan,
        graph=captured.graph.fingerprint,
        tp=1,
        stages=uniform(captured.graph, len(plan.stages)),
        placement=place_ranks(dp=plan.dp, pp=plan.pp),
    )


def emulations(search: Search, plan: Plan) -> list[Emulation]:
    """The emulated times and sizes of each pipeline on its devices."""
    model, work = search.maker.model, search.maker.planned.work(plan.micro_batch_size)
    ends = [stage.operations[-1][1] for stage in plan.stages]
    sizes = {
        "send_bytes": tuple(max(1.0, float(work.crossing[end])) for end in ends),
        "sync_bytes": tuple(
            model.training.sync_bytes * WorkTables(work).parameters(stage.operations) for stage in plan.stages
        ),
    }
    costs = [model.costs(plan, pipeline) for pipeline in range(plan.dp)]
    return [
        Emulation(forward_s=one.forward, backward_s=one.backward, recompute_s=one.recompute, **sizes) for one in costs
    ]


def of_rank(plan: Plan, pipelines: list[Emulation]) -> Callable[[int], Emulation]:
    """A function from a rank to the emulation of its pipeline."""
    return lambda rank: pipelines[plan.position(rank)[1]["pipeline"]]


def main() -> None:
    rows, times = [], []
    for name, axes in SEARCHES.items():
        search = search_recipe(load(MIXED, [*axes, "search.candidates=3000"]))
        best = search.ranked()[0]
        captured = capture(gpt2, DATA.input_specs(), best.plan.micro_batch_size)
        plan = stand_in(captured, best.plan)
        iterations, _ = measured(captured, plan, of_rank(plan, emulations(search, best.plan)))
        times.append((best.seconds, median(iterations)))
        spread = max(iterations) - min(iterations)
        rows.append((name, *(f"{one:.3f}" for one in (*times[-1], spread)), plan.ranks, best.candidate))
        print(*rows[-1], flush=True)
    heuristics, tuned = (
        [slow / fast for slow, fast in zip(other, times[-1], strict=True)] for other in times[:-1]
    )  # by the simulator, emulated
    table = tabulate(rows, HEADS, tablefmt="github", disable_numparse=True)
    text = TEXT.format(tuned=tuned, heuristics=heuristics, table=table)
    FILE.write_text(text)
    print(text)
    what = "mixed cluster, emulated: speed of the best plan over the best of Megatron-LM"
    end([Target(what=what, found=tuned[1], wish=1, unit=" ×", least=True)])


if __name__ == "__main__":
    main()
