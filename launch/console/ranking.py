"""`auto3d plan`: the candidates of a recipe, fastest first by prediction, and why the best is best."""

from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from auto3d.cost.device_memory import in_gib
from auto3d.cost.model import Estimate
from auto3d.errors import InputError
from auto3d.search.search import Ranked, Search
from auto3d.search.space import Candidate, Refusals
from launch.console.output import print_json
from launch.model.candidates import exact_plans
from launch.model.profile import basis, how_to_measure
from launch.model.search import algorithm, cannot_run
from launch.recipe.load import LoadedRecipe

SHOWN, EXPLAINED = 20, 3
HEADINGS = (
    "predicted\n(s)",
    "dp",
    "tp",
    "pp",
    "micro-\nbatch",
    "schedule",
    "recompute",
    "partition",
    "placement",
    "more",
)
PARTS = {
    "compute": "compute_s",
    "bubble": "bubble_s",
    "exposed tp": "tensor_s",
    "exposed p2p": "message_s",
    "exposed dp": "sync_s",
    "update": "update_s",
}


def print_plans(recipe: LoadedRecipe, search: Search, *, as_json: bool, show_all: bool) -> None:
    ranked, refused = search.ranked(), search.refused()
    if as_json:
        print_json(_record(recipe, search, ranked, refused))
        return
    shown = ranked if show_all else ranked[:SHOWN]
    rows = [(*cells(one), cannot_run(one.plan)) for one in shown]
    print(tabulate(rows, [*HEADINGS, "does not run yet"], disable_numparse=True))
    if len(shown) < len(ranked):
        print(f"… and {len(ranked) - len(shown)} more (--all)")
    print(f"\nwhy the best is best, in seconds:\n{_explanation(search, ranked)}")
    print(f"\n{_memory(search, ranked[0])}")
    if refused.total:
        print(f"\n{listing(refused)}")
    print(f"\n{summary(recipe, search)}")


def cells(one: Ranked) -> tuple[Any, ...]:
    candidate = one.candidate
    degrees = candidate.dp, candidate.tp, candidate.pp, candidate.micro_batch_size
    choices = candidate.schedule, candidate.recompute, candidate.partition, candidate.placement, candidate.more
    return f"{one.seconds:.4g}", *degrees, *choices


def summary(recipe: LoadedRecipe, search: Search) -> str:
    rate = search.looked_at / max(search.elapsed_s, 1e-9)
    return (
        f"{algorithm(recipe, search.domain)} search of {len(search.domain) + search.domain.refused.total} candidates: "
        f"{search.looked_at} looked at, {search.simulated} simulated, in {search.elapsed_s:.1f} s "
        f"({rate:,.0f} candidates/s); {predicted_on(recipe, search)}"
    )


def predicted_on(recipe: LoadedRecipe, search: Search) -> str:
    """What the predicted times rest on and, where that is a guess, the command that measures it."""
    measured_in = search.maker.model.measured_in
    told = f"times are predicted ({recipe.values.prediction.method}, on {basis(recipe, measured_in)}), not measured"
    if command := how_to_measure(recipe, measured_in):
        told += f"; nothing was measured on this device, so they may be far off; to measure it: {command}"
    return told


def listing(refused: Refusals) -> str:
    """The reasons, commonest first, each with an example."""
    lines = [f"{refused.total} candidates cannot be, with one example of each reason:"]
    lines += [f"  ×{times} {reason} ({example})" for times, example, reason in refused]
    return "\n".join(lines)


def _explanation(search: Search, ranked: list[Ranked]) -> str:
    """What the first few plans spend their time on, side by side."""
    rows = []
    for place, one in enumerate(ranked[:EXPLAINED], 1):
        estimate = search.maker.model.estimate(one.plan)
        parts = [f"{getattr(estimate, name):.3g}" for name in PARTS.values()]
        rows.append((place, f"{estimate.seconds:.4g}", *parts, _shorter(one.candidate)))
    return tabulate(rows, ["", "all", *PARTS, "plan"], disable_numparse=True)


def _shorter(candidate: Candidate) -> str:
    return f"dp={candidate.dp} tp={candidate.tp} pp={candidate.pp} micro-batch={candidate.micro_batch_size}"


def _memory(search: Search, best: Ranked) -> str:
    needed = search.maker.model.memory(best.plan)
    sizes = ", ".join(in_gib(size) for size in needed)
    return f"memory of the best, per pipeline device: {sizes} GiB"


def _record(recipe: LoadedRecipe, search: Search, ranked: list[Ranked], refused: Refusals) -> dict[str, Any]:
    """Seconds and bytes. The first ones have their plan, and what their time consists of."""
    model = search.maker.model
    exact = exact_plans(recipe)
    records = []
    for place, one in enumerate(ranked):
        estimate: Estimate | None = model.estimate(one.plan) if place < EXPLAINED else None
        plan, problem = None, cannot_run(one.plan)
        if place < search.budget.best:
            try:
                plan = exact(one)
            except InputError as error:  # such as memory, which the runtime counts tensor by tensor
                problem = str(error)
        records.append(
            {
                **asdict(one.candidate),
                "predicted_s": one.seconds,
                "peak_bytes": max(model.memory(one.plan)),
                "does_not_run_yet": problem,
                "estimate": None if estimate is None else asdict(estimate),
                "plan": None if plan is None else asdict(plan),
            }
        )
    return {
        "candidates": records,
        "infeasible": [{"count": times, "reason": reason, **asdict(example)} for times, example, reason in refused],
        "algorithm": algorithm(recipe, search.domain),
        "looked_at": search.looked_at,
        "simulated": search.simulated,
        "search_s": search.elapsed_s,
        "predicted_on": predicted_on(recipe, search),
    }
