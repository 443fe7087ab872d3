"""A table of any kind as files that all ranks map to memory: its tokens, and one file per column that inputs take.

One process makes them, once for the same files, tokenizer and settings. A rank opens only the files of its inputs.
"""

from array import array
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np

from auto3d.data.columns import values_of
from auto3d.data.interface import DataError
from auto3d.data.kept import Tick, identity_of, kept
from auto3d.data.keys import DataKeys
from auto3d.data.packing import Packed, Padded
from auto3d.data.sources import TABLES
from auto3d.data.tokenizing import open_tokenizer, tokenizer_identity

_TOKENS, _ENDS = "tokens", "ends"


def open_source(settings: DataKeys) -> "PreparedTable":
    """The samples of the table of ``settings``, which this process prepares unless that is done."""
    folder, about = kept(settings.cache, _identity(settings), partial(_prepare, settings), wait_s=settings.wait_s)
    return PreparedTable(settings, folder, about)


class PreparedTable:
    """Samples of a prepared table: documents or windows of its tokens, or its rows."""

    def __init__(self, settings: DataKeys, folder: Path, about: Mapping[str, Any]) -> None:
        if not about["rows"]:
            raise DataError("files: no row has a token" if about["empty"] else "files: they have no rows")
        self._folder, self._about, self._fields = folder, about, settings.columns
        self._names = list(self._fields)
        self._number = np.array(crc32(folder.name.encode()))
        self._columns: dict[str, np.ndarray] = {}
        self.pad = about["pad"]
        self.samples: int | None = about["rows"]
        self._documents: Packed | Padded | None = None
        open_tokens = partial(self._mapped, _TOKENS, about["dtype"])
        if settings.tokenizer is not None and settings.packing == "padded":
            self._documents = Padded(open_tokens, partial(self._mapped, _ENDS, "int64"))
        elif settings.tokenizer is not None:
            length = settings.sequence_length
            self._documents = Packed([open_tokens], [about["tokens"]], length=length, shifted=settings.shifted)
            self.samples = self._documents.samples

    def tokens(self, sample: int, seed: int) -> np.ndarray:
        assert self._documents is not None  # settings without a tokenizer have no input of tokens
        return self._documents.tokens(sample)

    def column(self, sample: int, name: str) -> np.ndarray:
        if name not in self._columns:
            field = self._fields[name]
            flat = self._mapped(_file_of(self._names, name), field.dtype_name)
            self._columns[name] = flat.reshape(self._about["rows"], *field.shape)
        return self._columns[name][sample]

    def whole(self, sample: int) -> dict[str, np.ndarray]:
        return {"table": self._number}

    def largest(self, column: str | None) -> int | None:
        largest: int | None = self._about["largest"].get(_TOKENS if column is None else _file_of(self._names, column))
        return largest

    def describe(self) -> str:
        about, parts = self._about, [f"{self._about['rows']:,} rows"]
        if self._documents is not None:
            parts[0] = f"{about['rows']:,} documents with {about['tokens']:,} tokens"
        if about["empty"]:
            parts.append(f"rows without a token, which are left out: {about['empty']:,}")
        if isinstance(self._documents, Packed):
            parts.append(f"the last {self._documents.unused:,} tokens are in no sample")
        return "; ".join(parts)

    def _mapped(self, name: str, dtype: str) -> np.ndarray:
        return np.memmap(self._folder / name, dtype=dtype, mode="r")


def _file_of(names: list[str], column: str) -> str:
    return f"column-{names.index(column)}"


def _identity(settings: DataKeys) -> dict[str, Any]:
    """Everything that the prepared files depend on."""
    import tokenizers
    import transformers

    identity: dict[str, Any] = {
        "table": 1,
        "source": settings.source,
        "files": identity_of(settings.files),
        "columns": [[name, field.shape, field.dtype_name, field.targets] for name, field in settings.columns.items()],
    }
    if settings.tokenizer is not None:
        identity |= {
            "tokenizer": tokenizer_identity(settings.tokenizer),
            "text": settings.text,
            "length": _length(settings),
            "versions": [transformers.__version__, tokenizers.__version__],
        }
    return identity


def _length(settings: DataKeys) -> int | None:
    return settings.sequence_length if settings.packing == "padded" else None


def _prepare(settings: DataKeys, folder: Path, tick: Tick) -> dict[str, Any]:
    """Write the files of the table into ``folder``."""
    tokenizer = open_tokenizer(settings.tokenizer, _length(settings)) if settings.tokenizer is not None else None
    read_rows: Callable = import_module(TABLES[settings.source]).read_rows
    fields, names = settings.columns, list(settings.columns)
    wanted = list(dict.fromkeys([*names, *([settings.text] if tokenizer else [])]))
    first = rows = empty = tokens = 0
    dtype = "uint16" if tokenizer and tokenizer.size <= 1 << 16 else "uint32"
    ends, largest = array("q"), dict[str, int]()
    with ExitStack() as stack:

        def opened(name: str) -> BinaryIO:
            return stack.enter_context((folder / name).open("wb"))

        files = {name: opened(_file_of(names, name)) for name in names}
        token_file = opened(_TOKENS) if tokenizer else None
        for batch in read_rows(settings.files, wanted):
            tick()
            size = len(next(iter(batch.values())))
            kept_rows = np.ones(size, dtype=bool)
            if tokenizer and token_file:
                documents = tokenizer.documents(_texts(batch[settings.text], settings.text, first))
                kept_rows = np.array([bool(document) for document in documents])
                flat = np.fromiter(chain.from_iterable(documents), dtype=np.int64)
                _write(token_file, flat.astype(dtype))
                _raise_to(largest, _TOKENS, flat)
                for document in filter(None, documents):
                    ends.append(tokens := tokens + len(document))
            for name in names:
                values = values_of(batch[name], fields[name], column=name, first=first)[kept_rows]
                _write(files[name], values)
                if fields[name].dtype_name == "int64":
                    _raise_to(largest, _file_of(names, name), values)
            first, rows, empty = first + size, rows + int(kept_rows.sum()), empty + int((~kept_rows).sum())
        if tokenizer and settings.packing == "padded":
            _write(opened(_ENDS), np.array(ends, dtype=np.int64))
    counts = {"rows": rows, "empty": empty, "tokens": tokens}
    return {**counts, "dtype": dtype, "largest": largest, "pad": tokenizer.pad or 0 if tokenizer else 0}


def _texts(column: Any, name: str, first: int) -> list[str]:
    texts: list[str] = column.to_pylist()
    for row, text in enumerate(texts, start=first):
        if not isinstance(text, str):
            raise DataError(f"column {name}: row {row} holds {_name_of(text)}; it takes text")
    return texts


def _name_of(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _raise_to(largest: dict[str, int], name: str, values: np.ndarray) -> None:
    if values.size:
        maximum = int(values.max())
        largest[name] = max(largest.get(name, maximum), maximum)


def _write(file: BinaryIO, values: np.ndarray) -> None:
    file.write(np.ascontiguousarray(values).data) if values.size else None
