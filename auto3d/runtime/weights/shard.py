"""ZeRO-1's shard of one bucket: an even slice of a flat buffer of weights, which this rank updates for all holders.

After ZeRO (SC 2020, section 5.1): gradients are reduce-scattered, each rank updates its slice, and slices are gathered.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from auto3d.runtime.optimizer.parameter_groups import UpdateRules
from auto3d.runtime.settings import OptimizerSettings

ALIGNMENT_BYTES = 64  # each parameter begins at a multiple of it, so that kernels read whole vectors


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardPiece:
    """Elements ``first`` to ``last`` of a shard's buffer, as one parameter of the optimizer."""

    tensor: nn.Parameter  # 1-D; its ``.grad`` is a slice of the bucket's gradients
    first: int
    last: int
    rule: OptimizerSettings  # how it is updated


class WeightShard:
    """The weights of one bucket in one flat buffer, of which ``parameters`` become views, and this rank's slice of it.

    ``starts`` has the first element of each parameter in the buffer, and ``gradients`` is as long as the buffer: a
    multiple of ``ranks``. ``number`` is this rank's place among the holders.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        starts: Mapping[str, int],
        gradients: torch.Tensor,
        *,
        number: int,
        ranks: int,
        rules: UpdateRules,
    ) -> None:
        self.parameters, self.starts = parameters, starts
        weights = torch.zeros_like(gradients)
        for name, parameter in parameters.items():
            view = weights[starts[name] : starts[name] + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        length = len(gradients) // ranks
        self.first, self.last = number * length, (number + 1) * length
        self.pieces: list[ShardPiece] = []
        for first, last, rule in self._runs(rules):
            tensor = nn.Parameter(weights[first:last])
            tensor.grad = gradients[first:last]
            self.pieces.append(ShardPiece(tensor=tensor, first=first, last=last, rule=rule))

    def _runs(self, rules: UpdateRules) -> Iterator[tuple[int, int, OptimizerSettings]]:
        """(first, last, rule) of each run of the slice; padding counts to the parameter before it."""
        ordered = sorted(self.starts, key=self.starts.__getitem__)
        runs = [(self.starts[next(run)], rule) for rule, run in groupby(ordered, rules.__getitem__)]
        ends = [start for start, _ in runs[1:]] + [self.last]
        for (start, rule), end in zip(runs, ends, strict=True):
            first, last = max(start, self.first), min(end, self.last)
            if first < last:
                yield first, last, rule

    def weights(self) -> torch.Tensor:
        """The flat buffer. It changes when the parameters move to a copy, for a micro-batch that needs old weights."""
        return memory_of(next(iter(self.parameters.values())))

    def follow(self) -> None:
        """Let the pieces be slices of the buffer that has the parameters now."""
        weights = self.weights()
        for piece in self.pieces:
            piece.tensor.data = weights[piece.first : piece.last]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole memory of which ``tensor`` is a view, as a tensor of one dimension."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.data.as_strided((size,), (1,), 0)


def aligned_starts(parameters: Mapping[str, nn.Parameter]) -> tuple[dict[str, int], int]:
    """The first element of each of ``parameters``, of one type, in one buffer; and the elements of the buffer."""
    starts: dict[str, int] = {}
    end = 0
    for name, parameter in parameters.items():
        step = max(1, ALIGNMENT_BYTES // parameter.element_size())
        starts[name] = -(-end // step) * step
        end = starts[name] + parameter.numel()
    return starts, end
