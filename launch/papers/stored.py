"""The runs of an item in the store, which commands on runs take by their name: paper-ITEM."""

from collections.abc import Sequence
from dataclasses import replace

from launch.recipe.load import LoadedRecipe, load, load_groups
from launch.store.files import RUNS
from launch.store.trials import last_command

_ANY_MODEL = {"model": {"factory": "item:model"}}  # each row has its own, and nothing here reads it


def run_of(item: str) -> str:
    """The name under which the runs of ``item`` are kept, and that `auto3d status` and others take."""
    return f"paper-{item}"


def loaded_run(name: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe called ``name``, or a stand-in for the rows of the item that `auto3d paper --run` keeps there.

    The stand-in has the rows' store, and says where they run.
    """
    if (RUNS / name).is_dir():
        stand_in = load_groups(name, RUNS / name, _ANY_MODEL)
        command = last_command(stand_in)
        if command is not None and command.item is not None:
            where = [word for word in command.overrides if word.startswith("launch.")]
            words = (command.item.item, *command.overrides)
            return replace(load_groups(name, RUNS / name, _ANY_MODEL, where), overrides=tuple(overrides), paper=words)
    return load(name, overrides)
