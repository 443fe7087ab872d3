"""A recipe's captured programs on disk: in the cache, and as copies in the folder of a trial that runs elsewhere."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from auto3d.capture.cache import StaleEntryError
from auto3d.plan import Plan
from auto3d.schedule import samples_at_once
from launch.model.identity import cache_of, identity_of
from launch.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from torch import nn

    from auto3d.capture.model import CapturedModel


def stored_program(
    recipe: LoadedRecipe, micro_batch_size: int, build: "Callable[[], nn.Module]", folder: Path | None = None
) -> "CapturedModel | None":
    """The captured model that ``folder`` has a copy of, or else the cache; None if neither has a valid model.

    ``build``, which makes the recipe's model, is not called. A copy that is not valid here is reported in one line.
    """
    from auto3d.capture.program_json import captured_from_json  # it imports torch

    cache, identity = cache_of(recipe), identity_of(recipe, program_at=micro_batch_size)
    read = partial(captured_from_json, build=build)
    if folder is not None and (copy := _copy_in(folder, micro_batch_size)).exists():
        try:
            return cache.load_copy(copy, identity, read)
        except (OSError, StaleEntryError) as error:
            print(f"auto3d: the captured model in {copy} is not used: {error}", file=sys.stderr)
    return cache.load(identity, read)


def store_program(recipe: LoadedRecipe, captured: "CapturedModel") -> None:
    """Store ``captured``, which this process has just captured, unless it calls a Function of the user's own."""
    from auto3d.capture.program_json import NotStorableError, captured_to_json  # it imports torch

    try:
        content = captured_to_json(captured)
    except NotStorableError:
        return
    cache_of(recipe).store(identity_of(recipe, program_at=captured.graph.micro_batch_size), content)


def copy_programs(recipe: LoadedRecipe, plan: Plan, folder: Path) -> None:
    """Copy the stored programs that ranks of ``plan`` run to ``folder``, since their cache may be another."""
    for size in {samples_at_once(plan) // stage.replicas for stage in plan.stages} | {samples_at_once(plan)}:
        cache_of(recipe).copy(identity_of(recipe, program_at=size), _copy_in(folder, size))


def _copy_in(folder: Path, micro_batch_size: int) -> Path:
    return folder / f"program-{micro_batch_size}.json"
