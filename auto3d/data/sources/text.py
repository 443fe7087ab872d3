"""The bytes of text files as tokens."""

import sys
import sysconfig
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from auto3d.data.interface import DataError
from auto3d.data.keys import DataKeys
from auto3d.data.sources import BYTE_VALUES


def open_source(settings: DataKeys) -> "TextWindows":
    return TextWindows(settings)


class TextWindows:
    """Random windows of the bytes of files."""

    samples = None
    pad = 0

    def __init__(self, settings: DataKeys) -> None:
        self._files, self._length = settings.files, settings.sequence_length + 1

    def tokens(self, sample: int, seed: int) -> np.ndarray:
        start = np.random.default_rng([seed, sample, 0]).integers(0, len(self._corpus) - self._length + 1)
        return self._corpus[start : start + self._length].astype(np.int64)

    def column(self, sample: int, name: str) -> np.ndarray:
        raise DataError(f"source text has no column {name}")

    def whole(self, sample: int) -> dict[str, np.ndarray]:
        return {}

    def largest(self, column: str | None) -> int | None:
        return BYTE_VALUES - 1

    def describe(self) -> str:
        return ""

    @cached_property
    def _corpus(self) -> np.ndarray:
        return read_corpus(self._files, self._length)


def read_corpus(names: Sequence[str], least: int) -> np.ndarray:
    """The bytes of the files called ``names``, concatenated. Raises DataError if there are fewer than ``least``."""
    paths = [Path(name) for name in names] if names else standard_library()
    try:
        text = b"".join(path.read_bytes() for path in paths)
    except OSError as error:
        raise DataError(f"files: {error.filename}: {error.strerror}") from error
    if len(text) < least:
        files = "1 file" if len(paths) == 1 else f"{len(paths)} files"
        raise DataError(f"files: {len(text)} bytes in {files}; one sample needs {least}")
    return np.frombuffer(text, dtype=np.uint8)


def standard_library() -> list[Path]:
    """The source files of this Python's standard library, without its tests, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(sys.stdlib_module_names - {"test", "idlelib", "lib2to3"})
    files = [
        path for name in names for path in (root / f"{name}.py", *sorted((root / name).rglob("*.py"))) if path.is_file()
    ]
    return [path for path in files if not {"test", "tests", "site-packages"} & set(path.relative_to(root).parts)]
