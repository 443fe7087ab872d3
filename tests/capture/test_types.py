"""Tensors of several types: what torch multiplies, and what it says only where there are values."""

from functools import partial

import pytest
import torch
from torch import nn

from auto3d.capture.errors import CaptureError
from tests.capture.one_stage import assert_equal_to_eager

INPUTS = {"x": torch.randn(2, 4, 4)}
KINDS = {"linear": partial(nn.Linear, 4, 4), "conv1d": partial(nn.Conv1d, 4, 4, 1, bias=False)}


class Low(nn.Module):
    """A layer in float16 of an input in float32, which it may convert."""

    def __init__(self, kind: str, *, converts: bool) -> None:
        super().__init__()
        self.layer, self.converts = KINDS[kind]().half(), converts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.half() if self.converts else x).float().square().mean()


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_of_two_types_is_refused_when_it_is_captured(kind):
    with pytest.raises(CaptureError, match=rf"^{kind} takes float32 and float16 at .*, line \d+, and torch multiplies"):
        assert_equal_to_eager(partial(Low, kind, converts=False), INPUTS)


def test_a_product_of_one_type_is_captured():
    assert_equal_to_eager(partial(Low, "linear", converts=True), INPUTS)
