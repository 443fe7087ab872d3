"""A schedule as a file that others can load: its explicit order as JSON, one text per device."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from auto3d.errors import InputError
from auto3d.schedule.operation import Schedule
from auto3d.schedule.options import RECOMPUTE, SYNC
from auto3d.schedule.order_text import DEVICES, ORDER, order_options, read_order

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class OrderFile:
    """The contents of a schedule file."""

    devices: int
    micro_batches: int
    options: dict[str, int | str] = field(hash=False)  # the options of the schedule ``synthesized``
    made_by: str  # the command that made the order, and its times

    def to_json(self) -> str:
        rows = str(self.options[ORDER]).split(DEVICES)
        return json.dumps(
            {
                "schema": SCHEMA,
                "made_by": self.made_by,
                "devices": self.devices,
                "micro_batches": self.micro_batches,
                "recompute": self.options.get("recompute", RECOMPUTE[0]),
                "sync": self.options.get("sync", SYNC[0]),
                "order": rows,
            },
            indent=1,
        )


def order_file(schedule: Schedule, *, made_by: str) -> OrderFile:
    """The file of ``schedule``; raises InputError if an explicit order cannot hold it."""
    return OrderFile(
        devices=schedule.devices,
        micro_batches=schedule.micro_batches,
        options=order_options(schedule),
        made_by=made_by,
    )


def read_order_file(path: str) -> OrderFile:
    """The checked contents of ``path``; raises InputError with the file and the key if anything is wrong."""
    try:
        values = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: no JSON: {error}") from None
    try:
        return _checked(values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _checked(values: Any) -> OrderFile:
    if not isinstance(values, dict):
        raise InputError(f"found {type(values).__name__}; a schedule file is an object with {', '.join(_KEYS)}")
    for key in values:
        if key not in _KEYS:
            raise InputError(f"{key}: unknown; a schedule file has {', '.join(_KEYS)}")
    for key, (is_right, words) in _KEYS.items():
        if key not in values:
            raise InputError(f"{key}: missing; it must be {words}")
        if not is_right(values[key]):
            raise InputError(f"{key}: found {str(values[key])[:40]!r}; it must be {words}")
    options: dict[str, int | str] = {ORDER: DEVICES.join(values["order"])}
    for key, default in (("recompute", RECOMPUTE[0]), ("sync", SYNC[0])):
        if values[key] != default:
            options[key] = values[key]
    sizes = {"devices": values["devices"], "micro_batches": values["micro_batches"]}
    read_order(str(options[ORDER]), **sizes, recompute=values["recompute"], sync=values["sync"])
    return OrderFile(**sizes, options=options, made_by=values["made_by"])


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


_KEYS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "schema": (lambda value: value == SCHEMA, f"{SCHEMA}, the version that this build reads"),
    "made_by": (_is_text, "text: what made the order"),
    "devices": (_is_count, "a whole number from 1 on"),
    "micro_batches": (_is_count, "a whole number from 1 on"),
    "recompute": (_is_text, "none, full or stages, as in 0+2"),
    "sync": (_is_text, f"one of {', '.join(SYNC)}"),
    "order": (_are_texts, "a list with the operations of each device, as in 'F0@0 B0@0'"),
}
