"""`auto3d plan`: prints the candidates of a recipe, fastest first by prediction, and why the best is best."""

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from auto3d.cost.memory.device import in_gib
from auto3d.search.axes import AXES, plan_name
from auto3d.search.search import Ranked, Search
from auto3d.search.space import Refusals
from auto3d.words import counted
from launch.console.output import print_json
from launch.model.assumed import SIGN, SIGN_MEANS, assumed_lines, places_assumed
from launch.model.certainty import Certainty, certainty_lines, certainty_of
from launch.model.config_keys import unquantized
from launch.model.ranking import (
    EXPLAINED,
    describe_certificate,
    fastest_order,
    predicted_on,
    search_record,
    what_separates,
)
from launch.model.search import SHOWN, described_as
from launch.recipe.load import LoadedRecipe

INTERVAL = "80 %\n(s)"
TIED = "≈"  # behind the interval of a plan that cannot be told apart from the first
NAMED = [name for name, axis in AXES.items() if axis.label is not None]  # axes with a column; "more" has the others
HEADINGS = (
    "predicted\n(s)",
    INTERVAL,
    *(AXES[name].heading for name in NAMED),
    "more",
)
HOST_BINDS = 0.05  # part of an iteration
PARTS = {
    "compute": "compute_s",
    "host": "host_s",
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
    assumed = places_assumed(recipe, search.maker.model, ranked)
    certainty = certainty_of(recipe, search.maker.model.measured_in)
    tied = 0 if certainty is None else certainty.tied([plan.seconds for plan in ranked])
    rows = [
        cells(plan, certainty, SIGN if place in assumed else "", tied=0 < place <= tied)
        for place, plan in enumerate(shown)
    ]
    headings = [heading for heading in HEADINGS if certainty is not None or heading != INTERVAL]
    print(tabulate(rows, headings, disable_numparse=True))
    if len(shown) < len(ranked):
        print(f"… and {len(ranked) - len(shown)} more (--all)")
    if same := [(place, plan) for place, plan in enumerate(ranked, 1) if plan.same]:
        print(_same(same) if show_all else f"{counted(len(same), 'plan')} under several candidates (--all names them)")
    if assumed:
        print(SIGN_MEANS)
    if certainty is not None:
        print(f"\n{certainty_lines(certainty, [plan.seconds for plan in ranked])}")
        if tied:
            print(f"what tells them apart at the least cost: {what_separates(recipe, tied + 1)}")
    print(f"\nwhy the best is best, in seconds:\n{_explanation(search, ranked)}")
    print(f"\n{_memory(search, ranked[0])}")
    if (order := fastest_order(ranked)) is not None:
        print(f"\norder of plan {ranked.index(order) + 1}: {describe_certificate(search, order)}")
    if refused.total:
        print(f"\n{_reasons(refused)}")
    print(f"\n{_summary(recipe, search)}")
    for line in assumed_lines(recipe, search.maker.model.measured_in):
        print(line)
    if (note := unquantized(recipe.values.model.config)) is not None:
        print(note)


def cells(ranked: Ranked, certainty: Certainty | None = None, mark: str = "", *, tied: bool = False) -> tuple[Any, ...]:
    """The cells of a candidate's row, under HEADINGS; without ``certainty``, none under INTERVAL.

    ``mark`` stands behind the time of a plan whose place assumed links decide; a plan that is ``tied`` with the first
    has a mark behind its interval.
    """
    candidate = ranked.candidate
    interval: tuple[str, ...] = ()
    if certainty is not None:
        interval = ("–".join(f"{end:.3g}" for end in certainty.interval(ranked.seconds)) + f" {TIED}" * tied,)
    choices = (getattr(candidate, name) for name in NAMED)
    return f"{ranked.seconds:.4g} {mark}".rstrip(), *interval, *choices, candidate.more


def _summary(recipe: LoadedRecipe, search: Search) -> str:
    return f"{described_as(recipe, search)}; {predicted_on(recipe, search)}"


def _same(plans: Sequence[tuple[int, Ranked]]) -> str:
    """The candidates that are the same plan as a listed candidate, with its place."""
    lines = ["the same operations on links that are as fast:"]
    lines += [f"  plan {place}: {'; '.join(map(str, plan.same))}" for place, plan in plans]
    return "\n".join(lines)


def _reasons(refused: Refusals) -> str:
    """The reasons, commonest first, with an example of each reason."""
    lines = [f"{counted(refused.total, 'candidate')} cannot run, with one example of each reason:"]
    lines += [f"  ×{refusal.count} {refusal.reason} ({refusal.example})" for refusal in refused]
    return "\n".join(lines)


def _explanation(search: Search, ranked: Sequence[Ranked]) -> str:
    """How the first few plans spend their time, a row per plan."""
    rows, bound = [], []
    for place, ranked_plan in enumerate(ranked[:EXPLAINED], 1):
        estimate = search.maker.model.estimate(ranked_plan.plan)
        if (share := estimate.host_s / estimate.seconds) >= HOST_BINDS:
            bound.append(f"{share:.0%} of plan {place}")
        parts = [f"{getattr(estimate, name):.3g}" for name in PARTS.values()]
        rows.append((place, f"{estimate.seconds:.4g}", *parts, plan_name(ranked_plan.plan)))
    shown = tabulate(rows, ["", "all", *PARTS, "plan"], disable_numparse=True)
    if not bound:
        return shown
    return (
        f"{shown}\nthe host binds: its device waits for launches and for the runtime in {', '.join(bound)}; larger "
        "micro-batches and less tensor parallelism give each launch more to compute"
    )


def _memory(search: Search, best: Ranked) -> str:
    needed = search.maker.model.memory.of(best.plan)
    sizes = ", ".join(in_gib(size) for size in needed)
    return f"memory of the best, per pipeline device: {sizes} GiB"
