"""A stage uses received values as one process would use them, memory layout included."""

import pytest
import torch
from torch import nn

from auto3d.capture.export import InputSpec
from auto3d.capture.model import capture
from auto3d.partition.stage import cut
from auto3d.plan import stages_between
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.build import build_stage
from auto3d.runtime.stage.program import ProgramOfStage, in_layout

CPU = torch.device("cpu")


class Turned(nn.Module):
    """A dropout of a transposed value, whose mask is drawn in memory order, and a view that needs its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.first(x).view(-1, 3, 4).permute(2, 0, 1)
        dropped = nn.functional.dropout(turned, 0.5)
        return self.second(dropped.permute(1, 2, 0).view(-1, 12)).pow(2).sum()


def losses(bounds: list[int]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the model cut into stages at these operations, which send contiguous values."""
    captured = capture(Turned, {"x": InputSpec(shape=(12,), dtype=torch.float32)}, 5)
    torch.manual_seed(0)
    module, x = Turned(), torch.randn(5, 12)
    tensors = dict(module.named_parameters())
    running = [
        build_stage(
            [ProgramOfStage(stage, captured)],
            tensors,
            loss_weight=1.0,
            randomness=Randomness(1, first_micro_batch=0, micro_batches=1, device=CPU),
        )
        for stage in cut(captured.graph, stages_between(bounds))
    ]
    sent: dict[str, torch.Tensor] = {}
    for stage in running:
        sent |= stage.forward(0, sent, {"x": x})
    gradients: dict[str, list[torch.Tensor]] = {}
    for stage in reversed(running):
        for name, gradient in stage.backward(0, gradients).items():
            gradients.setdefault(name, []).append(gradient)
    return running[-1].losses[0].item(), {name: tensor.grad for name, tensor in tensors.items()}


def test_a_value_keeps_its_memory_layout_from_stage_to_stage():
    operations = len(capture(Turned, {"x": InputSpec(shape=(12,), dtype=torch.float32)}, 5).graph.nodes)
    loss, gradients = losses([0, operations])
    for place in range(1, operations):
        found, others = losses([0, place, operations])
        assert found == loss
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strides", [(12, 4, 1), (1, 30, 5), (3, 1, 15), (4, 20, 1)])
def test_in_layout_sets_the_strides_and_keeps_the_values(strides):
    shape = {(12, 4, 1): (5, 3, 4), (1, 30, 5): (5, 4, 6), (3, 1, 15): (5, 3, 4), (4, 20, 1): (5, 3, 4)}[strides]
    value = torch.randn(shape)
    found = in_layout(value, strides)
    assert found.stride() == strides
    assert torch.equal(found, value)


def test_in_layout_leaves_expanded_values_alone():
    value = torch.randn(3, 4)
    assert in_layout(value, (0, 1)) is value
