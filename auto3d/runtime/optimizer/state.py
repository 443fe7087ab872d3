"""The optimizer's state: its size, its allocation, and its parts as checkpoints hold them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import gcd, prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from auto3d.runtime.optimizer.classes import (
    kept_in,
    make_optimizer,
    optimizer_class,
    place_of,
    traits_of,
    trying,
    use_weights,
)
from auto3d.runtime.optimizer.offload import updated_parameters
from auto3d.runtime.settings import OptimizerSettings
from auto3d.runtime.weights.shard import WeightShard

_SIZES = (3, 5, 131, 137)  # sizes of a measured parameter's dimensions; all different, and large enough to be factored
_LARGE = (256, 256)  # shape of a parameter whose state a class may pack
_LARGEST = 2**22  # elements of the largest parameter that is tried for the size of a packed state, where fewer tell
_BLOCK = 2048  # a multiple of the blocks of values that share a scale
_NUMBERS = "auto3d_numbers"  # attribute of an optimizer: its state that it keeps as numbers, as tensors for checkpoints
_COUNTS = "auto3d_counts"  # attribute of an optimizer: its ``Traits.counts``


@dataclass(frozen=True, kw_only=True)
class OptimizerTensor:
    """One tensor of the optimizer's state of the parameter ``parameter``."""

    parameter: str
    key: str  # its name in the optimizer's state, such as exp_avg
    tensor: torch.Tensor  # writing to it changes the optimizer
    per_element: bool  # whether it has one element for each of the parameter's: otherwise it is a scalar, or factored
    flat: tuple[int, int] | None = None  # ``[first, last)`` of the flattened parameter; None: all of it


@cache
def measured_state_elements(settings: OptimizerSettings) -> Callable[[Sequence[int]], float]:
    """The size of the state of any optimizer, as it is after a step on parameters of the same number of dimensions.

    The unit is an element of float32; an element of a smaller type is a fraction of it.
    """
    kind, arguments = optimizer_class(settings)
    # Dimensions -> for each tensor, the parameter's dimensions that it has, and the size of an element.
    kept: dict[int, list[tuple[tuple[int, ...], float]]] = {}

    @trying()
    def measure(dimensions: int) -> list[tuple[tuple[int, ...], float]]:
        if max(1, dimensions) not in traits_of(settings).dimensions:
            return []  # it cannot update such a parameter, and a plan that would let it is refused
        shape = _SIZES[len(_SIZES) - dimensions :]
        return [_extent(tensor, shape) for tensor in stepped(shape)]

    def stepped(shape: Sequence[int]) -> list[torch.Tensor]:
        """The state of a parameter of ``shape`` after a step."""
        parameter = nn.Parameter(torch.ones(shape))
        parameter.grad = torch.ones(shape)
        optimizer = make_optimizer(kind, [parameter], arguments)
        optimizer.step()
        values = [entry.value for entry in kept_in(optimizer.state[parameter])]
        return [value for value in values if isinstance(value, torch.Tensor) and value.dim()]

    @cache
    def without_values(shape: tuple[int, ...]) -> float:
        """What a class keeps that has squares of a dimension, which it may leave out where that is large."""
        with FakeTensorMode():
            return sum(tensor.nbytes for tensor in stepped(shape)) / 4

    @cache
    @trying()
    def with_values(shape: tuple[int, ...]) -> float:
        """The size of a state that has tensors made of others."""
        return sum(part.nbytes for tensor in stepped(shape) for part in parts_of(tensor)) / 4

    def packed(rows: int, *others: int) -> float:
        """The same, which grows with rows; of many, by fewer whose values divide into blocks as well as all do."""
        period = _BLOCK // gcd(_BLOCK, prod(others))
        few = _LARGEST // prod(others)
        few -= (few - rows) % period
        if few < 2 * period or few >= rows:
            return with_values((rows, *others))
        of_few, of_fewer = (with_values((count, *others)) for count in (few, few - period))
        return of_few + (of_few - of_fewer) * (rows - few) / period

    @cache
    @trying()
    def packs() -> bool:
        """Whether the state of a large matrix has tensors that are made of others."""
        return 2 in traits_of(settings).dimensions and any(map(is_traceable_wrapper_subclass, stepped(_LARGE)))

    def elements(shape: Sequence[int]) -> float:
        if packs() and shape:
            return packed(*shape)
        dimensions = min(len(shape), len(_SIZES))
        if dimensions not in kept:
            kept[dimensions] = measure(dimensions)
        if any(len(set(extent)) < len(extent) for extent, _ in kept[dimensions]):
            with suppress(Exception):  # a class may need values
                return without_values(tuple(shape))
        merged = (prod(shape[: len(shape) - dimensions + 1]), *shape[len(shape) - dimensions + 1 :]) if shape else ()
        return sum(size * prod(merged[dimension] for dimension in extent) for extent, size in kept[dimensions])

    return elements


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of which ``tensor`` is made, such as codes of its values and a scale for each block of them."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def _extent(tensor: torch.Tensor, shape: Sequence[int]) -> tuple[tuple[int, ...], float]:
    """The dimensions of a parameter of ``shape`` that ``tensor`` has, and the float32 elements per element of these.

    Scales of blocks have none of its dimensions: they grow with all of it.
    """
    size = tensor.element_size() / 4
    if all(length in (*shape, 1) for length in tensor.shape):
        return tuple(shape.index(length) for length in tensor.shape if length in shape), size
    return tuple(range(len(shape))), size * tensor.numel() / prod(shape)


