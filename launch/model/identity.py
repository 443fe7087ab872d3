"""What the captures of a recipe's model depend on: the keys of its entries in the cache."""

from dataclasses import asdict
from typing import Any

from auto3d.capture.cache import Cache, place_of
from launch.recipe.load import LoadedRecipe, stored_configuration
from launch.recipe.settings import device


def cache_of(recipe: LoadedRecipe) -> Cache:
    """The cache, whose entries also depend on where the recipe's own modules are found."""
    return Cache(code_folders=_code_folders(recipe))


def identity_of(recipe: LoadedRecipe, **what: int) -> dict[str, Any]:
    """Everything in the recipe that a capture depends on, as a key of the cache; for a factory, also its file."""
    values = asdict(recipe.values)
    model = {key: value for key, value in values["model"].items() if key not in ("weights", "tensor_parallel")}
    data = {key: value for key, value in values["data"].items() if key != "files"}
    module = (recipe.values.model.factory or "").partition(":")[0].partition(".")[0]
    where = place_of(module, _code_folders(recipe)) if module else ""
    training = {"device": device(recipe.values), "precision": values["training"]["precision"]}
    identity = {"model": model, "data": data, **training, "where": where, **what}
    if (stored := stored_configuration(recipe.values.model.weights)) is not None:
        identity["stored"] = stored
    return identity


def _code_folders(recipe: LoadedRecipe) -> list[str]:
    return recipe.code_folders if recipe.values.model.factory else []
