"""Overrides: changes of a recipe on the command line, in any order.

``group.key=value`` sets one key, ``group.list[0]=value`` one item of a list, ``group={key: value, …}`` each key of a
mapping. ``group=name`` replaces the group by a file, to which the other overrides are then applied. Two overrides must
not set the same key to different values.
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

KeyPath = tuple[str | int, ...]  # keys of mappings and indices of lists: ("cluster", "more", 0, "nodes")

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
            problem = f"{write_path(first)}={values[first]!r} sets the same key; give only one of them"
            raise RecipeError(COMMAND_LINE, write_path(second), problem)
    return values


def file_names(values: Mapping[KeyPath, Any]) -> dict[str, str]:
    """The groups that overrides replace by a file: group -> name of the file."""
    return {str(path[0]): value for path, value in values.items() if _names_a_file(path, value)}


def replaced(overrides: Sequence[str], by: Sequence[str]) -> list[str]:
    """``overrides`` without those that set the same keys as ``by``, followed by ``by``."""
    new = read_overrides(by)
    keys = [path for path, value in new.items() if not _names_a_file(path, value)]

    def stays(path: KeyPath, value: Any) -> bool:
        covered = not _names_a_file(path, value) and any(path[: len(key)] == key for key in keys)
        return path not in new and not covered

    kept = []
    for override in overrides:
        values = _read(override)
        remaining = {path: value for path, value in values.items() if stays(path, value)}
        if len(remaining) == len(values):
            kept.append(override)
        else:
            kept += [f"{write_path(path)}={dumps(value)}" for path, value in remaining.items()]
    return [*kept, *by]


def read_path(key: str) -> KeyPath:
    """``cluster.more[0].nodes`` as a path."""
    return tuple(int(part[1:-1]) if part[0] == "[" else part for part in re.findall(rf"{_NAME}|\[\d+\]", key))


def write_path(path: KeyPath) -> str:
    """The path as a user writes it: ``cluster.more[0].nodes``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def nested(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """The values as mappings inside mappings; their paths must have no list indices."""
    whole: dict[str, Any] = {}
    for path, value in sorted(values.items(), key=lambda item: len(item[0])):
        *outer, last = map(str, path)
        holder = whole
        for name in outer:
            holder = holder.setdefault(name, {})
        holder[last] = {} if value == {} else value
    return whole


def _read(override: str) -> dict[KeyPath, Any]:
    """The values that one override sets, by path."""
    key, equals, text = override.partition("=")
    if not equals or not _PATH.fullmatch(key):
        raise RecipeError(COMMAND_LINE, override, "not an override; write group.key=value")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index, call-overload]  # a dict
        values = dict(_leaves(read_path(key), value))
    except (YAMLError, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(COMMAND_LINE, override, f"not readable: {str(error).splitlines()[0]}") from None
    for path, value in values.items():
        if value == {} and len(path) > 1:
            problem = "found {}; a mapping adds its keys to the recipe's, so it needs at least one"
            raise RecipeError(COMMAND_LINE, write_path(path), problem)
    return values


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Each value inside ``value``, if that is a mapping of names, with its path; else ``value`` itself."""
    if not isinstance(value, dict) or not value or not all(isinstance(name, str) for name in value):
        yield path, value
        return
    for name, inner in value.items():
        yield from _leaves((*path, name), inner)


def _names_a_file(path: KeyPath, value: Any) -> bool:
    return len(path) == 1 and isinstance(value, str)
