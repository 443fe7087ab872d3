"""Compares a tensor-parallel program with the whole program: loss, gradients and buffers after one micro-batch.

This finds a placement that is not what it claims, whatever rule gave it. All shards run in one process, on shards of
the same weights and on the same data.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from auto3d.capture.held import buffers_of, moved
from auto3d.capture.model import CapturedModel
from auto3d.capture.shard import Shard, joined
from auto3d.conversions import CONVERSION_BETWEEN, conversion_of
from auto3d.data import DataSettings
from auto3d.derived.dropout_mask import DROPOUT_MASK
from auto3d.derived.model import Derived
from auto3d.errors import InputError
from auto3d.runtime.layout import terms_of_slice
from auto3d.runtime.messages.tensor_group import ConversionModule, TensorGroup, TensorParallelRank
from auto3d.runtime.randomness import Randomness, SeededOperation
from auto3d.runtime.stage.module import Tensors
from auto3d.runtime.verify.eager import (
    Computed,
    Difference,
    coarseness_of,
    difference_of,
    node_values,
    one_batch,
)
from auto3d.runtime.verify.lockstep import Lockstep, LockstepGroup
from auto3d.runtime.verify.slices import run_slices, run_whole
from auto3d.tensor.collectives import split_of
from auto3d.tensor_placement import WHOLE, PlacementKind, TensorPlacement

_MAGNIFIED = 100  # times the bound: what rounding may reach before losses are others than one process has
_FLOAT64 = 1e-3  # bounds in float64, relative to float32's: far above its rounding, far below a wrong placement


class ShardsDifferError(InputError):
    """The ranks of a tensor-parallel group would not compute what one process does."""


def check_shards(model: Derived, data: DataSettings, *, seed: int, device: torch.device) -> None:
    """Raise ShardsDifferError unless all shards of ``model`` together do what the whole program does.

    They are compared on one micro-batch, with the bounds of ``verify.check_against_eager``; the padding of a gradient
    must be zero. If the program computes in a type narrower than float32, the bounds are that type's: a sum of
    rounded parts is not the rounded sum. Where float32 misses its bounds by less than a hundred times, as after a batch
    normalisation of few elements, which magnifies rounding, float64 decides: what differs there too is no rounding.
    A random operation on a split value runs on the gathered value, so that it draws what the whole program draws.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        module = moved(model.whole.exported.build(), device)
        tensors = dict(module.named_parameters()) | buffers_of(module)
        batch = one_batch(model.whole, data, seed=seed, device=device)
        outcomes, whole = _computed(model, tensors, batch, device)
        bound = coarseness_of(model.whole)
        if (difference := _difference(model, outcomes, whole, bound)) is None:
            return
        magnified = _difference(model, outcomes, whole, _MAGNIFIED * bound) is None
        if magnified and _is_rounding(model, tensors, batch, device):
            return
        in_slices = model.share.slices > 1
        place = "" if in_slices else _first_value_that_differs(model, tensors, batch, device)
    if in_slices:
        raise ShardsDifferError(
            f"{model.share.slices} slices of the sequence in {model.share.tp} shards change what "
            f"{type(module).__name__} computes: {difference}; use a schedule without slices, or set plan.tp=1"
        )
    raise ShardsDifferError(
        f"tensor parallelism over {model.share.tp} ranks changes what {type(module).__name__} computes: {difference}"
        f"{place}; set plan.tp=1, or split other weights"
    )


def _computed(
    model: Derived, tensors: Tensors, batch: Tensors, device: torch.device, *, wide: bool = False
) -> tuple[list[Computed], Computed]:
    """What the shards compute, and the whole program; ``wide``: in float64 where it is in float32."""
    if wide:
        batch = {name: _widened(value) for name, value in batch.items()}
    state, in_slices = _state_of(model.whole, tensors, device, wide=wide), model.share.slices > 1
    terms = terms_of_slice(model.whole, 1).counted if in_slices else ()
    whole = run_whole(model.whole, state, batch, device, terms=terms)
    run = partial(_run_shard, model, tensors, batch, device, wide)
    return Lockstep[Computed](model.share.tp).run(run), whole


