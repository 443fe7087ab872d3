"""One key of the schema: its default, its meaning, and the limits of its values."""

from collections.abc import Sequence
from dataclasses import field, is_dataclass
from typing import Any

AUTO = "auto"

# Larger values would make planning longer than any run: it lists all micro-batches and all divisors of the devices.
LARGEST_BATCH, LARGEST_NODES, LARGEST_NODE = 10**5, 10**4, 10**3
LARGEST_INTEGER = 2**63  # integers in tensors are below this
LARGEST_TIME_S = 10**8


def key(
    default: Any,
    meaning: str,
    *,
    choices: Sequence[str | bool] = (),
    least: float | None = None,
    below: float | None = None,
    per_stage: type | None = None,
    most: float | None = None,
    values: Sequence[type] = (),
    options: bool = False,
    per_precision: bool = False,
) -> Any:
    """A key of the schema. A number, or each number of a list, must be ≥ ``least``, ≤ ``most`` and < ``below``.

    ``choices``: the words that the key accepts; with ``most`` it accepts such words and numbers. ``options``: a word
    may be followed by a colon and options, which are checked later. ``values``: the types of a mapping's values.
    ``per_stage``: the key accepts one number of that type, or a list with one number per stage. ``per_precision``: the
    key accepts one number, or a mapping with one number per precision.
    """
    limits = {"least": least, "below": below, "most": most}
    kinds = {"values": tuple(values), "per_stage": per_stage, "per_precision": per_precision, "options": options}
    metadata = {"meaning": meaning, "choices": tuple(choices), **kinds, **limits}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    if isinstance(default, type) and is_dataclass(default):  # a group of keys inside this group
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
