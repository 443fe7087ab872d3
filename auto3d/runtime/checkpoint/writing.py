"""Writes checkpoints while the training goes on: complete, or not at all.

A save copies this rank's share of the state to host memory, and a thread writes it. All ranks write into a folder whose
name begins with a dot. A file gets its name there when it is on disk, so the thread of rank 0 sees who is done; no
collective is needed, which would get among the training's. Then it writes checkpoint.json and renames the
folder. A folder of another save, which a killed run left, has another name and is removed after the next save.

The copy takes as much host memory as the rank's share of the checkpoint, once, from the first save on.
"""

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from secrets import token_hex
from threading import Thread
from time import monotonic, sleep

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from auto3d.capture.shard import Shard
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.checkpoint.format import (
    INDEX,
    Checkpoint,
    Checkpoints,
    StoredPart,
    StoredTensor,
    checkpoint_folder,
    complete,
    to_json,
)
from auto3d.runtime.checkpoint.state_part import StatePart
from auto3d.runtime.process.background import start_thread
from auto3d.runtime.waiting import deadline, timed_out, waiting_for

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 1.0  # pauses of rank 0 while other ranks write


@dataclass(frozen=True)
class _Held:
    """What one rank holds of one tensor, without its elements."""

    shape: tuple[int, ...]
    shard: Shard | None
    flat: tuple[int, int] | None
    bytes: int
    is_stored: bool

    @staticmethod
    def of(part: StatePart) -> "_Held":
        return _Held(part.shape, part.shard, part.flat, part.tensor.nbytes, part.is_stored)

    @property
    def number(self) -> int:
        return 0 if self.shard is None else self.shard.shard

    @property
    def range(self) -> tuple[int, int]:
        """``[first, last)`` of the flattened shard."""
        return self.flat or (0, prod(self.shape if self.shard is None else self.shard.shape(self.shape)))


