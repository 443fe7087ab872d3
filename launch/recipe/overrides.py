"""Overrides: what a command line changes in a recipe, the same in whatever order it is written.

``group.key=value`` sets one key, ``group.list[0]=value`` one item of a list, ``group={key: value, …}`` each key of a
mapping, and ``group=name`` takes a whole file, to which the others are then applied. No key is set twice.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from json import dumps
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from launch.recipe.error import COMMAND_LINE, RecipeError

KeyPath = tuple[str | int, ...]  # keys of mappings and places in lists: ("cluster", "more", 0, "nodes")

_NAME = r"[^.\[\]]+"
_PATH = re.compile(rf"{_NAME}(\.{_NAME}|\[\d+\])*")


def read_overrides(overrides: Sequence[str]) -> dict[KeyPath, Any]:
    """The value of each key that ``overrides`` set.

    Raises RecipeError where one cannot be read, or two of them set the same key to different values.
    """
    values: dict[KeyPath, Any] = {}
    for override in overrides:
        for path, value in _read(override).items():
            if path in values and repr(values[path]) != repr(value):
                problem = f"given twice, as {values[path]!r} and as {value!r}; give it once"
                raise RecipeError(COMMAND_LINE, write_path(path), problem)
            values[path] = value
    for first, second in combinations(sorted(values, key=len), 2):
        if second[: len(first)] == first and values[first] != {} and not _names_a_file(first, values[first]):
            problem = f"{write_path(first)}={values[first]!r} is given too, and sets the same; give one of them"
            raise RecipeError(COMMAND_LINE, write_path(second), problem)
    return values


def file_names(values: Mapping[KeyPath, Any]) -> dict[str, str]:
    """Of what overrides set, the groups that are taken from a file: group -> its name."""
    return {path[0]: value for path, value in values.items() if _names_a_file(path, value)}


def replaced(overrides: Sequence[str], by: Sequence[str]) -> list[str]:
    """``overrides`` and ``by``; a key that both set is as ``by`` says."""
    new = read_overrides(by)
    keys = [path for path, value in new.items() if not _names_a_file(path, value)]

    def stays(path: KeyPath, value: Any) -> bool:
        covered = not _names_a_file(path, value) and any(path[: len(key)] == key for key in keys)
        return path not in new and not covered

    kept = []
    for override in overrides:
        values = _read(override)
        left = {path: value for path, value in values.items() if stays(path, value)}
        if len(left) == len(values):
            kept.append(override)
        else:
            kept += [f"{write_path(path)}={dumps(value)}" for path, value in left.items()]
    return [*kept, *by]


def read_path(key: str) -> KeyPath:
    """``cluster.more[0].nodes`` as a path."""
    return tuple(int(part[1:-1]) if part[0] == "[" else part for part in re.findall(rf"{_NAME}|\[\d+\]", key))


def write_path(path: KeyPath) -> str:
    """The path as a user writes it: ``cluster.more[0].nodes``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def nested(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Values by paths that consist of names alone, as mappings in mappings."""
    whole: dict[str, Any] = {}
    for path, value in sorted(values.items(), key=lambda item: len(item[0])):
        holder = whole
        for name in path[:-1]:
            holder = holder.setdefault(name, {})
        holder[path[-1]] = {} if value == {} else value
    return whole


def _read(override: str) -> dict[KeyPath, Any]:
    """The values of one override."""
    key, equals, text = override.partition("=")
    if not equals or not _PATH.fullmatch(key):
        raise RecipeError(COMMAND_LINE, override, "not an override; write group.key=value")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]
        values = dict(_leaves(read_path(key), value))
    except (YAMLError, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(COMMAND_LINE, override, f"not readable: {str(error).splitlines()[0]}") from None
    for path, value in values.items():
        if value == {} and len(path) > 1:
            problem = "found {}; a mapping adds its keys to the recipe's: it takes at least one"
            raise RecipeError(COMMAND_LINE, write_path(path), problem)
    return values


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """The values in ``value``, where it is a mapping of names, by their paths."""
    if not isinstance(value, dict) or not value or not all(isinstance(name, str) for name in value):
        yield path, value
        return
    for name, inner in value.items():
        yield from _leaves((*path, name), inner)


def _names_a_file(path: KeyPath, value: Any) -> bool:
    return len(path) == 1 and isinstance(value, str)
