"""Low-precision copies of weights: the forward computes with them, and gradients go to the float32 weights.

Under torch.autocast every micro-batch casts each weight again. Here a stage makes one copy per version of its weights,
and each use of a copy adds its gradient, cast to the type of the weight, to the weight's gradient. A copy of a weight
with a single use is a leaf of autograd that does so by itself; others need an operation at each use,
which takes longer.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from auto3d.capture.autocast import copy_name
from auto3d.capture.model import CapturedModel
from auto3d.runtime.stage.fast_calls import apply_of

Copies = Mapping[str, tuple[str, torch.dtype]]
"""Name of a copy -> name of its parameter, and the type of the copy."""


def copies_of(captured: CapturedModel, nodes: Collection[str]) -> dict[str, tuple[str, torch.dtype]]:
    """The copies that operations ``nodes`` of the program use."""
    exported = captured.exported
    copies: dict[str, tuple[str, torch.dtype]] = {}
    for node in exported.program.find_nodes(op="placeholder"):
        if node.name in exported.copies and any(user.name in nodes for user in node.users):
            parameter, dtype = exported.parameters[node.name], node.meta["val"].dtype
            copies[copy_name(parameter, dtype)] = (parameter, dtype)
    return copies


def used_once(captured: CapturedModel, nodes: Collection[str]) -> set[str]:
    """The copies of ``copies_of`` whose parameter is trained and has no other use in operations ``nodes``."""
    exported = captured.exported
    uses = Counter(
        exported.parameters[node.name]
        for node in exported.program.find_nodes(op="placeholder")
        if node.name in exported.parameters
        for user in node.users
        if user.name in nodes
    )
    copies = copies_of(captured, nodes)
    trained = captured.graph.trained
    return {name for name, (parameter, _) in copies.items() if uses[parameter] == 1 and parameter in trained}


@torch.no_grad()
def with_copies(tensors: Mapping[str, torch.Tensor], captured: CapturedModel) -> dict[str, torch.Tensor]:
    """``tensors`` by name, and the copies of those parameters among them that the program uses."""
    copies = copies_of(captured, {node.name for node in captured.exported.program.nodes})
    made = {name: tensors[parameter].to(dtype) for name, (parameter, dtype) in copies.items() if parameter in tensors}
    return {**tensors, **made}


class UseOfCopy(nn.Module):
    """Gives the copy of a parameter to one operation, and the gradient that the operation returns to the parameter."""

    def forward(self, parameter: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return use_copy(parameter, copy)


def use_copy(parameter: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """``copy``, whose gradient becomes the gradient of ``parameter``."""
    used = _use(parameter, copy)
    assert isinstance(used, torch.Tensor)
    return used


class _UseOfCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.dtype = parameter.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype), None


_use = apply_of(_UseOfCopy)
