"""Rows of a dataset that ``datasets`` has saved with ``save_to_disk``."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from auto3d.data.interface import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 1000  # rows that are read at once


def read_rows(files: Sequence[str], columns: Sequence[str]) -> Iterator[dict[str, "pa.Array"]]:
    """Consecutive rows of the folders: the values of each of ``columns``."""
    from datasets import DatasetDict, load_from_disk

    for name in files:
        if not Path(name).is_dir():
            raise DataError(f"files: {name}: source dataset takes folders that save_to_disk has written")
        try:
            dataset = load_from_disk(name)
        except Exception as error:  # a damaged folder may raise anything
            raise DataError(f"files: {name}: not a saved dataset: {' '.join(str(error).split())}") from None
        if isinstance(dataset, DatasetDict):
            raise DataError(f"files: {name}: it has the splits {', '.join(dataset)}; give the folder of one of them")
        for column in columns:
            if column not in dataset.column_names:
                raise DataError(f"{name} has no column {column}; it has {', '.join(dataset.column_names)}")
        if len(dataset) == 0:
            continue
        for table in dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=_ROWS):
            yield {column: table[column].combine_chunks() for column in columns}
