"""Checkpoints: all that a training has changed, written between two iterations, from which it goes on.

A checkpoint is a folder of safetensors files, one per rank, and a checkpoint.json that is written last: without it
there is no checkpoint. Tensors are kept by the names that they have in the model, each in one file, whatever ranks hold
them, and each rank reads its own. Random numbers and data follow from the iteration alone: nothing is kept of them.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from json import dumps
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from auto3d.errors import InputError
from auto3d.runtime.waiting import waiting_for

VERSION = 1
KEPT = 2  # the newest, and the one before for whoever finds that one damaged


class CheckpointError(InputError):
    """A checkpoint that cannot be read, or is of another model."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where a training's checkpoints are, and when one is written beside the one that it leaves if asked to end."""

    folder: Path  # seen by all ranks, and written by this user alone
    every: int | None  # iterations, and after the last; none: only when it is asked to end

    def due(self, before: int, done: int, last: int) -> bool:
        """Whether one is to be written after ``done`` of ``last`` iterations, ``before`` of which were looked at."""
        return self.every is not None and (done // self.every > before // self.every or done == last)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What checkpoint.json says."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    iteration: int  # how many were done
    files: dict[str, list[str]]  # file -> the names of its tensors
    version: int = VERSION


_adapter = TypeAdapter(Checkpoint)


def newest(folder: Path) -> int | None:
    """How many iterations were done at the newest whole checkpoint in ``folder``; None if there is none."""
    return max(_whole(folder), default=None)


def save(folder: Path, state: Mapping[str, torch.Tensor], *, iteration: int, timeout_s: float) -> None:
    """Write a checkpoint of all ranks, of which this one has ``state``; all must call it, between two iterations.

    Raises WaitTimeoutError if another rank has not written its share within ``timeout_s``.
    """
    sizes: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    with waiting_for("what each rank has to write to the checkpoint", timeout_s):
        dist.all_gather_object(sizes, {name: tensor.nbytes for name, tensor in state.items()})
    shares = _shares(sizes)
    target = _folder(folder, iteration)
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = {name: state[name].contiguous() for name in shares[dist.get_rank()]}
    if own:
        _write(target / _file(dist.get_rank()), partial(save_file, own))
    with waiting_for("the other ranks to write their shares of the checkpoint", timeout_s):
        dist.barrier()
    if dist.get_rank() == 0:
        files = {_file(rank): names for rank, names in enumerate(shares) if names}
        text = dumps(asdict(Checkpoint(iteration=iteration, files=files)))
        _write(target / "checkpoint.json", lambda file: file.write_text(text))
        _remove_before(folder, sorted(_whole(folder))[-KEPT:][0])
    with waiting_for("rank 0 to complete the checkpoint", timeout_s):
        dist.barrier()


def load(folder: Path, state: Mapping[str, torch.Tensor], *, iteration: int) -> None:
    """Copy what the checkpoint of ``iteration`` holds into each tensor of ``state``.

    Raises CheckpointError, with the file, if it lacks one or has it in another shape.
    """
    source = _folder(folder, iteration)
    checkpoint = _read(source)
    if checkpoint is None:
        raise CheckpointError(f"{source}: this rank does not see its checkpoint.json; do all nodes share the folder?")
    where = {name: file for file, names in checkpoint.files.items() for name in names}
    missing = next((name for name in state if name not in where), None)
    if missing is not None:
        raise CheckpointError(f"{source}: it lacks {missing}; it is of another model or optimizer")
    with ExitStack() as open_files:
        opened = {}
        for name, tensor in state.items():
            file = source / where[name]
            try:
                if file not in opened:
                    opened[file] = open_files.enter_context(safe_open(str(file), framework="pt"))
                found = opened[file].get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: {name} cannot be read: {error}") from None
            if found.shape != tensor.shape:
                raise CheckpointError(f"{file}: {name} has shape {list(found.shape)}, the model's {list(tensor.shape)}")
            tensor.copy_(found)


def _shares(sizes: list[dict[str, int]]) -> list[list[str]]:
    """Which of its tensors each rank writes: each is written by one of those that have it, and all write about as much.

    ``sizes`` has a dict from names to bytes for each rank.
    """
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(sizes):
        for name in names:
            holders.setdefault(name, []).append(rank)
    written = [0] * len(sizes)
    shares: list[list[str]] = [[] for _ in sizes]
    for name, ranks in holders.items():
        rank = min(ranks, key=lambda rank: written[rank])
        written[rank] += sizes[rank][name]
        shares[rank].append(name)
    return shares


def _folder(folder: Path, iteration: int) -> Path:
    return folder / f"iteration-{iteration:08d}"


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _begun(folder: Path) -> list[int]:
    """The iterations of checkpoints, whole or not."""
    found = [re.fullmatch(r"iteration-(\d+)", path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return [int(match[1]) for match in found if match]


def _whole(folder: Path) -> list[int]:
    return [iteration for iteration in _begun(folder) if _read(_folder(folder, iteration)) is not None]


def _remove_before(folder: Path, iteration: int) -> None:
    for old in _begun(folder):
        if old < iteration:
            shutil.rmtree(_folder(folder, old))


def _read(folder: Path) -> Checkpoint | None:
    try:
        checkpoint = _adapter.validate_json((folder / "checkpoint.json").read_bytes())
    except (OSError, ValidationError):
        return None
    return checkpoint if checkpoint.version == VERSION else None


def _write(file: Path, write: Callable[[Path], object]) -> None:
    """What ``write`` writes: the whole file, on the disk, or none."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        write(unfinished)
        with unfinished.open("rb") as stream:
            os.fsync(stream.fileno())
        unfinished.replace(file)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"{file}: a checkpoint cannot be written: {error}") from error