def note_counts(optimizer: torch.optim.Optimizer, counts: Sequence[str]) -> None:
    """Note that these numbers of ``optimizer``, its ``Traits.counts``, are part of its state."""
    setattr(optimizer, _COUNTS, tuple(counts))


def begins_with_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a first step with state of zeros is that without state.

    With dampening, torch begins with the whole gradient.
    """
    if type(optimizer) is torch.optim.SGD:
        return not any(group["dampening"] for group in optimizer.param_groups)
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state that ``optimizer`` would allocate at its first step, before activations take memory.

    A plan that does not fit then fails at once, and a CPU's heap has no long-lived blocks between short-lived blocks.
    Adam, AdamW and SGD only: the first state of others is unknown, so it comes with their first step.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
                names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
                moments = {name: torch.zeros_like(parameter) for name in names}
                device = parameter.device if group["fused"] else torch.device("cpu")
                optimizer.state[parameter] = {"step": torch.tensor(0.0, device=device), **moments}
            elif begins_with_zeros(optimizer) and group["momentum"]:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}


@torch.no_grad()
def make_state_to_load(optimizer: torch.optim.Optimizer) -> None:
    """Allocate state of any optimizer for a checkpoint, whose tensors must replace all of it.

    A step makes it; the parameters keep their values. Its gradients are no zeros, for which some optimizers keep other
    types of state.
    """
    pairs = list(updated_parameters(optimizer))
    if all(optimizer.state.get(parameter) for _, parameter in pairs):
        return
    kept = [(parameter, parameter.detach().clone(), parameter.grad) for parameter, _ in pairs]
    for parameter, _, _ in kept:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter, value, gradient in kept:
        parameter.data.copy_(value)
        parameter.grad = gradient


@torch.no_grad()
def note_weights(optimizer: torch.optim.Optimizer, *, evaluation: bool) -> None:
    """Let ``optimizer``, which averages, know that its parameters have the weights of evaluation, or of training."""
    kept = [(parameter, parameter.detach().clone()) for parameter, _ in updated_parameters(optimizer)]
    use_weights(optimizer, evaluation=evaluation)
    for parameter, value in kept:
        parameter.data.copy_(value)


def state_tensors(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    shards: Sequence[WeightShard],
) -> Iterator[OptimizerTensor]:
    """All state of ``optimizer``, by the names of ``parameters``; those in ``shards`` (ZeRO-1) are held in part.

    Numbers become tensors of no dimensions, which the optimizer's next step reads. Those of a parameter group, which
    steps change for all parameters alike, are state of each of its parameters: another plan groups others together.
    """
    updated = {id(original): updated_parameter for original, updated_parameter in updated_parameters(optimizer)}
    for name, parameter in parameters.items():
        if id(parameter) in updated:
            for key, tensor in _tensors_of(optimizer, updated[id(parameter)]):
                per_element = tensor.shape == parameter.shape and tensor.dim() > 0
                yield OptimizerTensor(parameter=name, key=key, tensor=tensor, per_element=per_element)
    for shard in shards:
        for piece in shard.pieces:
            if id(piece.tensor) not in updated:
                continue
            for key, tensor in _tensors_of(optimizer, updated[id(piece.tensor)]):
                for name, start in shard.starts.items():
                    first = max(piece.first, start)
                    last = min(piece.last, start + shard.parameters[name].numel())
                    if first >= last:
                        continue
                    flat = first - start, last - start
                    if tensor.shape == piece.tensor.shape:
                        part = tensor[first - piece.first : last - piece.first]
                        yield OptimizerTensor(parameter=name, key=key, tensor=part, per_element=True, flat=flat)
                    else:  # a number that all elements of the piece have in common
                        yield OptimizerTensor(parameter=name, key=key, tensor=tensor, per_element=False)


def _tensors_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
    for key in getattr(optimizer, _COUNTS, ()):
        place = place_of(optimizer, key)
        yield f"group.{key}", _as_tensor(optimizer, place, key)
    for kept in list(kept_in(optimizer.state.get(parameter, {}))):
        yield kept.name, _as_tensor(optimizer, kept.place, kept.key)


def _as_tensor(optimizer: torch.optim.Optimizer, place: Any, key: Any) -> torch.Tensor:
    """What ``place`` has at ``key``; a number is replaced by a tensor, which the next step makes a number again."""
    if isinstance(place[key], torch.Tensor):
        return place[key]
    numbers: list[tuple[Any, Any, type]] | None = getattr(optimizer, _NUMBERS, None)
    if numbers is None:
        numbers = []
        setattr(optimizer, _NUMBERS, numbers)
        optimizer.register_step_pre_hook(lambda *_: _restore_numbers(numbers))
    numbers.append((place, key, type(place[key])))
    place[key] = torch.tensor(float(place[key]), dtype=torch.float64)
    return place[key]


def _restore_numbers(numbers: list[tuple[Any, Any, type]]) -> None:
    for place, key, kind in numbers:
        place[key] = kind(place[key].item())
    numbers.clear()
