"""A mixed cluster for real, two nodes at 1 Gbit/s and two at 100 Mbit/s: python -m tests.benchmarks.mixed_slurm

On the cluster of `make cluster-up`; without one, nothing is measured. Each step is a command of the user's: all nodes
are profiled at a time, `auto3d tune` searches recipes/mixed.yaml, once by itself, once by Megatron-LM's heuristics and
once among all plans of Megatron-LM, and the plans that came of it train in turns. What crosses the slow links is
counted by the kernel, on their nodes. Writes results/slurm/mixed.md; takes 20 minutes.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tabulate import tabulate

from auto3d.capture.graph import Graph
from auto3d.cluster import Cluster
from auto3d.partition.stage import cut
from auto3d.plan import Plan
from auto3d.resplit import pieces
from auto3d.runtime.messages.gradient_sync import holders
from auto3d.schedule import samples_at_once, schedule_of
from launch.console.tables import TABLES
from launch.model.candidates import exact_plans
from launch.model.costs import captured_subject, cost_model
from launch.model.graphs import PlanningModel
from launch.model.search import search_recipe
from launch.recipe.load import LoadedRecipe, load
from launch.recipe.settings import cluster as cluster_of
from launch.report.release import Target
from tests.slurm.conftest import PROGRAM, SlurmCluster, found_cluster
from tests.targets import end, nothing_measured

FILE = Path("results/slurm/mixed.md")
RECIPE = "mixed"
MBIT_S = {"n1": 1000, "n2": 1000, "n3": 100, "n4": 100}  # the links that the recipe describes
SLOW = ("n3", "n4")
MEGATRON = ["search.algorithm=megatron", "search.placement=[megatron]"]
TUNED = [  # all that Megatron-LM can run under 1F1B
    "search.algorithm=exhaustive",
    "search.partition=[blocks]",
    "search.placement=[megatron]",
    "search.schedule=[1f1b]",
    "search.replicas=[equal]",
]
ROUNDS = 5  # trainings of each plan, in turns
ITERATIONS = 3  # measured iterations of each training, after the first one
LIMIT_S = 600  # time limit of one command
TEXT = """# A mixed cluster, for real

    make cluster-up
    python -m tests.benchmarks.mixed_slurm

Four nodes of two processes each, n1 and n2 with links of 1 Gbit/s, n3 and n4 with 100 Mbit/s: recipes/mixed.yaml.
The plan of `auto3d tune` is {ratios}.
The heuristics are the three that AMP compares with. All plans of Megatron-LM are those with equal stages in its own
order of ranks under 1F1B, at any degrees, with tensor parallelism inside nodes, and any micro-batch size of the recipe.

{table}

Times are of an iteration: medians of {rounds} trainings of each plan, in turns, each the median of {iterations}
iterations after a first one. MB are those of an iteration that cross the links of n3 and n4, in and out: predicted, the
plan's messages and the rings of its gradients' all-reduces, where it has no tensor parallelism; counted, what the
kernel of these nodes counted during a training, with headers and acknowledgements, and with what the ranks' meeting and
SLURM itself send.

## How it was made

Real compute of a GPT-2 of 14.3 million parameters, real messages and all-reduces of gloo; `auto3d tune` and
`auto3d train` with launch.executor=slurm. Nodes are network namespaces of one machine, and `tc` shapes their links
(docs/slurm.md). That leaves out a link's latency, where the kernel cannot add it, and processors of the nodes' own:
eight processes share {cores} cores, with what else runs there (load average {load:.0f}), so each is the slower the more
of them compute. The cost model knows that of the processes of one node alone. So `auto3d profile` measured on all four
nodes at a time, and predictions are of nodes that have a quarter of the machine each, whatever the others do. It tells
more of plans that wait for links than of those that mostly compute, between which trials decide.

## The trials of `auto3d tune mixed`

{tuned}

## The trials of `auto3d tune mixed search.algorithm=megatron search.placement=[megatron]`

{heuristic}

## The trials of `auto3d tune mixed` among all plans of Megatron-LM

