"""What a stage keeps of the slices of a micro-batch: keys and values of attention, for the slices after them.

A slice's attention joins its own keys and values with the keys and values of earlier slices. In the backward, which
comes to the last slice first, it adds to the gradients of the earlier slices.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from auto3d.capture.masks import ATTENTION
from auto3d.capture.nodes import args_of
from auto3d.derived.model import Derived
from auto3d.derived.slice_operators import WITH_EARLIER
from auto3d.partition.stage import Stage
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.program import DerivedProgram, ProgramOfStage
from auto3d.runtime.stage.saved_activations import saves_activations


class EarlierSlices:
    """Keys and values by their name, of the micro-batches in flight on one stage, and gradients that wait for them."""

    def __init__(self) -> None:
        self.micro_batch = 0  # the micro-batch whose slice runs
        self._values: defaultdict[int, dict[str, list[torch.Tensor]]] = defaultdict(dict)
        self._gradients: defaultdict[int, dict[tuple[str, int], torch.Tensor]] = defaultdict(dict)

    def keep(self, name: str, number: int, value: torch.Tensor) -> None:
        """Keep ``value`` of slice ``number``; the values of the slices before it are there."""
        values = self._values[self.micro_batch].setdefault(name, [])
        assert len(values) >= number, f"slice {number} runs before one that it needs"
        values[number:] = [value]

    def joined(self, name: str, dim: int, number: int) -> torch.Tensor:
        """The values of all slices up to ``number``, one behind the other along ``dim``."""
        return torch.cat(self._values[self.micro_batch][name][: number + 1], dim)

    def sum_gradients(self, name: str, dim: int, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the value of slice ``number``, from ``gradient``: of the values up to it in its attention.

        Earlier slices get their parts of it when their backwards come. The value itself is kept no longer.
        """
        values, gradients = self._values[self.micro_batch][name], self._gradients[self.micro_batch]
        parts = gradient.split([value.shape[dim] for value in values[: number + 1]], dim)
        for earlier, part in enumerate(parts[:number]):
            key = name, earlier
            gradients[key] = gradients[key] + part if key in gradients else part
        del values[number:]
        later = gradients.pop((name, number), None)
        return parts[number] if later is None else parts[number] + later

    def end(self) -> None:
        """Forget the micro-batch, all of whose backwards have run."""
        self._values.pop(self.micro_batch, None)
        lost = self._gradients.pop(self.micro_batch, {})
        assert not lost, f"no backward has taken the gradient of {next(iter(lost))} from later slices"


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, slices: EarlierSlices, name: str, dim: int, number: int) -> torch.Tensor:
        ctx.how = slices, name, dim, number
        slices.keep(name, number, value.detach())
        return slices.joined(name, dim, number)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        slices, name, dim, number = ctx.how
        return slices.sum_gradients(name, dim, number, gradient), None, None, None, None


class JoinedWithEarlier(nn.Module):
    """Joins the keys, or the values, of slice ``number`` with the keys or values of earlier slices."""

    def __init__(self, slices: EarlierSlices, name: str, number: int) -> None:
        super().__init__()
        self._slices, self._name, self._number = slices, name, number

    def forward(self, value: torch.Tensor, dim: int, earlier: int) -> torch.Tensor:
        return _Join.apply(value, self._slices, self._name, dim, self._number)


class AttentionToEarlier(nn.Module):
    """Attention to joined keys and values, of which its backward keeps only that they can be joined again.

    Each slice's own keys are kept for later slices anyway, and joined keys of all slices would take several times
    their memory.
    """

    def __init__(self, slices: EarlierSlices, names: Sequence[tuple[str, int]], number: int) -> None:
        super().__init__()
        self._slices, self._names, self._number = slices, names, number

    def forward(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not saves_activations():
            return ATTENTION(query, *args, **kwargs)
        # Autograd keeps the hooks as long as the activations, so they must not refer to the joined tensors.
        memory = {value.data_ptr(): (place, value.shape) for place, value in enumerate(args[: len(self._names)])}

        def pack(saved: torch.Tensor) -> torch.Tensor | int:
            place, shape = memory.get(saved.data_ptr(), (-1, None))
            return place if saved.shape == shape else saved

        def unpack(kept: torch.Tensor | int) -> torch.Tensor:
            if isinstance(kept, torch.Tensor):
                return kept
            name, dim = self._names[kept]
            return self._slices.joined(name, dim, self._number)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return ATTENTION(query, *args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class SliceOfStage:
    """The program of slice ``number`` of ``model`` as a stage runs it; ``slices`` has what the stage keeps of them.

    ``of_shard`` runs what is left, where each slice is divided among shards.
    """

    model: Derived
    number: int
    slices: EarlierSlices
    of_shard: DerivedProgram | None = None

    def module_of(self, node: fx.Node, number: int, randomness: Randomness) -> nn.Module | None:
        """The module that replaces ``node``; None if it runs as it is."""
        if node.target is WITH_EARLIER:
            return JoinedWithEarlier(self.slices, node.name, self.number)
        if node.target is ATTENTION:
            keys_and_values = args_of(node)[1:3]
            if all(operand.target is WITH_EARLIER for operand in keys_and_values):
                names = [(operand.name, int(args_of(operand)[1])) for operand in keys_and_values]
                return AttentionToEarlier(self.slices, names, self.number)
        return None if self.of_shard is None else self.of_shard.module_of(node, number, randomness)


def programs_of_slices(
    model: Derived, stages: Sequence[Stage], of_shard: DerivedProgram | None = None
) -> list[ProgramOfStage]:
    """A stage in the program of each slice of ``model``; ``stages`` has it as each of them cuts it."""
    slices = EarlierSlices()
    return [
        ProgramOfStage(stage, program, SliceOfStage(model=model, number=number, slices=slices, of_shard=of_shard))
        for number, (stage, program) in enumerate(zip(stages, model.programs, strict=True))
    ]
