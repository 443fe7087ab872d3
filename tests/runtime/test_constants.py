"""What no data enters is computed once; attention without its mask gives what it gave with it."""

import pytest
import torch
from torch import fx, nn

from auto3d.runtime.constants import ATTENTION, fold_constants

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
        return nn.functional.scaled_dot_product_attention(value, value, value, mask, scale=0.5) + position[:, None]


@pytest.mark.parametrize(("distance", "is_causal"), [(LENGTH, True), (3, False)])
def test_a_mask_is_computed_once_and_dropped_where_it_is_causal(distance, is_causal):
    value = torch.randn(2, 3, LENGTH, 4, requires_grad=True)
    folded = torch.export.export(Attention(distance), (value,), strict=False).graph_module
    (expected,) = folded(value)
    (wanted,) = torch.autograd.grad(expected.square().sum(), value)
    fold_constants(folded)
    (found,) = folded(value)
    (gradient,) = torch.autograd.grad(found.square().sum(), value)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)
    assert sum(node.op == "call_function" for node in folded.graph.nodes) == 2, "attention and the addition"
    (attention,) = folded.graph.find_nodes(op="call_function", target=ATTENTION)
    assert (attention.args[3] is None) == attention.kwargs.get("is_causal", False) == is_causal
    assert len(list(folded.buffers())) == 1 + (not is_causal), "the positions, and the mask where it is needed"


def test_what_data_enters_or_is_drawn_stays():
    class Noise(nn.Module):
        def forward(self, value):
            return value * torch.rand(2)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noise = Noise()

        def forward(self, value):
            return torch.ops.aten.add.Tensor(value, self.noise(torch.ops.aten.ones.default([2])))

    class KeepModules(fx.Tracer):
        def is_leaf_module(self, module, name) -> bool:
            return True

    model = Sum()
    folded = fx.GraphModule(model, KeepModules().trace(model))
    fold_constants(folded)
    kept = ["placeholder", "get_attr", "call_module", "call_function", "output"]
    assert sorted(node.op for node in folded.graph.nodes) == sorted(kept)
    assert not torch.equal(folded(torch.zeros(2)), folded(torch.zeros(2)))
