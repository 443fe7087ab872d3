"""The operators of a tensor-parallel program on one rank: conversions of placements, operators of a split vocabulary.

Each is a module that takes the place of its operator in a stage's program. In the forward and in the backward it does
its collective through a TensorGroup, whose collectives begin and end separately: a program may compute in between.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import fx, nn

from auto3d.capture.shard import Shard, joined
from auto3d.conversions import Collective, Conversion, conversion_of
from auto3d.derived.model import Derived
from auto3d.runtime.messages.even_split import even_split
from auto3d.runtime.randomness import Randomness, SeededOperation
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.stage.fast_calls import apply_of
from auto3d.runtime.waiting import waiting_for
from auto3d.tensor.collectives import VOCABULARY_CROSS_ENTROPY, VOCABULARY_EMBEDDING, split_of
from auto3d.tensor_placement import PlacementKind, Split

_MEAN, _SUM = 1, 2  # torch's numbers of reductions; 0 is none

# torch 2.13 renames the two; the old names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Pending = Callable[[], torch.Tensor]
"""A collective that has begun. A call waits for it, or lets the device's queue wait, and returns its result."""


class TensorGroup(Protocol):
    """The ranks that share the weights of the same stages, and this rank's number among them.

    All its ranks begin the same collectives in the same order. ``what`` names the operation in errors.
    """

    shard: int
    shards: int

    def all_reduce(self, tensor: torch.Tensor, what: str, *, maximum: bool = False) -> Pending:
        """Begin to sum ``tensor`` over the ranks, in place, or to take the largest of each element."""

    def all_gather(self, tensor: torch.Tensor, what: str) -> Pending:
        """Begin to gather the contiguous ``tensor`` of every rank: [shards, *its shape]."""

    def reduce_scatter(self, stacked: torch.Tensor, what: str) -> Pending:
        """Begin to sum ``stacked``, [shards, …], over the ranks; each rank gets the sum of its entry. Overwrites it."""


class ProcessTensorGroup:
    """A TensorGroup of processes: ``group`` connects ``ranks``, which are here in the order of their shards."""

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], *, run_ahead: RunAhead) -> None:
        self.shard, self.shards = ranks.index(dist.get_rank()), len(ranks)
        self._group = group
        self._ranks = ", ".join(map(str, ranks))
        in_group = sorted(ranks)  # torch's order
        self._shard_of = None if in_group == list(ranks) else [ranks.index(rank) for rank in in_group]
        self._run_ahead = run_ahead
        # gloo's reduce-scatter is an all-reduce whose work never reports its end (torch 2.13).
        self._scatters = dist.get_backend(group) != "gloo"
        self.is_alone = False  # whether this rank waits for no other: collectives take its own numbers for all of them

    def all_reduce(self, tensor: torch.Tensor, what: str, *, maximum: bool = False) -> Pending:
        if self.is_alone:
            return lambda: tensor
        how = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        return self._begin(
            lambda: dist.all_reduce(tensor, op=how, group=self._group, async_op=True), "all-reduce", what, tensor
        )

    def all_gather(self, tensor: torch.Tensor, what: str) -> Pending:
        if self.is_alone:
            return lambda: torch.stack([tensor] * self.shards)
        gathered = tensor.new_empty((self.shards, *tensor.shape))
        flat = gathered.view(self.shards * tensor.numel())
        pending = self._begin(
            lambda: _all_gather(flat, tensor.view(-1), group=self._group, async_op=True), "all-gather", what, gathered
        )
        if (shard_of := self._shard_of) is None:
            return pending
        return lambda: pending()[[shard_of.index(shard) for shard in range(self.shards)]]

    def reduce_scatter(self, stacked: torch.Tensor, what: str) -> Pending:
        if self.is_alone:
            return lambda: stacked[self.shard].clone()
        if not self._scatters:
            pending = self.all_reduce(stacked, what)
            return lambda: pending()[self.shard].clone()  # a view would keep the memory of all shards
        if self._shard_of is not None:
            stacked = stacked[self._shard_of]
        mine = torch.empty_like(stacked[0])
        return self._begin(
            lambda: _reduce_scatter(mine.view(-1), stacked.view(-1), group=self._group, async_op=True),
            "reduce-scatter",
            what,
            mine,
        )

    def _begin(self, begin: Callable[[], Any], collective: str, what: str, result: torch.Tensor) -> Pending:
        awaited = f"the {collective} of {what} among ranks {self._ranks}"
        with waiting_for(awaited):
            work = begin()

        def wait() -> torch.Tensor:
            self._run_ahead.wait(work, awaited)
            return result

        return wait


@dataclass(frozen=True, kw_only=True)
class TensorParallelRank:
    """The program of ``model`` as this rank of ``group`` runs it."""

    model: Derived
    group: TensorGroup

    def module_of(self, node: fx.Node, number: int, randomness: Randomness) -> nn.Module | None:
        """The module that replaces ``node``, operation ``number`` of the whole model; None if it runs as it is."""
        if node.name in self.model.drawn_per_shard:
            assert callable(node.target)
            return SeededOperation(node.target, number, randomness, self.group.shard)
        return operation_of(node, self.group)


