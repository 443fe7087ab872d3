"""Rows of Parquet files."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from auto3d.data.interface import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 1000  # rows that are read at once


def read_rows(files: Sequence[str], columns: Sequence[str]) -> Iterator[dict[str, "pa.Array"]]:
    """Consecutive rows of the files: the values of each of ``columns``."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    for name in files:
        try:
            with ParquetFile(name) as file:
                known = file.schema_arrow.names
                for column in columns:
                    if column not in known:
                        raise DataError(f"{name} has no column {column}; it has {', '.join(known)}")
                for batch in file.iter_batches(batch_size=_ROWS, columns=list(columns)):
                    yield {column: batch.column(column) for column in columns}
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"files: {name}: not a readable Parquet file: {str(error).splitlines()[0]}") from None
