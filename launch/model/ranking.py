"""The result of a search as records, and what its predictions rest on."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from auto3d.errors import InputError
from auto3d.schedule.order_text import NAME
from auto3d.search.order_certificate import certificate_of
from auto3d.search.recompute import AUTO
from auto3d.search.search import Ranked, Search
from auto3d.synthesis.certificate import SOLVER_SECONDS, Certificate
from launch.model.assumed import assumed_records, places_assumed
from launch.model.candidates import exact_plans
from launch.model.certainty import certainty_of
from launch.model.profile import basis, how_to_measure
from launch.model.search import algorithm
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import most_trials

FEW = 3  # plans that trials tell apart at less cost than a profile
EXPLAINED = 3  # best plans whose time is split into its parts
COVERED = (
    "It covers all orders of the same stages on the same devices, if their activations fit beside all else, at the "
    "predicted times"
)


def fastest_order(ranked: Iterable[Ranked]) -> Ranked | None:
    """The first of ``ranked`` whose schedule is an explicit order; None if there is none."""
    return next((ranked_plan for ranked_plan in ranked if ranked_plan.plan.schedule == NAME), None)


def order_certificate(search: Search, ranked: Ranked) -> Certificate:
    """The certificate of the order of ``ranked``, in predicted seconds; raises InputError if there is none."""
    return certificate_of(
        ranked.plan, search.maker.model, may_recompute=ranked.candidate.recompute == AUTO, seconds=SOLVER_SECONDS
    )


def describe_certificate(search: Search, ranked: Ranked) -> str:
    """The certificate of the order of ``ranked`` and what it covers; or why there is none."""
    try:
        return f"{order_certificate(search, ranked)}, in seconds. {COVERED}"
    except InputError as error:
        return f"not certified: {error}"


def search_record(recipe: LoadedRecipe, search: Search) -> dict[str, Any]:
    """The ranked candidates, in seconds and bytes, those that were refused, and figures of the search.

    The best plans have the parts of their time; as many as search.trials have the plan itself, ready to run. The
    fastest plan with a synthesized order has its certificate.
    """
    model = search.maker.model
    exact = exact_plans(recipe)
    records = []
    ranked = search.ranked()
    certified, trials = fastest_order(ranked), most_trials(recipe.values)
    assumed, certainty = places_assumed(recipe, model, ranked), certainty_of(recipe, model.measured_in)
    tied = 0 if certainty is None or not ranked else certainty.tied([ranked_plan.seconds for ranked_plan in ranked])
    for place, ranked_plan in enumerate(ranked):
        estimate = asdict(model.estimate(ranked_plan.plan)) if place < EXPLAINED else None
        plan, problem = None, ""
        if place < trials:
            try:
                plan = asdict(exact(ranked_plan))
            except InputError as error:  # for example memory, which the runtime counts tensor by tensor
                problem = str(error)
        certificate = None
        if ranked_plan is certified:
            try:
                order = order_certificate(search, ranked_plan)
                certificate = asdict(order) | {"gap": order.gap}
            except InputError as error:
                certificate = {"problem": str(error)}
        records.append(
            {
                **asdict(ranked_plan.candidate),
                "same": [asdict(candidate) for candidate in ranked_plan.same],
                "predicted_s": ranked_plan.seconds,
                "interval_s": None if certainty is None else certainty.interval(ranked_plan.seconds),
                "as_fast_as_first": 0 < place <= tied,
                "place_assumed": place in assumed,
                "peak_bytes": max(model.memory.of(ranked_plan.plan)),
                "problem": problem,
                "estimate": estimate,
                "certificate": certificate,
                "plan": plan,
            }
        )
    return {
        "candidates": records,
        "certainty": None if certainty is None else asdict(certainty),
        "separated_by": what_separates(recipe, tied + 1) if tied else None,
        "infeasible": [
            {"count": refusal.count, "reason": refusal.reason, **asdict(refusal.example)}
            for refusal in search.refused()
        ],
        "algorithm": algorithm(recipe),
        "size": len(search.domain),
        "ruled_out": search.ruled_out,
        "looked_at": search.looked_at,
        "simulated": search.simulated,
        "ended_by": search.ended_by,
        "left": asdict(search.left),
        "search_s": search.elapsed_s,
        "predicted_on": predicted_on(recipe, search),
        "assumed": assumed_records(recipe, model.measured_in),
    }


def what_separates(recipe: LoadedRecipe, plans: int) -> str:
    """The commands that tell the best ``plans`` apart at the least cost.

    A few trials take the whole cluster for a few iterations. More plans than FEW are first predicted from a
    profile, which takes one node for a minute and tells more of them apart.
    """
    profile = how_to_measure(recipe, "") if plans > FEW else ""
    tried = FEW if profile else plans
    tune = recipe.command("tune", f"search.trials={tried + 2 * tried // 3}")  # two of five trials are repetitions
    return f"{profile} (one node), then {tune}" if profile else tune


def predicted_on(recipe: LoadedRecipe, search: Search) -> str:
    """What the predicted times of ``search`` rest on and, where that is a guess, the command that measures it."""
    return predicted_by(recipe, search.maker.model.measured_in)


def predicted_by(recipe: LoadedRecipe, measured_in: str) -> str:
    """As ``predicted_on``, for a cost model whose times come from the profile ``measured_in`` (empty: from none)."""
    text = f"times are predicted ({recipe.values.prediction.method}, on {basis(recipe, measured_in)}), not measured"
    if command := how_to_measure(recipe, measured_in):
        text += f"; nothing was measured on this device, so they may be far off; to measure it: {command}"
    return text
