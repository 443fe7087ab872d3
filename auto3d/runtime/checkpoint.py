"""Checkpoints: the state of a training between two iterations, from which it can continue.

A checkpoint is a folder of safetensors files, one per rank, and a checkpoint.json. The latter is written last: a folder
without it is no checkpoint. Tensors are stored under their names in the model, each in a single file even if several
ranks hold it, and each rank reads the tensors that it needs. Of a tensor that tensor parallelism splits, each shard is
stored under a name that says which one it is. Random numbers and data depend only on the iteration, so none of their
state is stored.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from auto3d.errors import InputError
from auto3d.runtime.waiting import waiting_for
from auto3d.tensor_placement import Split

VERSION = 1
KEPT = 2  # checkpoints that stay: the newest, and the one before it in case the newest is damaged


class CheckpointError(InputError):
    """A checkpoint that cannot be read, or that belongs to another model."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The folder of a training's checkpoints, and how often to write one.

    A training that is asked to end always writes one.
    """

    folder: Path  # visible to all ranks, and writable only by this user
    every: int | None  # iterations from one to the next; one more after the last. None: only when asked to end

    def due(self, before: int, done: int, last: int) -> bool:
        """Whether to write one after ``done`` of ``last`` iterations, having asked last after ``before``."""
        return self.every is not None and (done // self.every > before // self.every or done == last)


@dataclass(frozen=True, kw_only=True)
class StateSplit:
    """How the tensors of a checkpoint are split, by their names in the model; those without an entry are whole."""

    tp: int = 1
    split: dict[str, Split] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The content of checkpoint.json."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    iteration: int  # number of finished iterations
    files: dict[str, list[str]]  # file name -> names of its tensors
    tp: int = 1
    split: dict[str, Split] = field(default_factory=dict)  # how tp ranks split the model's tensors
    version: int = VERSION


_adapter = TypeAdapter(Checkpoint)


def newest(folder: Path) -> int | None:
    """The iteration of the newest complete checkpoint in ``folder``; None if there is none."""
    return max(_complete(folder), default=None)


def save(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    *,
    iteration: int,
    timeout_s: float,
    sharding: StateSplit | None = None,
) -> None:
    """Write a checkpoint of all ranks; ``state`` is this rank's. All ranks must call it, between two iterations.

    Raises WaitTimeoutError if another rank has not written its tensors within ``timeout_s``.
    """
    sizes: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    with waiting_for("the sizes of all ranks' tensors for the checkpoint", timeout_s):
        dist.all_gather_object(sizes, {name: tensor.nbytes for name, tensor in state.items()})
    names_of = _assign(sizes)
    target = _folder(folder, iteration)
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    tensors = {name: state[name].clone() for name in names_of[dist.get_rank()]}
    if tensors:
        _write(target / _file(dist.get_rank()), partial(save_file, tensors))
    with waiting_for("the other ranks to write their tensors to the checkpoint", timeout_s):
        dist.barrier()
    if dist.get_rank() == 0:
        files = {_file(rank): names for rank, names in enumerate(names_of) if names}
        split = sharding or StateSplit()
        text = dumps(asdict(Checkpoint(iteration=iteration, files=files, tp=split.tp, split=split.split)))
        _write(target / "checkpoint.json", lambda file: file.write_text(text))
        _remove_before(folder, sorted(_complete(folder))[-KEPT:][0])
    with waiting_for("rank 0 to complete the checkpoint", timeout_s):
        dist.barrier()


def load(
    folder: Path, state: Mapping[str, torch.Tensor], *, iteration: int, sharding: StateSplit | None = None
) -> None:
    """Copy the tensors of the checkpoint of ``iteration`` into those of ``state``.

    Raises CheckpointError if it was written with another ``sharding``, or, naming the file, if a tensor is missing or
    has another shape.
    """
    source = _folder(folder, iteration)
    checkpoint = _read(source)
    if checkpoint is None:
        raise CheckpointError(f"{source}: this rank finds no checkpoint.json there; do all nodes share the folder?")
    _check_sharding(source, checkpoint, sharding or StateSplit())
    file_of = {name: file for file, names in checkpoint.files.items() for name in names}
    missing = next((name for name in state if name not in file_of), None)
    if missing is not None:
        raise CheckpointError(f"{source}: it lacks {missing}; it belongs to another model or optimizer")
    with ExitStack() as open_files:
        opened: dict[Path, Any] = {}
        for name, tensor in state.items():
            file = source / file_of[name]
            try:
                if file not in opened:
                    opened[file] = open_files.enter_context(safe_open(str(file), framework="pt"))
                stored = opened[file].get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: {name} cannot be read: {error}") from None
            if stored.shape != tensor.shape:
                shapes = f"{list(stored.shape)}, but {list(tensor.shape)} in the model"
                raise CheckpointError(f"{file}: {name} has shape {shapes}")
            tensor.copy_(stored)


def _check_sharding(source: Path, checkpoint: Checkpoint, wanted: StateSplit) -> None:
    if checkpoint.tp != wanted.tp:
        raise CheckpointError(
            f"{source}: it was written with tp = {checkpoint.tp}, and this plan has tp = {wanted.tp}; train from it "
            f"with a plan of tp = {checkpoint.tp}"
        )
    for name in sorted(checkpoint.split.keys() | wanted.split.keys()):
        stored, here = checkpoint.split.get(name), wanted.split.get(name)
        if stored != here:
            raise CheckpointError(
                f"{source}: {name} is {_how(stored)} in it, and {_how(here)} in this plan; train from it with the plan "
                "that wrote it"
            )


def _how(split: Split | None) -> str:
    return "whole" if split is None else f"split along dimension {split.dim} in blocks of {list(split.blocks)}"


def _assign(sizes: list[dict[str, int]]) -> list[list[str]]:
    """The names of the tensors that each rank writes: one holder writes each tensor, and all write about as many bytes.

    ``sizes`` has a dict from names to bytes for each rank.
    """
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(sizes):
        for name in names:
            holders.setdefault(name, []).append(rank)
    written = [0] * len(sizes)
    assigned: list[list[str]] = [[] for _ in sizes]
    for name, ranks in holders.items():
        rank = min(ranks, key=lambda rank: written[rank])
        written[rank] += sizes[rank][name]
        assigned[rank].append(name)
    return assigned


def _folder(folder: Path, iteration: int) -> Path:
    return folder / f"iteration-{iteration:08d}"


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _iterations(folder: Path) -> list[int]:
    """The iterations of all checkpoints in ``folder``, complete or not."""
    matches = [re.fullmatch(r"iteration-(\d+)", path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return [int(match[1]) for match in matches if match]


def _complete(folder: Path) -> list[int]:
    return [iteration for iteration in _iterations(folder) if _read(_folder(folder, iteration)) is not None]


def _remove_before(folder: Path, iteration: int) -> None:
    for old in _iterations(folder):
        if old < iteration:
            shutil.rmtree(_folder(folder, old))


def _read(folder: Path) -> Checkpoint | None:
    try:
        checkpoint = _adapter.validate_json((folder / "checkpoint.json").read_bytes())
    except (OSError, ValidationError):
        return None
    return checkpoint if checkpoint.version == VERSION else None


def _write(file: Path, write: Callable[[Path], object]) -> None:
    """Call ``write``, so that afterwards either the complete file is on disk or none."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        write(unfinished)
        with unfinished.open("rb") as stream:
            os.fsync(stream.fileno())
        unfinished.replace(file)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"{file}: a checkpoint cannot be written: {error}") from error
