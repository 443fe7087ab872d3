"""The weights of a training's ranks as one whole again, and the whole in its ranks."""

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from xxhash import xxh3_64_intdigest

from auto3d.capture.shard import Shard
from auto3d.errors import InputError
from auto3d.runtime.checkpoint.reading import CheckpointReader
from auto3d.runtime.checkpoint.state_part import StatePart
from auto3d.runtime.optimizer.offload import updated_parameters
from auto3d.runtime.optimizer.state import begins_with_zeros, state_tensors
from auto3d.runtime.rank import Rank
from auto3d.runtime.waiting import waiting_for
from auto3d.trainer.rank_zero import first_and_more, tell

PREFIX = "model."  # names of parameters and buffers begin with it in Rank.state()
OF_OPTIMIZER = "optimizer."


def gather(rank: Rank, whole: MutableMapping[str, torch.Tensor]) -> None:
    """Copy the parameters and buffers of all ranks into ``whole``, on every rank. All ranks must call it.

    What is not in ``whole`` yet is added to it. Tensors travel one by one, so that no more than one takes memory beside
    ``whole``. Those that no rank holds, such as parameters that the loss does not use, keep their values.
    """
    held = _held(rank, PREFIX)
    mine = {name: (part.shape, part.tensor.dtype, part.shard) for name, part in held.items()}
    of_ranks = [mine] * dist.get_world_size()
    with waiting_for("the names of all ranks' weights"):
        dist.all_gather_object(of_ranks, mine)
    owners: dict[tuple[str, int], tuple[int, tuple[int, ...], torch.dtype, Shard | None]] = {}
    for number, names in enumerate(of_ranks):
        for name, (shape, dtype, shard) in names.items():
            owners.setdefault((name, 0 if shard is None else shard.shard), (number, shape, dtype, shard))
    for (name, _), (owner, shape, dtype, shard) in sorted(owners.items(), key=lambda item: item[0]):
        tensor = torch.empty(shape if shard is None else shard.shape(shape), dtype=dtype)
        if owner == dist.get_rank():
            tensor.copy_(held[name].tensor)
        with waiting_for(f"{name}, which rank {owner} sends"):
            dist.broadcast(tensor, owner)
        if name not in whole:
            whole[name] = torch.empty(shape, dtype=dtype)
        if shard is None:
            whole[name].copy_(tensor)
        else:
            shard.put_back(tensor, whole[name])


def scatter(rank: Rank, whole: Mapping[str, torch.Tensor]) -> None:
    """Copy into ``rank`` what it holds of ``whole``. All ranks must call it.

    Raises InputError unless all ranks have the same values.
    """
    check_alike(whole)
    for name, part in _held(rank, PREFIX).items():
        part.tensor.copy_(whole[name] if part.shard is None else part.shard.of(whole[name]))


def check_alike(whole: Mapping[str, torch.Tensor]) -> None:
    """Raise InputError unless all ranks have the same values in ``whole``. All ranks must call it."""
    for number, names in enumerate(_different(whole)):
        if names:
            raise InputError(
                f"model: ranks {dist.get_rank()} and {number} have other values of {names[0]} since the training; "
                "change it alike on all ranks, outside of `if trainer.is_world_process_zero()`"
            )


def make_alike(whole: Mapping[str, torch.Tensor]) -> None:
    """Give all ranks rank 0's values where they differ, and say so. All ranks must call it.

    torch's DistributedDataParallel does the same, so scripts need no seed before they build a model.
    """
    differ = sorted(set(chain(*_different(whole))))
    of_ranks = [differ] * dist.get_world_size()
    with waiting_for("which weights differ between ranks"):
        dist.all_gather_object(of_ranks, differ)
    for name in (names := sorted(set(chain(*of_ranks)))):
        if name not in whole:
            raise InputError(
                f"model: rank {dist.get_rank()} has no {name}, which another rank has; build the same model"
            )
        with waiting_for(f"{name}, which rank 0 sends"):
            dist.broadcast(whole[name], 0)
    if names:
        tell(
            f"the ranks have built other initial values of {first_and_more(names)}: all train those of rank 0; call "
            "set_seed before the model is built to have the same in each run"
        )


