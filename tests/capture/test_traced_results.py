"""An nn.TransformerEncoder in evaluation gives at padding what torch gives, which runs it without padding."""

import pytest
import torch
from torch import fx, nn

from auto3d.capture.export import InputSpec, Mode
from auto3d.capture.model import capture
from tests.soak import soak

SAMPLES, LENGTH, WIDTH = 4, 6, 8


class Encoder(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH) if "norm" in kind else None)
        if self.encoder.norm is not None:
            nn.init.normal_(self.encoder.norm.bias)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        if "float" in self.kind:
            padding = x.new_zeros(()).masked_fill(padding, -torch.inf)
        return self.encoder(x, src_key_padding_mask=padding).square().mean()


@pytest.mark.parametrize("kind", ["right float norm", "left", *soak("right", "right norm", "left norm")])
def test_padding_is_what_nested_tensors_give(kind):
    torch.manual_seed(1)
    model = Encoder(kind).eval()
    padding = torch.arange(LENGTH) >= torch.tensor([6, 3, 1, 5])[:, None]
    inputs = {"x": torch.randn(SAMPLES, LENGTH, WIDTH), "padding": padding if "right" in kind else padding.flip(1)}
    specs = {name: InputSpec(shape=tuple(value.shape[1:]), dtype=value.dtype) for name, value in inputs.items()}
    exported = capture(lambda: Encoder(kind), specs, SAMPLES, mode=Mode(training=False)).exported
    state = dict(model.named_parameters())
    values = [
        inputs[node.name] if node.name in inputs else state.get(exported.parameters.get(node.name), constant)
        for node in exported.program.find_nodes(op="placeholder")
        for constant in [exported.constants.get(node.name)]
    ]
    with torch.no_grad():
        (found,) = fx.Interpreter(fx.GraphModule(nn.Module(), exported.program)).run(*values)
        model.encoder.enable_nested_tensor = model.encoder.use_nested_tensor = False
        without_nested = model(**inputs)
        model.encoder.enable_nested_tensor = model.encoder.use_nested_tensor = True
        torch.testing.assert_close(found, model(**inputs))
        assert torch.isclose(found, without_nested) == ("left" in kind), "right padding makes a difference"
