"""A dataset of the user's own: a function that returns an object with a length and numbered samples.

What this code draws from the generators of torch, numpy and Python follows from the training's seed and the sample, so
that all ranks draw alike, whatever they have read before.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from importlib import import_module
from typing import Any

import numpy as np

from auto3d.data.columns import checked
from auto3d.data.interface import DataError, note
from auto3d.data.keys import DataKeys

_TYPES = {"int64": "iu", "float32": "f", "bool": "b"}


def open_source(settings: DataKeys, seed: int | None = None) -> "OwnDataset":
    """The samples of the dataset that the function of ``settings.source`` returns, whose draws follow from ``seed``."""
    module_name, _, function_name = settings.source.partition(":")
    if not module_name or not function_name:
        raise DataError(f"source: found {settings.source!r}; it takes package.module:function")
    try:
        function = getattr(import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # the user's module can raise anything
        raise DataError(f"source: {settings.source} cannot be imported: {_summary(error)}") from None
    try:
        with _drawing() if seed is not None else nullcontext(lambda _: None) as begin:
            begin(seed)
            dataset = function(**deepcopy(settings.arguments))
            samples = len(dataset)
    except (Exception, SystemExit) as error:
        raise DataError(f"source: {settings.source} returned no dataset with a length: {_summary(error)}") from None
    return OwnDataset(settings, dataset, samples)


class OwnDataset:
    """Samples of a user's dataset: ``dataset[i]`` is a mapping from names to arrays."""

    pad = 0

    def __init__(self, settings: DataKeys, dataset: Any, samples: int) -> None:
        self._dataset, self._fields, self._source = dataset, settings.columns, settings.source
        self.samples: int | None = samples
        self._last: tuple[int, Any] | None = None  # the sample that was read last: several inputs come from a sample
        self._values: dict[str, np.ndarray] = {}  # its columns, as far as they were asked for

    @contextmanager
    def reading(self) -> Iterator[Callable[[int, int], None]]:
        """Inside, samples are read; what this gives is called before each sample, with the training's seed and the
        sample's number in the training."""
        with _drawing() as begin:

            def before(seed: int, number: int) -> None:
                self._last = None  # it may be another sample the next time
                begin(seed, number)

            yield before

    def tokens(self, sample: int, seed: int) -> np.ndarray:
        raise DataError(f"source: {self._source} gives columns, not tokens")

    def column(self, sample: int, name: str) -> np.ndarray:
        """The value of a column; raises DataError unless it has the shape, type and values of its input."""
        return checked(self._value(sample, name), self._fields[name], name)

    def _value(self, sample: int, name: str) -> np.ndarray:
        if self._last is None or self._last[0] != sample:
            try:
                self._last, self._values = (sample, self._dataset[sample]), {}
            except Exception as error:
                note(error, f"sample {sample} of {self._source}")
                raise
        if name not in self._values:
            self._values[name] = self._converted(self._last[1], sample, name)
        return self._values[name]

    def _converted(self, content: Any, sample: int, name: str) -> np.ndarray:
        field = self._fields[name]
        try:
            value = np.asarray(content[name])
        except KeyError:
            lacks = f"lacks it; it has {', '.join(map(str, content))}"
            raise DataError(f"{self._where(name, sample)} {lacks}") from None
        except (TypeError, IndexError):
            problem = f"is a {type(content).__name__}; it takes a mapping from names to values"
            raise DataError(f"sample {sample} of {self._source} {problem}, as for column {name}") from None
        except ValueError:
            problem = f"has rows of different lengths; it takes {list(field.shape)}"
            raise DataError(f"{self._where(name, sample)} {problem}") from None
        if value.shape != field.shape or value.dtype.kind not in _TYPES[field.dtype_name]:
            shape = f"shape {list(value.shape)} of {value.dtype}"
            takes = f"{list(field.shape)} of {field.dtype_name}"
            raise DataError(f"{self._where(name, sample)} has {shape}; it takes {takes}")
        return value.astype(field.dtype_name, copy=False)

    def _where(self, column: str, sample: int) -> str:
        return f"column {column}: sample {sample} of {self._source}"

    def whole(self, sample: int) -> dict[str, np.ndarray]:
        """All columns, of which a comparison needs no check of values."""
        return {name: self._value(sample, name) for name in self._fields}

    def largest(self, column: str | None) -> int | None:
        return None

    def describe(self) -> str:
        return ""


def _drawing() -> AbstractContextManager[Callable[..., Any]]:
    from auto3d.data.drawing import drawing  # it imports torch, which ranks have

    return drawing()


def _summary(error: BaseException) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"
