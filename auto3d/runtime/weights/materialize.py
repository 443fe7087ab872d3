"""The initial weights of one stage, equal to the whole model's, without the memory of the whole model.

The module is really built, so its initialisation draws the same random numbers in the same order as in one process; but
a parameter of another stage, and a parameter of which this rank keeps a shard, has memory only while the initialisation
works on it.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from auto3d.allocator import return_freed_memory
from auto3d.capture.errors import error_line
from auto3d.capture.foreign import ForeignWeights, LostValueError
from auto3d.capture.held import buffers_of
from auto3d.capture.shard import Shard
from auto3d.capture.skeleton import seeded, skeleton
from auto3d.errors import InputError
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.out_of_memory import is_out_of_memory


class InitialStateError(InputError):
    """The initial weights cannot be made, or the state dict does not fit the model."""


@runtime_checkable
class SlicedState(Protocol):
    """A state dict of which a range of one dimension of a tensor can be read alone, such as a safetensors file."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    def narrowed(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """The elements ``start`` to ``start + length`` of dimension ``dim``."""


def materialize(
    build: Callable[[], nn.Module],
    names: Collection[str],
    *,
    seed: int,
    state: Mapping[str, torch.Tensor] | None = None,
    shards: Mapping[str, Shard] | None = None,
) -> dict[str, torch.Tensor]:
    """The parameters, buffers and tensor attributes called ``names`` of the module that ``build`` makes, on the CPU.

    They are the entries of ``state``, which is read entry by entry. Those without an entry equal the tensors of
    ``build()`` after torch, numpy and Python's random were seeded with ``seed`` (capture.skeleton.seed_all). Of a
    tensor in ``shards``, only this shard is made or read. Raises InitialStateError if ``state`` lacks a parameter or
    has another shape; if a tensor without an entry is computed from a parameter that this process does not hold; if the
    module's code fails, or branches on the value of such a parameter; or if two parameters share memory.
    """
    shards = shards or {}
    empty = skeleton(build, seed=seed)
    _check_memory(dict(empty.model.named_parameters()))
    foreign = ForeignWeights(
        [None if name in names and name not in shards else name for name in empty.registered], shards=shards
    )

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            foreign.register(parameter, name)

    try:
        with seeded(seed), register_module_parameter_registration_hook(register), foreign.following():
            model = build()
    except LostValueError as error:
        problem = f"{error}{error_line(error)}; or use plan.pp=1, where each rank holds all parameters"
        raise InitialStateError(problem) from None
    except (Exception, SystemExit) as error:  # the model's code may raise anything
        if isinstance(error, InputError) or is_out_of_memory(error):
            raise
        reason = next((line for line in str(error).splitlines() if line.strip()), "it gives no reason")
        rank = THIS_RANK.name(THIS_RANK.rank)
        problem = f"{type(error).__name__}: {reason}{error_line(error)}"
        raise InitialStateError(f"{rank} cannot build the model: {problem}") from error
    foreign.release_all()
    return_freed_memory()
    parameters = dict(model.named_parameters())
    tensors = {**buffers_of(model), **parameters}
    if missing := [name for name in names if name not in tensors]:
        raise InitialStateError(f"{missing[0]}: the module has it when it is captured, but not when it is built again")
    initial = {name: tensors[name].detach() for name in names}
    for name, tensor in initial.items():
        shard = shards.get(name)
        registered = foreign.name_of(tensors[name])
        if registered is not None and (registered != name or shard is None):
            raise InitialStateError(f"{name}: the module registers its parameters in another order on the meta device")
        if state is not None and name in state:
            shape = state.shape(name) if isinstance(state, SlicedState) else tuple(state[name].shape)
            if shape != tuple(tensor.shape):
                raise InitialStateError(
                    f"state dict: {name} has shape {list(shape)}, the model's has {list(tensor.shape)}"
                )
            if shard is not None:
                initial[name] = _shard_of_state(state, name, shard, tensor)
            else:
                tensor.copy_(state[name])
        elif state is not None and name in parameters:
            raise InitialStateError(f"state dict: {name} is missing")
        elif shard is not None and registered is not None:
            taken = foreign.take_shard(tensors[name])
            if taken is None:
                raise InitialStateError(
                    f"{name}: the module changes its initial value long after it has drawn it, from several of its "
                    "elements, of which this rank keeps only a shard; give a state dict (model.weights)"
                )
            initial[name] = taken
        elif (source := foreign.source_of_loss(tensor)) is not None:
            problem = "of which this rank holds a shard" if source in shards else "of another stage"
            raise InitialStateError(
                f"{name}: the module computes its initial value from {source}, a parameter {problem}, which a single "
                "rank cannot do; give a state dict (model.weights)"
            )
        elif shard is not None:
            initial[name] = shard.of(tensor)
        if name in parameters and shard is None and tensor.untyped_storage().nbytes() > tensor.nbytes:
            initial[name] = tensor.clone()  # it is a view of a larger tensor, whose memory is to be freed
    return initial


def _shard_of_state(state: Mapping[str, torch.Tensor], name: str, shard: Shard, whole: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor of ``state``, with the shape and type of ``whole``; reads no more if it can."""
    if not isinstance(state, SlicedState):
        return shard.of(state[name].to(whole.dtype))
    read = whole.new_zeros(shard.shape(whole.shape))
    for first, start, length in shard.runs():
        read.narrow(shard.split.dim, start, length).copy_(state.narrowed(name, shard.split.dim, first, length))
    return read


def _check_memory(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise InitialStateError if two parameters share memory, which plain PyTorch would update by both gradients."""
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in parameters.items():
        if parameter.numel():
            start = int(parameter.storage_offset()) * parameter.element_size()
            reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            end = start + (reach + 1) * parameter.element_size()
            ranges.setdefault(parameter.untyped_storage()._cdata, []).append((start, end, name))
    for shared in ranges.values():
        for (_, end, name), (start, _, other) in pairwise(sorted(shared)):
            if start < end:
                raise InitialStateError(
                    f"{other}: shares memory with the parameter {name} but is another parameter; "
                    "to tie two modules, give both the same nn.Parameter, or else copy its values"
                )
