"""Initial weights from a safetensors file, or from a folder as Hugging Face's save_pretrained writes it."""

from collections.abc import Iterator, Mapping
from json import loads
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from auto3d.errors import InputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")


class WeightsError(InputError):
    """A file or a folder from which no weights can be read."""


class Weights(Mapping[str, torch.Tensor]):
    """The tensors of a file or of a folder; a tensor is read when it is accessed, from the file that has it.

    ``bytes_read`` counts the bytes of what was read. ``names`` maps names in the model to those here where they differ.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises WeightsError if ``path`` is not what it should be."""
        self._file_of: dict[str, Any] = {}
        self.bytes_read = 0
        for file, names in _files(Path(path)).items():
            try:
                opened = safe_open(str(file), framework="pt")
                stored = set(opened.keys())
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{file}: not a readable safetensors file: {error}") from None
            if missing := sorted(set(names or []) - stored):
                raise WeightsError(f"{file}: it lacks {missing[0]}, which {INDEX} says it has")
            self._file_of.update(dict.fromkeys(names or sorted(stored), opened))
        self._names = {name: name for name in self._file_of}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file(name).get_tensor(self._names[name])
        self.bytes_read += tensor.nbytes
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def is_float(self, name: str) -> bool:
        """Whether its elements are floating-point numbers of a type that a training can start from."""
        return self._slice(name).get_dtype() in FLOATS

    def narrowed(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """A range of one dimension of a tensor, without reading the rest of the file."""
        part: torch.Tensor = self._slice(name)[(*[slice(None)] * dim, slice(start, start + length))]
        self.bytes_read += part.nbytes
        return part

    def name_as(self, wanted: Mapping[str, Any], prefix: str) -> None:
        """Give tensors the names that ``wanted`` has for them, where only ``prefix`` and a dot differ.

        transformers saves a model without a head, such as GPT2Model, without the prefix that the same weights have
        inside a model with a head, and loads either into either.
        """
        if not prefix:
            return
        for name in wanted:
            if name not in self._names:
                other = name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"
                if other in self._file_of:
                    self._names.pop(other, None)
                    self._names[name] = other

    def _file(self, name: str) -> Any:
        return self._file_of[self._names[name]]

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(self._names[name])


def _files(path: Path) -> dict[Path, list[str] | None]:
    """The safetensors files of ``path``, with the names of the tensors to take from each file; None: all."""
    if not path.is_dir():
        return {path: None}
    index = path / INDEX
    if (path / SINGLE).is_file():
        return {path / SINGLE: None}
    if not index.is_file():
        problem = f"{path}: it has neither {SINGLE} nor {INDEX}"
        if any(path.glob("pytorch_model*.bin*")):
            problem += (
                ", and pytorch_model.bin is a pickle, which could run any code; convert it where you trust it, by "
                "transformers' from_pretrained and save_pretrained"
            )
        raise WeightsError(problem)
    try:
        weight_map = loads(index.read_bytes())["weight_map"]
        files: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise WeightsError(f"{index}: {file!r} is not the name of a file in this folder")
            names = files.setdefault(path / file, [])
            assert names is not None
            names.append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{index}: not an index of safetensors files: {error}") from None
    return files
