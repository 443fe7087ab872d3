"""The keys of a recipe: for each key its schema, the values that it takes, and its description."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from launch.recipe.schema import Recipe
from launch.recipe.schema_key import AUTO


def groups() -> list[str]:
    return [item.name for item in fields(Recipe)]


def group_schema(group: str) -> type:
    schema = _schema_in(get_type_hints(Recipe)[group])
    assert schema is not None
    return schema


def schema_of(full_key: str) -> tuple[type, str]:
    """The schema that holds ``full_key`` and the key's name there: InputRecipe, kind for data.inputs.labels.kind."""
    group, name, *inner = re.sub(r"\[\d+\]", "", full_key).split(".")
    schema = group_schema(group)
    while inner and (below := inner_schema(schema, name)) is not None:
        if name == "inputs":
            inner.pop(0)
        if inner:
            schema, name = below, inner.pop(0)
    return schema, name


def inner_schema(schema: type, name: str) -> type | None:
    """The schema of the groups in a key that holds one group, groups by name, or a list of groups; else None."""
    return _schema_in(get_type_hints(schema).get(name))


def _schema_in(hint: Any) -> type | None:
    """The dataclass in a type such as list[NodesRecipe] or LinkRecipe | None."""
    return next(
        (argument for argument in (hint, *get_args(hint)) if isinstance(argument, type) and is_dataclass(argument)),
        None,
    )


def is_axis(schema: type, name: str) -> bool:
    """Whether the key is an axis of the search space, which takes auto or a list."""
    metadata = _field(schema, name).metadata
    return get_type_hints(schema)[name] is Any and metadata["per_stage"] is None and not metadata["per_precision"]


def accepts(schema: type, name: str, value: Any) -> bool:
    """Whether the key takes ``value``, which has the type that the schema declares."""
    metadata = _field(schema, name).metadata
    if is_axis(schema, name):
        if value == AUTO:
            return True
        kinds = _kinds(metadata)
        if not isinstance(value, list) or not value or any(type(item) not in kinds for item in value):
            return False
    if metadata["per_precision"]:
        numbers = list(value.values()) if isinstance(value, dict) else [value]
        return all(type(number) in (int, float) and _within(metadata, number) for number in numbers)
    if isinstance(value, dict) and metadata["values"]:
        return all(
            type(item) in metadata["values"] and item in (metadata["choices"] or (item,)) for item in value.values()
        )
    if value is None or isinstance(value, dict):
        return True  # not given, or checked key by key
    if metadata["per_stage"] is not None:
        kinds = (int, metadata["per_stage"])  # a whole number counts as a number
        if value == [] or any(type(item) not in kinds for item in (value if isinstance(value, list) else [value])):
            return False
    return all(_within(metadata, item) for item in (value if isinstance(value, list) else [value]))


def _within(metadata: Mapping[str, Any], value: Any) -> bool:
    if metadata["choices"] and type(value) not in (int, float):
        return (value.split(":")[0] if metadata["options"] else value) in metadata["choices"]
    if isinstance(value, float) and not math.isfinite(value):
        return False
    least, below, most = metadata["least"], metadata["below"], metadata["most"]
    return (least is None or value >= least) and (below is None or value < below) and (most is None or value <= most)


def _kinds(metadata: Mapping[str, Any]) -> tuple[type, ...]:
    """The types of the values of an axis."""
    if metadata["choices"] == (False, True):
        return (bool,)
    if metadata["choices"]:
        return (str,) if metadata["most"] is None else (str, int, float)
    return (int,)


def _field(schema: type, name: str) -> Field:
    return next(item for item in fields(schema) if item.name == name)


def accepted(schema: type, name: str) -> str:
    """The values that the key takes, in words."""
    item = _field(schema, name)
    bounds = {"of at least": item.metadata["least"], "and below": item.metadata["below"]}
    bound = "".join(f" {words} {number}" for words, number in bounds.items() if number is not None)
    if item.metadata["choices"]:
        names = ", ".join(str(choice).lower() for choice in item.metadata["choices"])
        if item.metadata["most"] is not None:
            names += f", or a number from {item.metadata['least']} to {item.metadata['most']}"
        if item.metadata["values"]:
            return f"names, each with one of {names}"
        return f"auto or a list of {names}" if is_axis(schema, name) else f"one of {names}"
    if item.metadata["per_stage"] is not None:
        return f"{_WORDS[item.metadata['per_stage']][0]}{bound}, or a list with one for each stage"
    if item.metadata["per_precision"]:
        if (most := item.metadata["most"]) is not None:
            bound += f" and at most {most}"
        return f"a number{bound}, or one for each precision of peak_tflops"
    if item.metadata["values"]:
        kinds = " or ".join(_WORDS[kind][0] for kind in item.metadata["values"])
        return f"names, each with {kinds}"
    return f"{_type_in_words(get_type_hints(schema)[name])}{bound}"


def documented_keys() -> Iterator[tuple[str, Any, str, str]]:
    """For every key of a recipe: its full name, default, the values that it takes, and its meaning."""

    def describe(schema: type, prefix: str) -> Iterator[tuple[str, Any, str, str]]:
        for item in fields(schema):
            default = item.default
            if item.default_factory is not MISSING:
                default = item.default_factory()
            inner = inner_schema(schema, item.name)
            many = {dict: ".NAME", list: "[N]"}.get(get_origin(get_type_hints(schema)[item.name]), "")
            if inner is None or many:
                yield f"{prefix}{item.name}", default, accepted(schema, item.name), item.metadata["meaning"]
            if inner is not None:
                yield from describe(inner, f"{prefix}{item.name}{many}.")

    for group in groups():
        yield from describe(group_schema(group), f"{group}.")


def _type_in_words(hint: Any) -> str:
    if hint is Any:
        return "auto or a list of whole numbers"
    if get_origin(hint) is list:
        inner = get_args(hint)[0]
        return f"a list of {'groups of keys' if is_dataclass(inner) else _WORDS[inner][1]}"
    if get_origin(hint) is dict:
        return "keys and values"
    if _schema_in(hint):
        return "a group of keys"
    return ", or ".join(_WORDS[option][0] for option in (*get_args(hint), hint) if option in _WORDS)


_WORDS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "strings"),
    bool: ("true or false", ""),
}
