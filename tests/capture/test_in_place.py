"""In-place operations in user code have the same results as in eager mode: values, gradients and buffers."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from auto3d.capture.errors import CaptureError
from auto3d.capture.export import InputSpec
from auto3d.capture.model import capture
from tests.capture.one_stage import assert_equal_to_eager

WIDTH = 6
torch.manual_seed(0)
X = {"x": torch.randn(4, WIDTH)}
SPECS = {"x": InputSpec(shape=(WIDTH,), dtype=torch.float32)}


class Layers(nn.Module):
    """Two layers, around the code under test."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.zeros(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between(x, self.first(x)).pow(2).sum()


def after_view(self, x, h):
    h.view(-1).mul_(2)
    return self.second(h)


def through_two_views(self, x, h):
    view = h.unsqueeze(1).flatten(1)
    functional.relu_(view)
    return self.second(h) + view


def other_view_made_before(self, x, h):
    seen = h.view(-1, 2, 3)
    h.add_(1)
    seen[:, 0] = seen[:, 1] * 2
    return self.second(h) * seen.flatten(1)


def through_contiguous(self, x, h):
    h.contiguous().mul_(2)  # contiguous() makes no copy here, so this writes to h
    h.t().contiguous().add_(1)  # contiguous() makes a copy here, which nothing reads
    return self.second(h)


def transposed(self, x, h):
    h.t()[0] = 1.0
    h.permute(1, 0)[1:3, ::2] *= 3.0
    return self.second(h)


def part_of_zeros(self, x, h):
    made = torch.zeros(len(x), WIDTH, 2)
    made[:, :, 0] = h
    made[:, :, 1] = self.second(x)
    made[..., 0].clamp_(min=0)
    return made


def largest(self, x, h):
    weights, chosen = torch.topk(h.softmax(-1), 2)
    weights /= weights.sum(-1, keepdim=True)
    return weights * self.second(x).gather(1, chosen)


def sorted_and_maximum(self, x, h):
    values, _ = h.sort(-1)
    values *= 2
    peaks, _ = self.second(x).max(-1, keepdim=True)
    peaks.mul_(3)
    return values + peaks


def dropped(self, x, h):
    return self.second(functional.dropout(h.flatten(1), 0.0, True, inplace=True))


def by_mask_and_index(self, x, h):
    h[x > 0] = 0.0
    sums = torch.zeros(len(x), WIDTH)
    sums.index_add_(0, torch.arange(len(x)), h)
    sums.scatter_(1, torch.zeros(len(x), 1, dtype=torch.long), self.second(x)[:, :1])
    return sums.masked_fill_(x < -1, 5.0)


def pieces(self, x, h):
    with torch.no_grad():
        left, right = torch.split(x + 1, 3, dim=-1)
        left.sigmoid_()
        first, *others = torch.unbind(x * 3, dim=1)
        first.relu_()
        made = torch.cat([left, right], -1) + (first + others[0])[:, None]
    return self.second(h) * made


def combined(self, x, h):
    mask = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
    mask |= torch.eye(WIDTH, dtype=torch.bool).flip(0)
    mask &= torch.ones(WIDTH, dtype=torch.bool)
    return self.second(h) @ mask.float() + torch.empty_like(h).normal_() * 0


def shape_in_place(self, x, h):
    h = h * 1.0
    h.unsqueeze_(1).transpose_(1, 2)
    return self.second(h.squeeze(2))


def into_out(self, x, h):
    norm = torch.empty(len(x), WIDTH)
    with torch.no_grad():
        torch.mul(h, 2.0, out=norm)
    return self.second(h) * norm


def row_of_buffer(self, x, h):
    before = self.table[1]
    self.table[1] = h.mean(0).detach()
    return self.second(x) + self.table.sum(0) + before


def buffer_seen_before_and_after(self, x, h):
    row = self.table[0]
    kept = row * 1.0
    self.table.add_(h.detach())
    return self.second(x) * row + kept


@pytest.mark.parametrize(
    "between",
    [
        after_view,
        through_two_views,
        through_contiguous,
        other_view_made_before,
        transposed,
        part_of_zeros,
        largest,
        sorted_and_maximum,
        dropped,
        by_mask_and_index,
        pieces,
        combined,
        shape_in_place,
        into_out,
        row_of_buffer,
        buffer_seen_before_and_after,
    ],
    ids=lambda function: function.__name__,
)
def test_is_as_eager(between):
    captured = assert_equal_to_eager(type("Model", (Layers,), {"between": between}), X)
    buffers = captured.exported.buffers
    for node in captured.exported.program.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            assert node.args[0].name in buffers or node.args[0].target._schema.is_mutable, f"{node} writes in place"


def test_an_input_of_the_model():
    class Scales(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return self.second(self.first(x)).sum()

    assert_equal_to_eager(Scales, X)


def test_parametrizations_that_write_to_their_buffers():
    for normalised in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):

        class Normalised(Layers):
            def __init__(self, normalised=normalised) -> None:
                super().__init__()
                self.first = normalised(self.first)

            def between(self, x, h):
                return self.second(h)

        captured = assert_equal_to_eager(Normalised, X)
        assert len(captured.graph.written_buffers) == 2


def detached(self, x, h):
    h.detach().mul_(2)
    return self.second(h)


def parameter(self, x, h):
    with torch.no_grad():
        self.second.weight.clamp_(-0.1, 0.1)
    return self.second(h)


@pytest.mark.parametrize(("between", "words"), [(detached, "made by detach"), (parameter, "to a parameter")])
def test_a_write_that_cannot_be_captured_is_refused_with_its_line(between, words):
    line = between.__code__.co_firstlineno + (1 if between is detached else 2)
    with pytest.raises(CaptureError, match=words) as caught:
        capture(
            type("Model", (Layers,), {"between": between}), {"x": InputSpec(shape=(WIDTH,), dtype=torch.float32)}, 4
        )
    assert f"test_in_place.py, line {line}" in str(caught.value)
    assert "\n" not in str(caught.value)