{all_plans}
"""
AUTO3D = [sys.executable, "-m", "launch.main"]
ONE_NODE = ["cluster.nodes=1", "cluster.more=[]"]


@dataclass
class Compared:
    """A plan with the measurements of its trainings."""

    names: list[str]  # names of the methods that chose it
    plan: Plan
    medians: list[float] = field(default_factory=list)  # seconds of an iteration, one entry per training
    crossed: list[float] = field(default_factory=list)  # bytes per iteration on the slow links, in and out


def link_bytes(plan: Plan, graph: Graph, cluster: Cluster) -> list[float]:
    """Bytes that an iteration of ``plan``, without tensor parallelism, sends through each node's link, in and out.

    They are the messages between stages, of which each is on another device, and the gradients' all-reduces on rings in
    the order of ranks, as in gloo.
    """
    totals = [0.0] * len(cluster.nodes)

    def add(source: int, target: int, size: float) -> None:
        ends = {cluster.node_of[source], cluster.node_of[target]}
        for node in ends if len(ends) > 1 else ():
            totals[node] += size

    stages = cut(graph, plan.stages)
    micro_batches = plan.global_batch // (plan.dp * plan.micro_batch_size)
    for stage in stages:
        for transfer in stage.sent:
            size = micro_batches * transfer.value.bytes * (2 if transfer.value.differentiable else 1)
            for here, there, fraction in _pairs(plan, transfer.source, transfer.target):
                add(here, there, fraction * size)
    for name, held in holders(plan, schedule_of(plan), stages, graph.trained).items():
        size = 2 * (len(held.ranks) - 1) / len(held.ranks) * graph.parameters[name].bytes
        for here, there in pairwise([*held.ranks, held.ranks[0]]):
            add(here, there, size)
    return totals


def _pairs(plan: Plan, source: int, target: int) -> list[tuple[int, int, float]]:
    """(sender, receiver, fraction of the samples) for the ranks that exchange a micro-batch between two stages."""
    samples = plan.micro_batch_size
    counts = [plan.stages[stage].replicas for stage in (source, target)]
    return [
        (
            plan.placement[source][pipeline * counts[0] + piece.source],
            plan.placement[target][pipeline * counts[1] + piece.target],
            piece.length / samples,
        )
        for pipeline in range(plan.dp)
        for piece in pieces(samples, sources=counts[0], targets=counts[1])
    ]


def crossed(cluster: SlurmCluster) -> int:
    """Bytes that the kernel has counted on the slow links so far, in and out."""
    total = 0
    for node in SLOW:
        output = cluster.run("srun", "--nodes=1", f"--nodelist={node}", "cat", "/proc/net/dev")
        counts = re.search(r"eth0: *(.*)", output).group(1).split()
        total += int(counts[0]) + int(counts[8])
    return total


def profile(cluster: SlurmCluster, folder: Path) -> None:
    """Measure a profile on all nodes at the same time, since they share this machine's cores; use that of the first."""
    script = f"mkdir $SLURMD_NODENAME && cd $SLURMD_NODENAME && {shlex.join([*AUTO3D, 'profile', RECIPE, *ONE_NODE])}"
    cluster.run("srun", "--nodes=4", "--ntasks-per-node=1", "sh", "-c", script, cwd=folder, timeout_s=LIMIT_S)
    (folder / "profiles").symlink_to(folder / "n1" / "profiles")


def tune(cluster: SlurmCluster, folder: Path, *overrides: str) -> tuple[Plan, str]:
    """(fastest plan by its trials, table of all trials)."""
    print(cluster.run(*AUTO3D, "tune", RECIPE, *overrides, cwd=folder, timeout_s=LIMIT_S), flush=True)
    tables = folder / TABLES / "mixed"
    return Plan.from_json((tables / "best_plan.json").read_bytes()), (tables / "tune.md").read_text()


def train(cluster: SlurmCluster, folder: Path, number: int, one: Compared) -> None:
    """Train for a few iterations under the plan of ``one``, and record time and bytes."""
    file = folder / f"plan-{number}.json"
    file.write_text(one.plan.to_json())
    command = [*AUTO3D, "train", RECIPE, f"--plan={file}", f"training.iterations={1 + ITERATIONS}", "--fresh", "--json"]
    before = crossed(cluster)
    record = json.loads(cluster.run(*command, cwd=folder, timeout_s=LIMIT_S))
    one.crossed.append((crossed(cluster) - before) / (1 + ITERATIONS))
    one.medians.append(median(record["iteration_s"][1:]))
    print(", ".join(one.names), f"{one.medians[-1]:.3f} s, {one.crossed[-1] / 1e6:.1f} MB", flush=True)


def first_choice(recipe: LoadedRecipe) -> Plan:
    """The plan that a search predicts to be fastest, before any trial."""
    return exact_plans(recipe)(search_recipe(recipe).ranked()[0])


def described(plan: Plan, cluster: Cluster) -> str:
    names = list(MBIT_S)
    homes = (dict.fromkeys(names[cluster.node_of[rank]] for rank in ranks) for ranks in plan.placement)
    stages = ", ".join(" ".join(nodes) for nodes in homes)
    degrees = f"dp={plan.dp} tp={plan.tp} pp={plan.pp}"
    return f"{degrees} micro-batch={plan.micro_batch_size} {plan.schedule}; stages on {stages}"