def _different(whole: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """For each rank, the names of the tensors of which it has other values than this one."""
    mine = {name: hash_of(tensor) for name, tensor in whole.items()}
    of_ranks = [mine] * dist.get_world_size()
    with waiting_for("the values of all ranks' models"):
        dist.all_gather_object(of_ranks, mine)
    return [[name for name, value in mine.items() if others.get(name) != value] for others in of_ranks]


def hash_of(tensor: torch.Tensor) -> int:
    """A number of 64 bits that depends on all bits of ``tensor``, which is on the CPU, and on their places."""
    bits: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return xxh3_64_intdigest(bits)


def optimizer_state(rank: Rank) -> dict[str, StatePart]:
    """What the optimizers of ``rank`` hold, by name."""
    return _held(rank, OF_OPTIMIZER)


def state_of_frozen(rank: Rank, checkpoint: Path) -> dict[str, StatePart]:
    """What the ``checkpoint`` has of the optimizer's state of parameters that ``rank`` holds and does not train, whole.

    They were trained when it was written, and may be again.
    """
    frozen = [f"{OF_OPTIMIZER}{name}." for name, parameter in rank.parameters.items() if not parameter.requires_grad]
    with CheckpointReader(checkpoint) as reader:
        names = [name for name in reader.checkpoint.tensors if name.startswith(tuple(frozen))]
        whole = {name.removeprefix(OF_OPTIMIZER): reader.whole(name) for name in names}
    return {name: StatePart(tensor=tensor, shape=tuple(tensor.shape)) for name, tensor in whole.items()}


def keep_optimizer_state(rank: Rank, earlier: Mapping[str, StatePart]) -> dict[str, StatePart]:
    """Copy into the optimizers of ``rank`` what optimizers of an earlier training held, on whatever ranks they were.

    ``earlier`` is what this rank has of it. Returns what of it no optimizer holds any more, because the parameter is
    frozen. All ranks must call it. Raises InputError where two parameters would have to share a number.
    """
    rank.make_state_to_load()
    mine = optimizer_state(rank)
    numbers = {name: part.tensor.clone() for name, part in mine.items() if not part.tensor.dim()}
    places = {name: _place(part) for name, part in earlier.items()}, {name: _place(part) for name, part in mine.items()}
    of_ranks = [places] * dist.get_world_size()
    with waiting_for("what the optimizers of all ranks hold"):
        dist.all_gather_object(of_ranks, places)
    held = set().union(*(after for _, after in of_ranks))
    owners: dict[str, dict[_Place, int]] = {}
    for number, (before, _) in enumerate(of_ranks):
        for name, place in before.items():
            owners.setdefault(name, {}).setdefault(place, number)
    if all(before.get(name) == place for before, after in of_ranks for name, place in after.items() if name in owners):
        for name in mine.keys() & earlier.keys():
            mine[name].tensor.copy_(earlier[name].tensor)
            numbers |= {name: earlier[name].tensor} if name in numbers else {}
    else:
        for name in sorted(held & owners.keys()):
            whole = _joined(name, earlier, owners[name])
            if name in mine:
                _cut(mine[name], whole)
                numbers |= {name: whole} if name in numbers else {}
    _check_shared(mine, numbers, _forget_new(rank, owners.keys()))
    return {name: part for name, part in earlier.items() if name not in held}


def _forget_new(rank: Rank, kept: Collection[str]) -> list[str]:
    """Remove state of parameters that had none before, such as thawed ones: their first step makes it.

    ``kept`` names what earlier optimizers held. State of zeros, with which Adam and SGD begin, stays. Returns names of
    state that cannot be removed, because slices of several parameters have it together.
    """
    shared: list[str] = []
    for optimizer, _ in rank.updaters():
        parts = list(state_tensors(optimizer, rank.parameters, rank.slices))
        new = [part for part in parts if f"{part.parameter}.{part.key}" not in kept]
        if begins_with_zeros(optimizer) or not new:
            continue
        shared += [f"{part.parameter}.{part.key}" for part in new if part.flat is not None]
        names = {part.parameter for part in new}
        originals = {id(rank.parameters[name]) for name in names}
        for original, updated in updated_parameters(optimizer):
            if id(original) in originals:
                optimizer.state.pop(updated, None)
    return shared


def _check_shared(mine: Mapping[str, StatePart], numbers: Mapping[str, torch.Tensor], shared: Sequence[str]) -> None:
    """Raise InputError, on every rank, unless the optimizers hold the ``numbers`` of each name that they should.

    Under ZeRO-1 several parameters have one count of steps. ``shared`` names further state that is wrong.
    """
    mixed = [*shared] + [name for name, number in numbers.items() if not torch.equal(number, mine[name].tensor)]
    of_ranks = [mixed] * dist.get_world_size()
    with waiting_for("whether the optimizers of all ranks can go on"):
        dist.all_gather_object(of_ranks, mixed)
    if first := next(chain.from_iterable(of_ranks), None):
        raise InputError(
            f"shard_optimizer: {first.rpartition('.')[0]} was trained for another number of steps than its neighbours, "
            "which have one count of them; leave shard_optimizer out, so that each parameter has its own"
        )


_Place = tuple[tuple[int, ...], Shard | None, tuple[int, int] | None, torch.dtype]


def _place(part: StatePart) -> _Place:
    return part.shape, part.shard, part.flat, part.tensor.dtype


def _joined(name: str, held: Mapping[str, StatePart], owners: Mapping[_Place, int]) -> torch.Tensor:
    """The whole of the tensor ``name``, whose parts at each place the ``owners`` send from what they have ``held``."""
    (shape, *_, dtype), *_ = owners
    whole = torch.empty(shape, dtype=dtype)
    shards: dict[Shard | None, torch.Tensor] = {}
    for (_, shard, flat, _), owner in owners.items():
        if shard not in shards:
            shards[shard] = whole if shard is None else torch.empty(shard.shape(shape), dtype=dtype)
        place = shards[shard] if flat is None else shards[shard].view(-1)[slice(*flat)]
        sent = held[name].tensor.clone() if owner == dist.get_rank() else torch.empty_like(place)
        with waiting_for(f"{name}, which rank {owner} sends"):
            dist.broadcast(sent, owner)
        place.copy_(sent)
    for shard, tensor in shards.items():
        if shard is not None:
            shard.put_back(tensor, whole)
    return whole


def _cut(part: StatePart, whole: torch.Tensor) -> None:
    """Copy into ``part`` its elements of ``whole``."""
    own = whole if part.shard is None else part.shard.of(whole)
    part.tensor.copy_(own if part.flat is None else own.flatten()[slice(*part.flat)])


def _held(rank: Rank, prefix: str) -> dict[str, StatePart]:
    """What ``rank`` holds, by the rest of a name that begins with ``prefix``."""
    return {name.removeprefix(prefix): part for name, part in rank.state().items() if name.startswith(prefix)}