class CheckpointWriter:
    """Writes the checkpoints of one training. Every rank makes a writer, and makes the same calls in the same order."""

    def __init__(self, checkpoints: Checkpoints, learnt: Mapping[str, str]) -> None:
        self._checkpoints, self._learnt = checkpoints, dict(learnt)
        self._token = token_hex(4)  # rank 0's names the unfinished folders of this run
        self._copies: dict[str, torch.Tensor] = {}
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def save(self, state: Mapping[str, StatePart], *, iteration: int, numbers: Mapping[str, float]) -> None:
        """Copy ``state``, this rank's, and write it in the background; the training may go on.

        Raises OSError if this rank could not write the previous checkpoint, and WaitTimeoutError if it, or another
        rank's call, took longer than the training's time-out.
        """
        self.finish()
        mine = (self._token, {name: _Held.of(part) for name, part in state.items()})
        everyone: list[tuple[str, dict[str, _Held]]] = [mine] * dist.get_world_size()
        with waiting_for("the sizes of all ranks' tensors for the checkpoint"):
            dist.all_gather_object(everyone, mine)
        tensors, written = _assign([held for _, held in everyone])
        own = self._copy({name: state[name].tensor for name in written[dist.get_rank()]})
        checkpoint = Checkpoint(
            iteration=iteration,
            learnt=self._learnt,
            numbers=dict(numbers),
            files={_file(rank): 0 for rank, names in enumerate(written) if names},
            tensors=tensors,
        )
        unfinished = self._checkpoints.folder / f".{checkpoint_folder(Path(), iteration).name}.{everyone[0][0]}"
        copied = None
        if any(tensor.is_pinned() for tensor in own.values()):
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        work = partial(self._write, checkpoint, own, unfinished, dist.get_rank(), copied)
        self._thread = start_thread("checkpoint", work)

    def check(self) -> None:
        """Raise the error of a write that has failed."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until this rank has written; rank 0 until the checkpoint is complete. Raises what ``save`` raises."""
        if self._thread is not None:
            what = "the last checkpoint to be written"
            THIS_RANK.set_waiting_for(what)
            self._thread.join(THIS_RANK.timeout_s)
            if self._thread.is_alive():
                raise timed_out(what)
            THIS_RANK.set_computing()
            self._thread = None
        self.check()

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies in host memory, which later saves use again. A GPU copies when it comes to it, before any update that
        is queued later."""
        if self._copies.keys() != tensors.keys():
            self._copies = {}
            for name, tensor in tensors.items():
                self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        return self._copies

    def _write(
        self,
        checkpoint: Checkpoint,
        own: dict[str, torch.Tensor],
        folder: Path,
        rank: int,
        copied: "torch.cuda.Event | None",
    ) -> None:
        try:
            if copied is not None:
                torch.cuda.set_device(copied.device)  # a new thread has device 0, where its wait would make a context
                copied.synchronize()
            if own or rank == 0:  # rank 0 waits for no rank without files, and may have renamed the folder by now
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if own:
                _write_whole(folder / _file(rank), partial(save_file, own))
            if rank == 0:
                self._complete(checkpoint, folder)
        except Exception as error:
            self._error = error

    def _complete(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Wait for the files of all ranks, make ``folder`` a checkpoint, and remove those that are not kept."""
        self._await_files(folder, checkpoint.files.keys())
        for name in checkpoint.files:
            checkpoint.files[name] = (folder / name).stat().st_size
        _write_whole(folder / INDEX, lambda file: file.write_text(to_json(checkpoint)))
        _sync(folder)
        above = self._checkpoints.folder
        target = checkpoint_folder(above, checkpoint.iteration)
        if target.exists():  # something that is no checkpoint, or the training would have gone on from it
            shutil.rmtree(target)
        try:
            folder.rename(target)
        except OSError as error:
            raise OSError(f"{target}: a checkpoint cannot be written: {error}") from error
        _sync(above)
        for unfinished in above.glob(".iteration-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        for iteration in complete(above)[: -self._checkpoints.keep]:
            _remove(checkpoint_folder(above, iteration))

    def _await_files(self, folder: Path, names: Collection[str]) -> None:
        end, pause = deadline(), FIRST_PAUSE_S
        while missing := sorted(set(names) - {path.name for path in folder.iterdir()}):
            if monotonic() > end:
                raise timed_out(
                    f"{folder / missing[0]}: its rank has not written it, or not all nodes share the folder"
                )
            sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _assign(held_by: list[dict[str, _Held]]) -> tuple[dict[str, StoredTensor], list[list[str]]]:
    """All tensors with their parts, and for each rank the names of the tensors of which it writes its part.

    Of several ranks that hold the same part, a single rank writes it, such that all ranks write about as many bytes.
    ``held_by`` has a dict from names for each rank.
    """
    holders: dict[tuple[str, int, tuple[int, int]], list[int]] = {}
    for rank, names in enumerate(held_by):
        for name, held in names.items():
            if held.is_stored:
                holders.setdefault((name, held.number, held.range), []).append(rank)
    load = [0] * len(held_by)
    written: list[list[str]] = [[] for _ in held_by]
    tensors: dict[str, StoredTensor] = {}
    for (name, shard, whole_range), ranks in holders.items():
        rank = min(ranks, key=lambda rank: load[rank])
        held = held_by[rank][name]
        load[rank] += held.bytes
        written[rank].append(name)
        split = None if held.shard is None else held.shard.split
        shards = 1 if held.shard is None else held.shard.shards
        stored = tensors.setdefault(name, StoredTensor(shape=held.shape, parts=[], split=split, shards=shards))
        assert (stored.shape, stored.split, stored.shards) == (held.shape, split, shards), name
        flat = None if held.flat is None else whole_range
        stored.parts.append(StoredPart(file=_file(rank), shard=shard, flat=flat))
    return tensors, written


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _remove(folder: Path) -> None:
    """Remove a checkpoint such that what a crash leaves is not taken for a checkpoint."""
    gone = folder.with_name(f".{folder.name}.removed")
    folder.rename(gone)
    shutil.rmtree(gone)


def _write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Call ``write``, so that afterwards either the complete file is on disk or none."""
    unfinished = file.with_name(f".{file.name}")
    try:
        write(unfinished)
        with unfinished.open("rb") as stream:
            os.fsync(stream.fileno())
        unfinished.replace(file)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"{file}: a checkpoint cannot be written: {error}") from error


def _sync(folder: Path) -> None:
    """Have the names in ``folder`` on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
