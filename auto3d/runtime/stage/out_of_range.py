"""The sample that holds a whole number which an operation cannot take, such as a class that a model does not have."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from auto3d.capture.errors import node_line
from auto3d.data.interface import IGNORED
from auto3d.errors import InputError


class OutOfRangeError(InputError):
    """An operation cannot take a whole number of a sample."""


_ROWS = "embedding"
_CLASSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")


def out_of_range(
    module: fx.GraphModule, arguments: Sequence[torch.Tensor], names: Sequence[str], program: fx.Graph
) -> OutOfRangeError | None:
    """Why ``module`` fails with ``arguments``, called ``names``: the input, its sample, its value and the operation.

    ``program`` has the operations under their names, and their lines. None where no number is found.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    numbers = _Numbers(module, dict(zip(placeholders, names, strict=True)), program)
    with suppress(Exception):
        numbers.run(*arguments)
    return numbers.error


class _Numbers(fx.Interpreter):
    """Runs a module up to an operation that does not take its whole numbers, for which it has the ``error``."""

    error: OutOfRangeError | None = None

    def __init__(self, module: fx.GraphModule, name_of: dict[fx.Node, str], program: fx.Graph) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._name_of = name_of
        self._source = {node.name: node for node in program.nodes}

    def run_node(self, n: fx.Node) -> Any:
        source = self._source.get(n.name)
        kind = getattr(getattr(source, "target", None), "overloadpacket", None)
        name = getattr(kind, "__name__", "")
        if name == _ROWS or name in _CLASSES:
            (table, numbers, *_), _ = self.fetch_args_kwargs_from_env(n)
            if not numbers.is_floating_point():
                limit = table.shape[0] if name == _ROWS else table.shape[min(1, table.dim() - 1)]
                self._check(n, numbers, limit, ignores=name in _CLASSES)
        return super().run_node(n)

    def _check(self, node: fx.Node, numbers: torch.Tensor, limit: int, *, ignores: bool) -> None:
        wrong = (numbers < 0) | (numbers >= limit)
        if ignores:
            wrong &= numbers != IGNORED
        if not wrong.any():
            return
        place = int(wrong.flatten().nonzero()[0])
        sources = self._whole_numbers_behind(node.all_input_nodes[1])
        name, sample, value = "an input", "", numbers.flatten()[place]
        if len(sources) == 1:
            samples = self.env[sources[0]].shape[0]
            name = self._name_of[sources[0]]
            if not (self.env[sources[0]] == value).any():
                name = f"what the model makes of {name}"
            if not numbers.numel() % samples:
                sample = f" in sample {place // (numbers.numel() // samples)}"
        ignored = f", and {IGNORED} for what is ignored," if ignores else ""
        self.error = OutOfRangeError(
            f"{name}: found {int(value)}{sample}; the model takes whole numbers from 0 to "
            f"{limit - 1}{ignored}{node_line(self._source[node.name])}"
        )
        raise IndexError  # to which the interpreter adds lines

    def _whole_numbers_behind(self, node: fx.Node) -> list[fx.Node]:
        """The module's arguments of whole numbers from which ``node`` is computed."""
        seen, pending = dict[fx.Node, None](), [node]
        while pending:
            current = pending.pop()
            if current not in seen:
                seen[current] = None
                pending += current.all_input_nodes
        return [
            argument for argument in seen if argument.op == "placeholder" and not self.env[argument].is_floating_point()
        ]