Action = Callable[[torch.Tensor], Pending]
"""What a conversion does with a value, or with a gradient: it begins, and the result comes from the Pending."""


def operation_of(node: fx.Node, group: TensorGroup) -> nn.Module | None:
    """The module that runs ``node`` among the ranks of ``group``; None if it is an operator of the model."""
    conversion = conversion_of(node.target)
    if conversion is not None:
        return ConversionModule(conversion, split_of(node.args), group, node.name)
    if node.target is VOCABULARY_EMBEDDING:
        return VocabularyEmbedding(group)
    if node.target is VOCABULARY_CROSS_ENTROPY:
        return VocabularyCrossEntropy(group, node.name)
    return None


class ConversionModule(nn.Module):
    """A conversion of a stage's program; ``what`` names it in errors."""

    def __init__(self, conversion: Conversion, split: Split | None, group: TensorGroup, what: str) -> None:
        super().__init__()
        self._keeps = conversion.name == "spread" and group.shard == 0
        self._forward = forward_action(conversion, split, group, what)
        self._backward = backward_action(conversion, split, group, f"the gradient of {what}")

    def forward(self, value: torch.Tensor, *_: Any) -> torch.Tensor:
        if self._keeps:  # its gradient, too
            return value
        return _convert(value, self._forward, self._backward)


class _Converted(torch.autograd.Function):
    """Does ``forward`` to the value and ``backward`` to its gradient; keeps nothing between the two."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, forward: Action, backward: Action) -> torch.Tensor:
        ctx.action = backward
        return forward(value)()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return ctx.action(gradient)(), None, None


_convert = apply_of(_Converted)


def forward_action(conversion: Conversion, split: Split | None, group: TensorGroup, what: str) -> Action:
    """What ``conversion`` does with the value of one rank; ``split`` is how its source or its target is split."""
    if conversion.forward is not None:
        return _collective(conversion.forward, split, group, what)
    if conversion.target is PlacementKind.SPLIT:
        assert split is not None
        return _slice(split, group)
    if conversion.target is PlacementKind.PARTIAL:
        return lambda value: lambda: value.view_as(value) if group.shard == 0 else torch.zeros_like(value)
    return _nothing


def backward_action(conversion: Conversion, split: Split | None, group: TensorGroup, what: str) -> Action:
    """What ``conversion`` does with the gradient of its result."""
    if conversion.backward is not None:
        return _collective(conversion.backward, split, group, what)
    if conversion.source is PlacementKind.SPLIT:
        assert split is not None
        return _slice(split, group)
    if conversion.source is PlacementKind.COPIED and conversion.target is PlacementKind.SPLIT:
        assert split is not None
        return _padded(split, group)
    return _nothing


def _nothing(value: torch.Tensor) -> Pending:
    return lambda: value.view_as(value)


def _collective(collective: Collective, split: Split | None, group: TensorGroup, what: str) -> Action:
    if collective is Collective.ALL_REDUCE:
        # It needs a copy, because it writes its result there: autograd may have saved the value for a backward, and a
        # gradient may be the gradient of another value, too.
        return lambda value: group.all_reduce(value.clone(memory_format=torch.contiguous_format), what)
    assert split is not None
    even = even_split(split, group.shards)
    if collective is Collective.ALL_GATHER:
        join = partial(_joined, split=split) if even is None else even.joined
        return lambda value: _then(group.all_gather(value.contiguous(), what), join)
    stack = partial(_stacked, split=split, shards=group.shards) if even is None else even.stacked
    return lambda value: group.reduce_scatter(stack(value), what)


def _then(pending: Pending, change: Callable[[torch.Tensor], torch.Tensor]) -> Pending:
    return lambda: change(pending())


def _slice(split: Split, group: TensorGroup) -> Action:
    even, shard = even_split(split, group.shards), Shard(split, group.shard, group.shards)
    of = shard.of if even is None else partial(even.of, shard=group.shard)
    return lambda value: lambda: of(value)


def _padded(split: Split, group: TensorGroup) -> Action:
    """The gradient of the whole value, which is zero outside of this rank's shard."""
    even, shard = even_split(split, group.shards), Shard(split, group.shard, group.shards)
    put_back = shard.put_back if even is None else partial(even.put_back, group.shard)

    def padded(gradient: torch.Tensor) -> Pending:
        whole = gradient.new_zeros(split.whole_shape(gradient.shape))
        put_back(gradient, whole)
        return lambda: whole

    return padded


def _joined(stacked: torch.Tensor, split: Split) -> torch.Tensor:
    """The whole tensor of the shards ``stacked``, [shards, …]."""
    return joined(stacked.unbind(), split)


def _stacked(whole: torch.Tensor, split: Split, shards: int) -> torch.Tensor:
    """All shards of ``whole``, [shards, …], in new memory."""
    return torch.stack([Shard(split, number, shards).of(whole) for number in range(shards)])