def measure(cluster: SlurmCluster, folder: Path) -> tuple[str, float]:
    """Run the whole benchmark; returns the report, and the speed of tune's plan over the best of Megatron-LM."""
    os.environ.update(cluster.environment)
    os.chdir(folder)  # the folder of the profile and the results
    profile(cluster, folder)
    tuned, tuned_table = tune(cluster, folder)
    heuristic, heuristic_table = tune(cluster, folder, *MEGATRON)
    best, best_table = tune(cluster, folder, *TUNED)
    recipe = load(RECIPE)
    chosen = {
        "`auto3d tune`": tuned,
        "first choice of Megatron-LM's heuristics": first_choice(load(RECIPE, MEGATRON)),
        "their best by trials": heuristic,
        "best of all plans of Megatron-LM by trials": best,
    }
    plans: dict[Plan, Compared] = {}
    for name, plan in chosen.items():
        plans.setdefault(plan, Compared([], plan)).names.append(name)
    compared = list(plans.values())
    for _ in range(ROUNDS):
        for number, one in enumerate(compared):
            train(cluster, folder, number, one)
    ours, theirs = plans[tuned], plans[best]
    return report(recipe, compared, [tuned_table, heuristic_table, best_table]), median(paired(theirs, ours))


def report(recipe: LoadedRecipe, compared: Sequence[Compared], tables: Sequence[str]) -> str:
    model = PlanningModel(recipe)
    costs = cost_model(recipe, captured_subject(model))
    cluster = cluster_of(recipe)
    rows = []
    for one in compared:
        slow = "–"
        if one.plan.tp == 1:
            expected = link_bytes(one.plan, model.graph(samples_at_once(one.plan)), cluster)
            slow = f"{sum(size for size, name in zip(expected, MBIT_S, strict=True) if name in SLOW) / 1e6:.1f}"
        rows.append(
            (
                ", also ".join(one.names),
                described(one.plan, cluster),
                f"{costs.seconds(one.plan):.2f}",
                f"{median(one.medians):.2f}",
                f"{min(one.medians):.2f} to {max(one.medians):.2f}",
                slow,
                f"{median(one.crossed) / 1e6:.1f}",
            )
        )
    heads = [
        "chosen by",
        "plan",
        "predicted (s)",
        "measured (s)",
        "lowest to highest",
        "predicted (MB)",
        "counted (MB)",
    ]
    best, *others = compared
    ratios = " and ".join(
        f"**{median(one.medians) / median(best.medians):.2f} times** as fast as the {', also '.join(one.names)} "
        f"(in single rounds {min(paired(one, best)):.2f} to {max(paired(one, best)):.2f})"
        for one in others
    )
    return TEXT.format(
        ratios=ratios or "that of Megatron-LM's heuristics, too",
        table=tabulate(rows, heads, tablefmt="github", disable_numparse=True),
        rounds=ROUNDS,
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[2],
        iterations=ITERATIONS,
        tuned=tables[0].strip(),
        heuristic=tables[1].strip(),
        all_plans=tables[2].strip(),
    )


def paired(one: Compared, other: Compared) -> list[float]:
    """Ratio of the times of ``one`` and ``other`` in each round."""
    return [here / there for here, there in zip(one.medians, other.medians, strict=True)]


def why_not() -> str:
    """Why nothing can be measured here; empty if the recipe's cluster is up."""
    status = subprocess.run([*PROGRAM, "status"], capture_output=True, text=True, timeout=120, check=False)
    if status.returncode:
        return f"no SLURM cluster ({(status.stderr or status.stdout).strip().splitlines()[-1]})"
    found = {name: int(rate) for name, rate in re.findall(r"^(\S+) .*?(\d+) Mbit/s", status.stdout, re.MULTILINE)}
    return "" if found == MBIT_S else f"the cluster that is up is not that of recipes/mixed.yaml: its links are {found}"


def main() -> None:
    if reason := why_not():
        nothing_measured(reason)
    file = FILE.resolve()
    with TemporaryDirectory() as folder:
        text, speed_up = measure(found_cluster(), Path(folder))
        os.chdir(file.parents[2])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    print(text)
    what = "mixed cluster, trained: speed of tune's plan over the best of Megatron-LM"
    end([Target(what=what, found=speed_up, wish=1, held=0.95, unit=" ×", least=True)])


if __name__ == "__main__":
    main()
