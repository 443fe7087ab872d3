"""Attention without its mask gives what it gave with it."""

import pytest
import torch
from torch import nn

from auto3d.capture.masks import ATTENTION, leave_masks_to_kernel

LENGTH = 6


class Attention(nn.Module):
    """Makes its mask from nothing but its length: of positions up to ``distance`` before one's own."""

    def __init__(self, distance: int) -> None:
        super().__init__()
        self._distance = distance

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        position = torch.arange(LENGTH)
        before = position[:, None] - position
        mask = ((before >= 0) & (before < self._distance)).expand(2, 1, LENGTH, LENGTH)
        return nn.functional.scaled_dot_product_attention(value, value, value, mask, scale=0.5)


class Given(nn.Module):
    def forward(self, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(value, value, value, mask)


@pytest.mark.parametrize(("distance", "is_causal"), [(LENGTH, True), (3, False)])
def test_a_mask_is_dropped_where_it_is_causal(distance, is_causal):
    value = torch.randn(2, 3, LENGTH, 4, requires_grad=True)
    exported = torch.export.export(Attention(distance), (value,), strict=False).graph_module
    (expected,) = exported(value)
    (wanted,) = torch.autograd.grad(expected.square().sum(), value)
    leave_masks_to_kernel(exported.graph)
    exported.graph.eliminate_dead_code()
    exported.recompile()
    (found,) = exported(value)
    (gradient,) = torch.autograd.grad(found.square().sum(), value)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)
    (attention,) = exported.graph.find_nodes(op="call_function", target=ATTENTION)
    assert (attention.args[3] is None) == attention.kwargs.get("is_causal", False) == is_causal
    assert (sum(node.op == "call_function" for node in exported.graph.nodes) == 1) == is_causal, "what made it is gone"


def test_a_mask_that_data_makes_stays():
    arguments = (torch.randn(1, 1, LENGTH, 4), torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    exported = torch.export.export(Given(), arguments, strict=False).graph_module
    leave_masks_to_kernel(exported.graph)
    (attention,) = exported.graph.find_nodes(op="call_function", target=ATTENTION)
    assert attention.args[3] is not None
