"""Checkpoints: the state of a training between two iterations, from which it can go on under any Plan.

A checkpoint is a folder of safetensors files, one per rank, and a checkpoint.json, which says for every tensor of the
model and of the optimizer its whole shape and which file has which part of it: a tensor-parallel shard, or a range of
the flattened tensor (ZeRO-1). Each part is stored once, even if several ranks hold it. Random numbers, the position in
the data and the learning rate depend only on the iteration, so none of their state is stored.

torch.distributed.checkpoint is not used: its own files are unpickled when they are read, and the parts in its
safetensors files are boxes, which neither a range of a flattened tensor nor a shard of several blocks is.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from json import dumps, loads
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from auto3d.capture.graph import Graph
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.settings import OptimizerSettings
from auto3d.tensor_placement import Split

VERSION = 2
KEPT = 2  # by default: the newest checkpoint, and the previous checkpoint in case the newest is damaged
INDEX = "checkpoint.json"


class CheckpointError(InputError):
    """A checkpoint that cannot be read, or that belongs to another model or training."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The folder of a training's checkpoints, how often to write a checkpoint and how many to keep.

    A training that is asked to end always writes a checkpoint.
    """

    folder: Path  # visible to all ranks, and writable only by this user
    every: int | None  # iterations between checkpoints; the last is at the end. None: only when asked to end
    keep: int = KEPT  # number of checkpoints that stay

    def due(self, before: int, done: int, last: int) -> bool:
        """Whether to write one after ``done`` of ``last`` iterations, having asked last after ``before``."""
        return self.every is not None and (done // self.every > before // self.every or done == last)


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """One part of a tensor; in its file it is called as the tensor is."""

    file: str
    shard: int = 0  # number of the tensor-parallel shard
    flat: tuple[int, int] | None = None  # ``[first, last)`` of the flattened shard; None: the whole shard, in its shape


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of the model or of the optimizer, and its parts."""

    shape: tuple[int, ...]  # shape of the whole tensor
    parts: list[StoredPart]
    split: Split | None = None  # how its shards are cut out of it; None: there is a single shard, the whole
    shards: int = 1


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The content of checkpoint.json."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    iteration: int  # number of finished iterations
    learnt: dict[str, str]  # learnt_by() of its training
    numbers: dict[str, float]  # numbers that all ranks share, such as fp16's loss scale
    files: dict[str, int]  # file name -> bytes
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    version: int = VERSION


_adapter = TypeAdapter(Checkpoint)


def learnt_by(plan: Plan, optimizer: OptimizerSettings) -> dict[str, str]:
    """What must be equal where a training goes on, under any degrees, besides the model's parameters."""
    return {
        "global batch": str(plan.global_batch),
        "seed": str(plan.seed),
        "optimizer": ", ".join(filter(None, (optimizer.optimizer, *(group.optimizer for group in optimizer.groups)))),
    }


def newest(folder: Path) -> int | None:
    """The iteration of the newest complete checkpoint in ``folder``; None if there is none."""
    return max(complete(folder), default=None)


def complete(folder: Path) -> list[int]:
    """The iterations of all complete checkpoints in ``folder``."""
    try:
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        raise CheckpointError(f"{folder}: checkpoints cannot be read from it: {error.strerror}") from None
    matches = (re.fullmatch(r"iteration-(\d+)", name) for name in names)
    return sorted(int(match[1]) for match in matches if match and (folder / match[0] / INDEX).exists())


def checkpoint_folder(folder: Path, iteration: int) -> Path:
    """The folder of one checkpoint, in the ``folder`` of all."""
    return folder / f"iteration-{iteration:08d}"


def to_json(checkpoint: Checkpoint) -> str:
    return dumps(asdict(checkpoint))


def read(source: Path) -> Checkpoint:
    """The description of the checkpoint whose folder is ``source``, all of whose files are there.

    Raises CheckpointError if it cannot be read, has another version, or if a file is missing or truncated.
    """
    file = source / INDEX
    older = f"remove {source} to continue from an earlier one"
    try:
        text = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: it cannot be read: {error.strerror}; do all nodes share the folder?") from None
    try:
        version = loads(text)["version"]
    except (ValueError, TypeError, KeyError):
        raise CheckpointError(f"{file}: it is damaged; {older}") from None
    if version != VERSION:
        problem = f"it has version {version}, and this version of auto3d reads version {VERSION}"
        raise CheckpointError(f"{file}: {problem}; {older}")
    try:
        checkpoint = _adapter.validate_json(text)
    except ValidationError:
        raise CheckpointError(f"{file}: it is damaged; {older}") from None
    for name, size in checkpoint.files.items():
        part = source / name
        try:
            here = part.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{part}: it cannot be read: {error.strerror}; {older}") from None
        if here != size:
            raise CheckpointError(f"{part}: it has {here} bytes, but {size} were written; {older}")
    return checkpoint


def check(source: Path, checkpoint: Checkpoint, graph: Graph, learnt: Mapping[str, str]) -> None:
    """Raise CheckpointError if the ``checkpoint`` in ``source`` is not from the training that ``learnt`` describes,
    of the model with this ``graph``."""
    for key in checkpoint.learnt.keys() | learnt.keys():
        there, here = checkpoint.learnt.get(key, "none"), learnt.get(key, "none")
        if there != here:
            raise CheckpointError(f"{source}: it was trained with {key} {there}; this training has {here}")
    if not checkpoint.tensors:  # emulated ranks hold none
        return
    stored = {
        name.removeprefix("model."): tensor for name, tensor in checkpoint.tensors.items() if name.startswith("model.")
    }
    used = {name for node in graph.nodes for name in node.state}
    for name, value in graph.parameters.items():
        if name not in stored:
            if name in used:
                raise CheckpointError(f"{source}: it belongs to another model: it lacks the parameter {name}")
        elif stored[name].shape != tuple(value.shape):
            shapes = f"{list(stored[name].shape)} in it, and {list(value.shape)} in this model"
            raise CheckpointError(f"{source}: it belongs to another model: {name} has shape {shapes}")
    for name in stored:
        if name not in graph.parameters and name not in graph.buffers:
            raise CheckpointError(f"{source}: it belongs to another model: it has {name}, which this model lacks")
