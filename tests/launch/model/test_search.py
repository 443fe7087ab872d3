"""The search of a recipe: budgets are counts, nothing is captured twice, and the best plans are those of the space."""

from pathlib import Path
from random import Random

import pytest

from auto3d.capture import model
from auto3d.errors import InputError
from auto3d.search.bound import least_s
from launch.model.graphs import PlanningModel
from launch.model.search import SHOWN, search_recipe
from launch.model.sweep_plans import plans_of_sweep
from launch.recipe.load import load

RECIPES = sorted(str(file) for file in Path("recipes").rglob("*.yaml") if "search:" in file.read_text())
SIMULATED = ["gpt1.4b", "gpt2.5b", "gpt8.3b", "gpt20b", "llama3-8b", "llama3-70b"]  # each within an hour, all of it
PROMISED = ["gpt20b", "gpt175b", "llama3-8b", "t5-11b", "vit-22b", "mixed"]
SMALL = [
    "model.config.n_layer=4",
    "model.config.n_embd=64",
    "model.config.n_head=4",
    "data.sequence_length=32",
    "data.vocabulary_size=256",
]


def test_no_recipe_has_a_budget_of_seconds():
    """Equal inputs give equal plans on every machine."""
    assert RECIPES
    for file in RECIPES:
        assert "\n  seconds:" not in Path(file).read_text(), file
    assert load("gpt20b").values.search.seconds is None


def test_a_sweep_of_a_large_space_captures_only_the_sizes_that_it_runs(monkeypatch):
    """The search interpolates between two sizes; then the one plan that runs is captured at its own size."""
    captured: list[int] = []
    export = model.export

    def counted(build, inputs, micro_batch_size, **more):
        captured.append(micro_batch_size)
        return export(build, inputs, micro_batch_size, **more)

    monkeypatch.setattr(model, "export", counted)
    recipe = load("gpt20b", [*SMALL, "search.max_trials=1", "search.tp=[1,2]", "search.pp=[2,4]"])
    planning = PlanningModel(recipe)
    found = plans_of_sweep(planning)
    (plan,) = found.candidates
    assert sorted(captured) == sorted({2, 4, plan.micro_batch_size})
    assert found.left_out > 50


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SIMULATED)
def test_the_plans_shown_are_the_best_of_the_whole_space(name):
    recipe = load(name)
    search = search_recipe(recipe)
    whole = search_recipe(recipe, best=10**9)
    best = [one.seconds for one in whole.ranked()[:SHOWN]]
    found = [one.seconds for one in search.ranked()[:SHOWN]]
    assert whole.left.candidates == 0
    print(f"{name}: {search.simulated} of {whole.simulated} plans simulated, regret {found[0] / best[0] - 1:.2%}")
    assert found == best


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROMISED)
def test_no_plan_of_a_recipe_needs_less_than_its_candidate_promises(name):
    """With every axis that changes times or memory, on captured models and shards of them."""
    kept = "none,full" if name == "mixed" else "none,full,auto"  # its devices have no known memory, which auto needs
    wide = [f"search.recompute=[{kept}]", "search.shard_optimizer=auto", "search.sequence_parallel=auto"]
    more = ["search.tensor_overlap=auto", "search.schedule=auto", "search.partition=auto", "search.candidates=1"]
    search = search_recipe(load(name, [*wide, *more]))
    every, maker, promises = list(search.domain), search.maker, search.promises
    checked = 0
    for candidate in Random(name).sample(every, min(400, len(every))):
        try:
            plan = maker.unlimited(candidate)
            bound = maker.model.slowest_pipeline_s(plan, least_s)
        except InputError:
            continue
        assert promises.least_s(candidate) <= bound * (1 + 1e-9), candidate
        assert promises.least_bytes(candidate) <= max(maker.model.memory.of(plan)) * (1 + 1e-9), candidate
        checked += 1
    assert checked > 50
