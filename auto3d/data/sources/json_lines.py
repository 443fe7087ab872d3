"""Rows of files with one JSON object per line.

Python's own parser reads them: pyarrow's guesses a type for each column, and makes dates of texts that look so.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from auto3d.data.interface import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 1000  # rows that are read at once
_KINDS = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


def read_rows(files: Sequence[str], columns: Sequence[str]) -> Iterator[dict[str, "pa.Array"]]:
    """Consecutive rows of the files: the values of each of ``columns``. Empty lines are no rows."""
    import pyarrow as pa

    for name in files:
        rows = _objects(name, columns)
        while batch := list(islice(rows, _ROWS)):
            values = {}
            for column in columns:
                try:
                    values[column] = pa.array([row[column] for _, row in batch])
                except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
                    raise _unreadable(name, column, [(line, row[column]) for line, row in batch], error) from None
            yield values


def _unreadable(name: str, column: str, values: Sequence[tuple[int, Any]], error: Exception) -> DataError:
    """Why pyarrow takes no array of ``values``, each with its line, in which it finds ``error``."""
    first, kind = values[0][0], type(values[0][1])
    for line, value in values:
        if isinstance(value, str) and isinstance(error, UnicodeEncodeError) and value == error.object:
            return DataError(
                f"{name}, line {line}: {column} has half of a character, {value[error.start]!r}; it takes whole ones"
            )
        if type(value) is not kind:
            return DataError(
                f"{name}, line {line}: {column} holds {_KINDS[type(value)]}, and in line {first} {_KINDS[kind]}; all "
                "rows must hold the same kind"
            )
    return DataError(
        f"{name}, from line {first}: {column} holds {_KINDS[kind]} that no array of numbers or texts can hold"
    )


def _objects(name: str, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with its line, from 1."""
    try:
        with open(name, encoding="utf-8-sig") as lines:  # with or without a mark of the byte order
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(f'files: {name}, line {number}: it takes an object, as in {{"text": "…"}}')
                for column in columns:
                    if column not in row:
                        raise DataError(f"{name}, line {number} has no column {column}; it has {', '.join(row)}")
                    if row[column] is None:
                        raise DataError(f"{name}, line {number}: {column} is null; leave such rows out")
                yield number, row
    except json.JSONDecodeError as error:
        raise DataError(f"files: {name}, line {number}: not JSON: {error.msg}; it takes one object per line") from None
    except UnicodeDecodeError as error:
        raise DataError(f"files: {name}: not UTF-8: {error.reason}; it takes text that is not compressed") from None
    except OSError as error:
        raise DataError(f"files: {name}: {error.strerror}") from None