def _is_rounding(model: Derived, tensors: Tensors, batch: Tensors, device: torch.device) -> bool:
    """Whether shards and whole program agree in float64, so that what differs in float32 is rounding."""
    if coarseness_of(model.whole) > 1:
        return False
    try:
        outcomes, whole = _computed(model, tensors, batch, device, wide=True)
    except RuntimeError:  # an operation has float32 written into it
        return False
    return _difference(model, outcomes, whole, _FLOAT64) is None


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def _state_of(
    captured: CapturedModel, tensors: Tensors, device: torch.device, *, wide: bool = False
) -> dict[str, torch.Tensor]:
    """The state of the program: copies of ``tensors``, and its constants."""
    graph = captured.graph
    names = (*graph.parameters, *graph.buffers)
    state = {name: value.to(device) for name, value in captured.exported.constants.items()}
    state |= {name: tensors[name].detach().clone() for name in names}
    if wide:
        state = {name: _widened(value) for name, value in state.items()}
    for name in names:
        state[name].requires_grad_(name in graph.trained)
    return state


def _shards_of(model: Derived, tensors: Tensors, shard: int) -> dict[str, torch.Tensor]:
    """What ``shard`` has of ``tensors``."""
    return {
        name: tensor if (split := _split(model, name)) is None else Shard(split, shard, model.share.tp).of(tensor)
        for name, tensor in tensors.items()
    }


def _split(model: Derived, name: str) -> Any:
    return model.placements.get(name, WHOLE).split


def _run_shard(
    model: Derived, tensors: Tensors, batch: Tensors, device: torch.device, wide: bool, group: LockstepGroup
) -> Computed:
    with torch.no_grad():
        state = _state_of(model.program, _shards_of(model, tensors, group.shard), device, wide=wide)
    of_shard = _DrawnTogether(model=model, group=group)
    if model.share.slices > 1:
        return run_slices(model, state, batch, device, of_shard)
    return run_whole(model.program, state, batch, device, of_shard)


def _difference(model: Derived, outcomes: list[Computed], whole: Computed, wider: float) -> Difference | str | None:
    """The first of the shards' losses, gradients and buffers that differ from the whole program's."""
    shards = range(model.share.tp)
    for shard in shards:
        if difference := difference_of(f"the loss of shard {shard}", outcomes[shard].loss, whole.loss, 1.0, wider):
            return difference
    scale = max([1.0, *(float(g.abs().max()) for g in whole.gradients.values() if g is not None and g.numel())])
    for name, expected in whole.gradients.items():
        if expected is None:
            continue
        placed = model.placements[name]
        kind = PlacementKind.PARTIAL if placed.kind is PlacementKind.COPIED else placed.kind
        values = [_or_zeros(outcome.gradients[name], expected, placed, model.share.tp) for outcome in outcomes]
        for what, value in _assembled(f"the gradient of {name}", TensorPlacement(kind, placed.split), values):
            if difference := difference_of(what, value, expected, scale, wider):
                return difference
        if placed.split is not None and _has_padding(values, placed):
            return f"the padding of the gradient of {name} is not zero"
    for name, expected in whole.buffers.items():
        values = [outcome.buffers[name] for outcome in outcomes]
        for what, value in _assembled(f"the buffer {name}", model.placements[name], values):
            if difference := difference_of(what, value, expected, 1.0, wider):
                return difference
    return None


def _or_zeros(gradient: torch.Tensor | None, whole: torch.Tensor, placed: TensorPlacement, shards: int) -> torch.Tensor:
    return whole.new_zeros(placed.local_shape(whole.shape, shards)) if gradient is None else gradient


def _has_padding(values: list[torch.Tensor], placed: TensorPlacement) -> bool:
    """Whether a shard has something else than zeros in its padding."""
    assert placed.split is not None
    whole = joined(values, placed.split)
    return any(not torch.equal(Shard(placed.split, n, len(values)).of(whole), value) for n, value in enumerate(values))


