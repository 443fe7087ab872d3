"""Mixed precision and torch.vmap in forward become operations with the same results as in eager mode."""

import pytest
import torch
from torch import nn

from auto3d.capture.autocast import AutocastState
from auto3d.capture.errors import CaptureError
from auto3d.capture.export import InputSpec, export
from auto3d.capture.model import capture
from tests.capture.one_stage import assert_equal_to_eager
from tests.capture.test_in_place import SPECS, WIDTH, Layers, X


def one_region(self, x, h):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = self.second(h)
        total = low.float().softmax(-1) + torch.nn.functional.layer_norm(low, (WIDTH,)).sum(-1, keepdim=True)
    return total.float()


def region_without_in_region_with(self, x, h):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = self.second(h)
        with torch.autocast("cpu", enabled=False):
            low = self.first(low.float())
        low = self.second(low) @ self.second(low).mT
    return low.float()


def attention_and_convolution(self, x, h):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        heads = self.second(h).view(-1, 1, 2, 3)
        out = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        out = nn.functional.conv1d(out.flatten(1)[:, None], self.first.weight[:1, None, :3])
    return out.float()


def vmapped(self, x, h):
    return torch.vmap(lambda row: self.second(row).softmax(-1) * row.sum())(h)


def vmapped_twice(self, x, h):
    return torch.vmap(torch.vmap(lambda a: a * a.exp()), in_dims=1, out_dims=1)(h)


@pytest.mark.parametrize(
    "between",
    [one_region, region_without_in_region_with, attention_and_convolution, vmapped, vmapped_twice],
    ids=lambda function: function.__name__,
)
def test_regions_agree_with_eager_mode(between):
    assert_equal_to_eager(type("Model", (Layers,), {"between": between}), X)


class Taught(Layers):
    """The code before the region has one result, which the mark of a repeated block uses too."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def between(self, x, h):
        h = self.student(h)
        with torch.no_grad():
            wanted = self.teacher(h)
        return h * wanted


def test_every_node_knows_its_users():
    assert_equal_to_eager(Taught, X)
    for node in capture(Taught, SPECS, 4).exported.program.nodes:
        assert all(node in used.users for used in node.all_input_nodes)


def test_other_transforms_are_refused():
    def gradient(self, x, h):
        return self.second(torch.func.grad(lambda a: (a**2).sum())(h))

    with pytest.raises(CaptureError, match=r"test_regions.py, line \d+"):
        capture(type("Model", (Layers,), {"between": gradient}), SPECS, 4)


class ReadsInRegion(nn.Module):
    """Reads a value that is known, between the begin of autocast and its end."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            steps = torch.arange(4)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.a(x) if bool((steps < 4).all()) else x
        return y.float().square().mean()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_capture_leaves_autocast_as_it_was(precision):
    """On a nesting that does not end, later code of the process would go on with casts of old weights."""
    before = AutocastState.now()
    specs = {"x": InputSpec(shape=(4,), dtype=torch.float32)}
    exported = export(ReadsInRegion, specs, 2, precision=precision)
    assert AutocastState.now() == before
    products = [str(node.meta["val"].dtype) for node in exported.program.nodes if "linear" in str(node.target)]
    assert products == ["torch.bfloat16"]
