"""Reads tensors of a checkpoint: those parts that a rank holds under its Plan, or whole tensors.

A rank reads only the bytes that it needs where its part and the stored parts are cut in the same way, or the stored
part is whole. Elsewhere it reads the stored shards that have elements of its part, and puts the whole tensor together:
one at a time, in host memory.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from auto3d.capture.shard import Shard
from auto3d.runtime.checkpoint.format import Checkpoint, CheckpointError, StoredPart, StoredTensor, read
from auto3d.runtime.checkpoint.state_part import StatePart


class CheckpointReader:
    """The tensors of the checkpoint in the folder ``source``; a tensor is read when it is asked for.

    Use it in a ``with`` statement: it keeps the files open. Raises CheckpointError, as do all its methods.
    """

    def __init__(self, source: Path) -> None:
        self.checkpoint: Checkpoint = read(source)
        self.bytes_read = 0
        self._source = source
        self._files = ExitStack()
        self._opened: dict[str, Any] = {}

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def load(self, state: Mapping[str, StatePart]) -> None:
        """Copy what the checkpoint has of each part of ``state`` into it.

        Of a parameter of which ``state`` has what the optimizer keeps, the checkpoint must hold no more than that.
        """
        if more := self._kept_beside(state):
            raise CheckpointError(f"{self._source}: it has {more}, which the optimizer does not keep here")
        for name, part in state.items():
            stored = self._stored(name)
            if stored.shape != part.shape:
                shapes = f"{list(stored.shape)}, but {list(part.shape)} in the model"
                raise CheckpointError(f"{self._source}: {name} has shape {shapes}")
            values = self._part(name, stored, part)
            if values.dtype != part.tensor.dtype:
                types = f"{values.dtype}, but {part.tensor.dtype} in this training"
                raise CheckpointError(f"{self._source}: {name} has type {types}")
            part.tensor.copy_(values.view(part.tensor.shape))

    def _kept_beside(self, state: Mapping[str, StatePart]) -> str:
        """What the checkpoint has of an optimizer and ``state``, which has more of the same parameter, lacks; or ""."""
        parameters = {name.removeprefix("model.") for name in state if name.startswith("model.")}

        def parameter_of(name: str) -> str:
            """The parameter of ``optimizer.NAME.KEY``, in which names and keys may have dots."""
            words = name.split(".")[1:]
            names = (".".join(words[:end]) for end in range(len(words) - 1, 0, -1))
            return next((parameter for parameter in names if parameter in parameters), "")

        kept = {parameter_of(name) for name in state if name.startswith("optimizer.")} - {""}
        others = (name for name in self.checkpoint.tensors if name.startswith("optimizer.") and name not in state)
        return next((name for name in others if parameter_of(name) in kept), "")

    def whole(self, name: str) -> torch.Tensor:
        """The whole tensor called ``name``."""
        return self._whole(name, self._stored(name), None)

    def _stored(self, name: str) -> StoredTensor:
        stored = self.checkpoint.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self._source}: it lacks {name}; it belongs to another model or optimizer")
        return stored

    def _part(self, name: str, stored: StoredTensor, part: StatePart) -> torch.Tensor:
        """The elements of ``part``, flattened or in its shape."""
        shard = part.shard
        shape = part.shape if shard is None else shard.shape(part.shape)
        first, last = part.flat or (0, prod(shape))
        if (shard is None and stored.split is None) or (
            shard is not None and (stored.split, stored.shards) == (shard.split, shard.shards)
        ):
            return self._range(name, stored, 0 if shard is None else shard.shard, first, last)
        if shard is not None and stored.split is None and [stored_part.flat for stored_part in stored.parts] == [None]:
            values = self._cut(name, stored.parts[0], shard, shape)
        else:
            whole = self._whole(name, stored, shard)
            values = whole if shard is None else shard.of(whole)
        return values.flatten()[first:last]

    def _cut(self, name: str, part: StoredPart, shard: Shard, shape: Sequence[int]) -> torch.Tensor:
        """``shard``, of ``shape``, of a tensor that ``part`` has whole; reads nothing else of it."""
        runs = [
            (start, self._read(name, part, (*[slice(None)] * shard.split.dim, slice(first, first + length))))
            for first, start, length in shard.runs()
        ]
        if not runs:
            return self._read(name, part, (slice(0, 0),)).new_zeros(shape)
        values = runs[0][1].new_zeros(shape)
        for start, run in runs:
            values.narrow(shard.split.dim, start, run.shape[shard.split.dim]).copy_(run)
        return values

    def _whole(self, name: str, stored: StoredTensor, needed: Shard | None) -> torch.Tensor:
        """The whole tensor; with ``needed``, what other shards alone have of it stays undefined."""
        if stored.split is None:
            return self._range(name, stored, 0, 0, prod(stored.shape)).view(stored.shape)
        whole = None
        for number in range(stored.shards):
            shard = Shard(stored.split, number, stored.shards)
            if needed is not None and not _overlap(shard, needed):
                continue
            shape = shard.shape(stored.shape)
            values = self._range(name, stored, number, 0, prod(shape))
            if whole is None:
                whole = values.new_empty(stored.shape)
            shard.put_back(values.view(shape), whole)
        if whole is None:  # ``needed`` is nothing but padding
            return self._range(name, stored, 0, 0, 0).new_empty(stored.shape)
        return whole

    def _range(self, name: str, stored: StoredTensor, shard: int, first: int, last: int) -> torch.Tensor:
        """Elements ``[first, last)`` of the flattened shard number ``shard``."""
        shape = stored.shape if stored.split is None else Shard(stored.split, shard, stored.shards).shape(stored.shape)
        parts = sorted(
            (
                (stored_part.flat or (0, prod(shape)), stored_part)
                for stored_part in stored.parts
                if stored_part.shard == shard
            ),
            key=lambda pair: pair[0],
        )
        pieces: list[torch.Tensor] = []
        filled = first
        for (begin, end), part in parts:
            high = min(last, end)
            if begin <= filled and (filled < high or first == last):
                pieces.append(self._elements(name, part, filled - begin, max(filled, high) - begin))
                filled = max(filled, high)
            if filled == last:
                break
        if filled < last or not pieces:
            raise CheckpointError(f"{self._source}: it lacks elements of {name}")
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _elements(self, name: str, part: StoredPart, first: int, last: int) -> torch.Tensor:
        """Elements ``[first, last)`` of the flattened tensor that a file has as ``part``."""
        shape = self._file(part, name).get_slice(name).get_shape()
        if not shape:
            return self._read(name, part, (...,)).flatten()[first:last]
        row = max(1, prod(shape[1:]))
        top = first // row
        return self._read(name, part, (slice(top, -(-last // row)),)).flatten()[first - top * row : last - top * row]

    def _read(self, name: str, part: StoredPart, place: tuple[Any, ...]) -> torch.Tensor:
        file = self._file(part, name)
        try:
            values: torch.Tensor = file.get_tensor(name) if place == (...,) else file.get_slice(name)[place]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._source / part.file}: {name} cannot be read: {error}") from None
        self.bytes_read += values.nbytes
        return values

    def _file(self, part: StoredPart, name: str) -> Any:
        if part.file not in self._opened:
            file = self._source / part.file
            try:
                self._opened[part.file] = self._files.enter_context(safe_open(str(file), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: {name} cannot be read: {error}") from None
        return self._opened[part.file]


def _overlap(shard: Shard, other: Shard) -> bool:
    """Whether the two shards of a tensor have a common element."""
    if shard.split.dim != other.split.dim:
        return True
    spans = [(first, first + length) for first, _, length in other.runs()]
    return any(first < end and begin < first + length for first, _, length in shard.runs() for begin, end in spans)
