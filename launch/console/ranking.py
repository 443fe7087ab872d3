"""`auto3d plan`: prints the candidates of a recipe, fastest first by prediction, and why the best is best."""

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from auto3d.cost.memory.device import in_gib
from auto3d.search.search import Ranked, Search
from auto3d.search.space import Candidate, Refusals
from launch.console.output import print_json
from launch.model.config_keys import unquantized
from launch.model.ranking import EXPLAINED, describe_certificate, fastest_order, predicted_on, search_record
from launch.model.search import algorithm
from launch.recipe.load import LoadedRecipe
from launch.recipe.words import counted

SHOWN = 20
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
    if as_json:
        print_json(search_record(recipe, search))
        return
    ranked, refused = search.ranked(), search.refused()
    shown = ranked if show_all else ranked[:SHOWN]
    print(tabulate(map(cells, shown), HEADINGS, disable_numparse=True))
    if len(shown) < len(ranked):
        print(f"… and {len(ranked) - len(shown)} more (--all)")
    print(f"\nwhy the best is best, in seconds:\n{_explanation(search, ranked)}")
    print(f"\n{_memory(search, ranked[0])}")
    if (order := fastest_order(ranked)) is not None:
        print(f"\norder of plan {ranked.index(order) + 1}: {describe_certificate(search, order)}")
    if refused.total:
        print(f"\n{_reasons(refused)}")
    print(f"\n{_summary(recipe, search)}")
    if (note := unquantized(recipe.values.model.config)) is not None:
        print(note)


def cells(one: Ranked) -> tuple[Any, ...]:
    """The cells of a candidate's row, under HEADINGS."""
    candidate = one.candidate
    degrees = candidate.dp, candidate.tp, candidate.pp, candidate.micro_batch_size
    choices = candidate.schedule, candidate.recompute, candidate.partition, candidate.placement, candidate.more
    return f"{one.seconds:.4g}", *degrees, *choices


def _summary(recipe: LoadedRecipe, search: Search) -> str:
    rate = search.looked_at / max(search.elapsed_s, 1e-9)
    candidates = counted(len(search.domain) + search.domain.refused.total, "candidate")
    return (
        f"{algorithm(recipe, search.domain)} search of {candidates}: "
        f"{search.looked_at} looked at, {search.simulated} simulated, in {search.elapsed_s:.1f} s "
        f"({rate:,.0f} candidates/s); {predicted_on(recipe, search)}"
    )


def _reasons(refused: Refusals) -> str:
    """The reasons, commonest first, each with an example."""
    lines = [f"{counted(refused.total, 'candidate')} cannot run, with one example of each reason:"]
    lines += [f"  ×{one.count} {one.reason} ({one.example})" for one in refused]
    return "\n".join(lines)


def _explanation(search: Search, ranked: Sequence[Ranked]) -> str:
    """How the first few plans spend their time, one row each."""
    rows = []
    for place, one in enumerate(ranked[:EXPLAINED], 1):
        estimate = search.maker.model.estimate(one.plan)
        parts = [f"{getattr(estimate, name):.3g}" for name in PARTS.values()]
        rows.append((place, f"{estimate.seconds:.4g}", *parts, _degrees(one.candidate)))
    return tabulate(rows, ["", "all", *PARTS, "plan"], disable_numparse=True)


def _degrees(candidate: Candidate) -> str:
    return f"dp={candidate.dp} tp={candidate.tp} pp={candidate.pp} micro-batch={candidate.micro_batch_size}"


def _memory(search: Search, best: Ranked) -> str:
    needed = search.maker.model.memory(best.plan)
    sizes = ", ".join(in_gib(size) for size in needed)
    return f"memory of the best, per pipeline device: {sizes} GiB"
