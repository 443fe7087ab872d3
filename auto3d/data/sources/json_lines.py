"""Rows of files with one JSON object per line.

Python's own parser reads them: pyarrow's guesses a type for each column, and makes dates of texts that look like one.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from auto3d.data.interface import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 1000  # rows that are read at once


def read_rows(files: Sequence[str], columns: Sequence[str]) -> Iterator[dict[str, "pa.Array"]]:
    """Consecutive rows of the files: the values of each of ``columns``. Empty lines are no rows."""
    import pyarrow as pa

    for name in files:
        rows = _objects(name, columns)
        while batch := list(islice(rows, _ROWS)):
            values = {}
            for column in columns:
                try:
                    values[column] = pa.array([row[column] for row in batch])
                except (pa.ArrowException, OverflowError) as error:
                    raise DataError(f"column {column} of {name}: {str(error).splitlines()[0]}") from None
            yield values


def _objects(name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        with open(name, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(f'files: {name}, line {number}: it takes an object, as in {{"text": "…"}}')
                for column in columns:
                    if column not in row:
                        raise DataError(f"{name}, line {number} has no column {column}; it has {', '.join(row)}")
                yield row
    except json.JSONDecodeError as error:
        raise DataError(f"files: {name}, line {number}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"files: {name}: not UTF-8: {error.reason}") from None
    except OSError as error:
        raise DataError(f"files: {name}: {error.strerror}") from None