class VocabularyEmbedding(nn.Module):
    """An embedding whose rows are split: this rank's rows, and zeros for indices that another rank has."""

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self._group = group

    def forward(
        self, weight: torch.Tensor, indices: torch.Tensor, padding_idx: int, size: int, shards: int
    ) -> torch.Tensor:
        return _Rows.apply(weight, indices, padding_idx, self._group.shard * weight.shape[0])


class _Rows(torch.autograd.Function):
    """Rows ``indices`` of a weight whose shard here begins at row ``first``; zeros for rows elsewhere."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, indices: torch.Tensor, padding_idx: int, first: int) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.rows, ctx.padding_idx, ctx.first = weight.shape[0], padding_idx, first
        local, elsewhere = _local_indices(indices, first, weight.shape[0])
        return nn.functional.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        (indices,) = ctx.saved_tensors
        local, elsewhere = _local_indices(indices, ctx.first, ctx.rows)
        if ctx.padding_idx >= 0:
            elsewhere |= indices == ctx.padding_idx
        gradient = gradient.masked_fill(elsewhere.unsqueeze(-1), 0)
        of_weight = torch.ops.aten.embedding_dense_backward(gradient, local, ctx.rows, -1, False)
        return of_weight, None, None, None


def _local_indices(indices: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers within the shard of ``count`` elements that begins at ``first``, where it has none: there they are 0)"""
    local = indices - first
    elsewhere = (local < 0) | (local >= count)
    return local.masked_fill_(elsewhere, 0), elsewhere


class VocabularyCrossEntropy(nn.Module):
    """torch's cross_entropy_loss of logits whose classes, dimension 1, are split among the ranks."""

    def __init__(self, group: TensorGroup, what: str) -> None:
        super().__init__()
        self._group = group
        self._what = what

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        reduction: int,
        ignore_index: int,
        label_smoothing: float,
        size: int,
        shards: int,
    ) -> torch.Tensor:
        return _CrossEntropy.apply(
            logits, labels, reduction, ignore_index, label_smoothing, size, self._group, self._what
        )


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits, the labels and two numbers per token, and so no more than torch's own.

    After Megatron-LM (Shoeybi et al. 2019, section 3): only one number per token crosses between ranks, not its logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        reduction: int,
        ignore_index: int,
        smoothing: float,
        size: int,
        group: TensorGroup,
        what: str,
    ) -> torch.Tensor:
        classes = logits.shape[1]
        first = group.shard * classes
        true = max(0, min(classes, size - first))  # classes without padding
        wide = torch.promote_types(logits.dtype, torch.float32)
        tokens = labels.shape
        largest = logits.new_full(tokens, -torch.inf, dtype=wide)
        if true:
            largest = logits.narrow(1, 0, true).amax(1).to(wide)
        largest = group.all_reduce(largest, f"the largest logits of {what}", maximum=True)()
        shifted = logits.narrow(1, 0, true).to(wide) - largest.unsqueeze(1)
        local, elsewhere = _local_indices(labels, first, true)
        sums = logits.new_zeros((3 if smoothing else 2, *tokens), dtype=wide)
        if true:
            sums[0] = shifted.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill_(elsewhere, 0)
            if smoothing:
                sums[2] = shifted.sum(1)
            torch.sum(shifted.exp_(), 1, out=sums[1])
        del shifted
        sums = group.all_reduce(sums, f"the sums of {what}")()
        log_sum = sums[1].log()
        loss = log_sum - sums[0]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_sum - sums[2] / size)
        ignored = labels == ignore_index
        loss = loss.masked_fill_(ignored, 0)
        ctx.save_for_backward(logits, labels, largest, log_sum)  # not the sum of the two, which would lose digits
        ctx.constants = reduction, ignore_index, smoothing, size, first, true
        if reduction == _MEAN:
            loss = loss.sum() / (~ignored).sum()
        elif reduction == _SUM:
            loss = loss.sum()
        return loss.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        logits, labels, largest, log_sum = ctx.saved_tensors
        reduction, ignore_index, smoothing, size, first, true = ctx.constants
        ignored = labels == ignore_index
        of_place = gradient.to(log_sum.dtype).expand(labels.shape)
        if reduction == _MEAN:
            of_place = of_place / (~ignored).sum()
        of_place = of_place.masked_fill(ignored, 0)
        of_logits = (logits.to(log_sum.dtype) - largest.unsqueeze(1)).sub_(log_sum.unsqueeze(1)).exp_()
        if smoothing:
            of_logits -= smoothing / size
        local, elsewhere = _local_indices(labels, first, true)
        if true:
            of_label = torch.where(elsewhere, 0.0, smoothing - 1.0).to(of_logits.dtype)
            of_logits.scatter_add_(1, local.unsqueeze(1), of_label.unsqueeze(1))
        of_logits.mul_(of_place.unsqueeze(1))
        if true < logits.shape[1]:
            of_logits.narrow(1, true, logits.shape[1] - true).zero_()  # padding: not classes of the model
        return of_logits.to(logits.dtype), *[None] * 7
