"""Results on standard output as JSON that every reader accepts, and in files that the user asked for."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from auto3d.errors import InputError


def print_json(value: Any) -> None:
    """Print ``value`` as one line of JSON; numbers that JSON cannot express (nan, inf) become null."""
    print(json.dumps(_finite(value), allow_nan=False))


def write_text(path: str, text: str) -> None:
    """Write a file that the user asked for; raises InputError if it cannot be written."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
