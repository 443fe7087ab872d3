"""Operations that depend on no data are computed once."""

import torch
from torch import fx, nn

from auto3d.runtime.stage.constants import fold_constants


class Positions(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        position = torch.arange(6)
        return value + (position[:, None] - position).square()


def test_an_operation_without_data_is_computed_once():
    value = torch.randn(2, 6, 6)
    folded = torch.export.export(Positions(), (value,), strict=False).graph_module
    (expected,) = folded(value)
    fold_constants(folded)
    assert torch.equal(folded(value)[0], expected)
    assert sum(node.op == "call_function" for node in folded.graph.nodes) == 1, "only the addition is left"
    assert len(list(folded.buffers())) == 1


def test_operations_on_data_or_random_numbers_stay():
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