def _assembled(what: str, placed: TensorPlacement, values: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """(name, whole value) of what the shards have of one value: an entry for each shard that has the whole of it."""
    if placed.split is not None:
        return [(what, joined(values, placed.split))]
    if placed.kind is PlacementKind.PARTIAL:
        return [(what, torch.stack(values).sum(0))]
    return [(f"{what} of shard {shard}", value) for shard, value in enumerate(values)]


@dataclass(frozen=True, kw_only=True)
class _DrawnTogether(TensorParallelRank):
    """A rank whose random operations on split values draw what one process draws."""

    def module_of(self, node: fx.Node, number: int, randomness: Randomness) -> nn.Module | None:
        if node.name not in self.model.drawn_per_shard:
            return super().module_of(node, number, randomness)
        original = next(
            whole_node for whole_node in self.model.whole.exported.program.nodes if whole_node.name == node.name
        )
        if node.target is DROPOUT_MASK:
            return _GatheredMask(original, self.model.placements[node.name], self.group, number, randomness)
        exported, placements = self.model.program.exported, self.model.placements
        state = {**exported.parameters, **exported.buffers}  # by placeholder, where placements go by name
        placed = {**placements, **{placeholder: placements[name] for placeholder, name in state.items()}}
        return _Gathered(node, original, placed, self.group, number, randomness)


class _Gathered(nn.Module):
    """Runs an operation of the whole program on gathered arguments, and cuts this rank's shard out of its results."""

    def __init__(
        self,
        node: fx.Node,
        original: fx.Node,
        placements: Mapping[str, TensorPlacement],
        group: TensorGroup,
        number: int,
        randomness: Randomness,
    ) -> None:
        super().__init__()
        assert callable(original.target)
        self._run = SeededOperation(original.target, number, randomness)
        self._original = original
        self._group, self._name = group, node.name
        self._needs = [_placement_of(operand, placements) for operand in _tensors_of(node)]
        takers = [user for user in node.users if user.target is operator.getitem]
        self._gives = {taker.args[1]: placements[taker.name] for taker in takers} or {None: placements[node.name]}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        whole = iter([self._convert(v, p, WHOLE) for v, p in zip(values, self._needs, strict=True)])
        args, kwargs = fx.node.map_arg((self._original.args, self._original.kwargs), lambda _: next(whole))
        results = self._run(*args, **kwargs)
        if None in self._gives:
            return self._convert(results, WHOLE, self._gives[None])
        gives = (self._gives.get(number, WHOLE) for number in range(len(results)))
        return [self._convert(value, WHOLE, given) for value, given in zip(results, gives, strict=True)]

    def _convert(self, value: torch.Tensor, source: TensorPlacement, target: TensorPlacement) -> torch.Tensor:
        if source.split == target.split:
            return value
        conversion = CONVERSION_BETWEEN[source.kind, target.kind]
        return ConversionModule(conversion, source.split or target.split, self._group, self._name)(value)


class _GatheredMask(nn.Module):
    """Draws the mask of a dropout of the whole program, and cuts this rank's shard out of it."""

    def __init__(
        self, original: fx.Node, placed: TensorPlacement, group: TensorGroup, number: int, randomness: Randomness
    ) -> None:
        super().__init__()
        self._value = original.all_input_nodes[0].meta["val"]
        self._run = SeededOperation(DROPOUT_MASK, number, randomness)
        assert placed.split is not None
        self._shard = Shard(placed.split, group.shard, group.shards)

    def forward(self, size: Any, stride: Any, *how: Any) -> torch.Tensor:
        return self._shard.of(self._run(list(self._value.shape), list(self._value.stride()), *how))


def _placement_of(node: fx.Node, placements: Mapping[str, TensorPlacement]) -> TensorPlacement:
    """The placement of the value ``node``; if it has none, it is what a conversion takes for one operation."""
    taken = TensorPlacement(PlacementKind.SPLIT, split_of(node.args)) if conversion_of(node.target) else None
    return placements.get(node.name) or taken or WHOLE


def _tensors_of(node: fx.Node) -> list[fx.Node]:
    """The arguments of ``node`` that are tensors, in order; a tensor that occurs twice is there twice."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]


def _first_value_that_differs(model: Derived, tensors: Tensors, batch: Tensors, device: torch.device) -> str:
    """``, first in NAME (OPERATOR)``, the first value of the whole program that the shards do not have; or ""."""
    expected = _values(model.whole, _state_of(model.whole, tensors, device), batch, device, None)

    def run(group: LockstepGroup) -> Tensors:
        state = _state_of(model.program, _shards_of(model, tensors, group.shard), device)
        return _values(model.program, state, batch, device, _DrawnTogether(model=model, group=group))

    shards = Lockstep[Tensors](model.share.tp).run(run)
    wider = coarseness_of(model.whole)
    masks = {node.name for node in model.program.exported.program.nodes if node.target is DROPOUT_MASK}
    for node in model.whole.exported.program.nodes:
        if node.name in masks or node.name not in expected or any(node.name not in values for values in shards):
            continue
        on_shards = [values[node.name] for values in shards]
        for what, value in _assembled(node.name, model.placements[node.name], on_shards):
            if value.shape != expected[node.name].shape or difference_of(what, value, expected[node.name], 1.0, wider):
                return f", first in {what} ({node.target}, {model.placements[node.name]})"
    return ""


def _values(
    captured: CapturedModel, state: Tensors, batch: Tensors, device: torch.device, tensor: TensorParallelRank | None
) -> Tensors:
    """The values that the program computes, by name."""
    values = node_values(captured, state, batch, device, tensor)
    return {node.name: value for node, value in values.items() if isinstance(value, torch.Tensor)}
