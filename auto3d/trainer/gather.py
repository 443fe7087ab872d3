"""The weights of a training's ranks as one whole again, and the whole in its ranks."""

from collections.abc import Mapping, MutableMapping

import torch
import torch.distributed as dist

from auto3d.capture.shard import Shard
from auto3d.errors import InputError
from auto3d.runtime.rank import Rank
from auto3d.runtime.state_part import StatePart
from auto3d.runtime.waiting import waiting_for

PREFIX = "model."  # names of parameters and buffers begin with it in Rank.state()
OF_OPTIMIZER = "optimizer."


def gather(rank: Rank, whole: MutableMapping[str, torch.Tensor], *, timeout_s: float) -> None:
    """Copy the parameters and buffers of all ranks into ``whole``, on every rank. All ranks must call it.

    What is not in ``whole`` yet is added to it. Tensors travel one by one, so that no more than one takes memory beside
    ``whole``. Those that no rank holds, such as parameters that the loss does not use, keep their values.
    """
    held = _held(rank, PREFIX)
    mine = {name: (part.shape, part.tensor.dtype, part.shard) for name, part in held.items()}
    of_ranks = [mine] * dist.get_world_size()
    with waiting_for("the names of all ranks' weights", timeout_s):
        dist.all_gather_object(of_ranks, mine)
    owners: dict[tuple[str, int], tuple[int, tuple[int, ...], torch.dtype, Shard | None]] = {}
    for number, names in enumerate(of_ranks):
        for name, (shape, dtype, shard) in names.items():
            owners.setdefault((name, 0 if shard is None else shard.shard), (number, shape, dtype, shard))
    for (name, _), (owner, shape, dtype, shard) in sorted(owners.items(), key=lambda each: each[0]):
        tensor = torch.empty(shape if shard is None else shard.shape(shape), dtype=dtype)
        if owner == dist.get_rank():
            tensor.copy_(held[name].tensor)
        with waiting_for(f"{name}, which rank {owner} sends", timeout_s):
            dist.broadcast(tensor, owner)
        if name not in whole:
            whole[name] = torch.empty(shape, dtype=dtype)
        if shard is None:
            whole[name].copy_(tensor)
        else:
            shard.put_back(tensor, whole[name])


def scatter(rank: Rank, whole: Mapping[str, torch.Tensor], *, timeout_s: float) -> None:
    """Copy into ``rank`` what it holds of ``whole``. All ranks must call it.

    Raises InputError unless all ranks have the same values.
    """
    mine = {name: torch.hash_tensor(tensor).view(torch.int64).item() for name, tensor in whole.items()}
    of_ranks = [mine] * dist.get_world_size()
    with waiting_for("the values of all ranks' models", timeout_s):
        dist.all_gather_object(of_ranks, mine)
    for number, others in enumerate(of_ranks):
        if changed := [name for name, value in mine.items() if others[name] != value]:
            raise InputError(
                f"model: ranks {dist.get_rank()} and {number} have other values of {changed[0]} since the training; "
                "change it alike on all ranks, outside of `if trainer.is_world_process_zero()`"
            )
    for name, part in _held(rank, PREFIX).items():
        part.tensor.copy_(whole[name] if part.shard is None else part.shard.of(whole[name]))


def optimizer_state(rank: Rank) -> dict[str, StatePart]:
    """What the optimizers of ``rank`` hold, by name."""
    return _held(rank, OF_OPTIMIZER)


def keep_optimizer_state(rank: Rank, earlier: Mapping[str, StatePart], *, timeout_s: float) -> None:
    """Go on with the optimizers of an ``earlier`` training of this Trainer, as transformers' does.

    All ranks must call it. Raises InputError where a rank now trains what another has trained.
    """
    mine = optimizer_state(rank)
    of_ranks: list[set[str]] = [set()] * dist.get_world_size()
    with waiting_for("what the optimizers of all ranks hold", timeout_s):
        dist.all_gather_object(of_ranks, {*earlier})
    for name, part in mine.items():
        if name in earlier and earlier[name].tensor.shape == part.tensor.shape:
            part.tensor.copy_(earlier[name].tensor)
        elif any(name in names for names in of_ranks):
            raise InputError(
                "Trainer.train: the model has changed since the last training, so its stages are divided otherwise, "
                "and the optimizer cannot go on with what it has learnt; make a new Trainer"
            )


def _held(rank: Rank, prefix: str) -> dict[str, StatePart]:
    """What ``rank`` holds, by the rest of a name that begins with ``prefix``."""
    return {name.removeprefix(prefix): part for name, part in rank.state().items() if name.startswith(prefix)}
