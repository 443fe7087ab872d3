"""Slices of the sequence together compute what the whole program does, or the model is refused with the reason."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from auto3d.capture.model import CapturedModel, capture
from auto3d.data import DataSettings, InputField
from auto3d.derived import slice_program
from auto3d.derived.model import Derived
from auto3d.derived.of_share import derived
from auto3d.derived.planned_split import planned_split
from auto3d.derived.slices import sliced
from auto3d.errors import InputError
from auto3d.plan import PlanError
from auto3d.runtime.stage.earlier_slices import EarlierSlices
from auto3d.runtime.verify.shards import check_shards
from auto3d.runtime.verify.slices import SlicesDifferError, check_slices
from auto3d.share import Share
from tests.models import TOKENS, TRAINED, captured
from tests.soak import soak

CPU = torch.device("cpu")
LENGTH = 16
TEXT = replace(TOKENS, sequence_length=LENGTH)


class Block(nn.Module):
    """Causal attention of two heads, by a mask or by the kernel, and a layer for each token."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.out, self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        normal = self.norm(hidden)
        heads = [
            layer(normal).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.queries, self.keys, self.values)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.outer(nn.functional.gelu(self.inner(hidden)))


class Padded(nn.Module):
    """A decoder whose mask depends on the data: no token sees a later one, or one that is 0."""

    def __init__(self, *, sees_next: bool = False, is_float: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 16), nn.Embedding(LENGTH, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 256)
        self.ahead, self.is_float = int(sees_next), is_float

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.tokens(input_ids) + self.places(places)
        sees = (places[:, None] + self.ahead >= places) & (input_ids != 0)[:, None, None]
        sees = sees | (places[:, None] == places)
        mask = torch.zeros_like(sees, dtype=hidden.dtype).masked_fill(~sees, -torch.inf) if self.is_float else sees
        for block in self.blocks:
            hidden = block(hidden, mask)
        return nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), labels)


class Series(nn.Module):
    """A decoder of vectors with squared errors; ``mixes`` names a layer that looks at other places."""

    def __init__(self, mixes: str = "") -> None:
        super().__init__()
        self.enter, self.block, self.head = nn.Linear(4, 16), Block(), nn.Linear(16, 4)
        self.mixes = mixes
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.normal = nn.BatchNorm1d(16, track_running_stats=False)
        self.register_buffer("weight", torch.arange(1.0, 9.0).reshape(2, 4))
        self.register_buffer("places", torch.arange(1.0, 1.0 + LENGTH)[:, None])

    def forward(self, series: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.enter(series), None)
        if self.mixes == "convolution":
            hidden = self.convolution(hidden.mT).mT
        if self.mixes == "sum so far":
            hidden = hidden.cumsum(1)
        if self.mixes == "mean":
            hidden = hidden - hidden.mean(1, keepdim=True)
        if self.mixes == "shift":
            hidden = torch.cat([hidden[:, 1:], hidden[:, :1]], 1)
        if self.mixes == "statistics":
            hidden = self.normal(hidden.mT).mT
        if self.mixes == "sorted":
            hidden = hidden.sort(1).values
        if self.mixes == "reversed":
            hidden = hidden.flip(1)
        if self.mixes == "places":
            return nn.functional.mse_loss(self.head(hidden)[:, ::2], following[:, ::2])
        if self.mixes == "weights":  # one for each vector's element, and two that are the same for all places
            shown = torch.sigmoid(following.detach())
            return nn.functional.binary_cross_entropy_with_logits(
                self.head(hidden), shown, weight=self.weight[:1], pos_weight=self.weight[1]
            )
        if self.mixes == "weights of places":
            return nn.functional.binary_cross_entropy_with_logits(
                self.head(hidden), torch.sigmoid(following.detach()), weight=self.places
            )
        if self.mixes == "root":
            return nn.functional.mse_loss(self.head(hidden), following).sqrt()
        return nn.functional.mse_loss(self.head(hidden), following)


SERIES = DataSettings(
    source="synthetic",
    files=(),
    sequence_length=1,
    vocabulary_size=2,
    inputs={name: InputField(kind="normal", shape=(LENGTH, 4)) for name in ("series", "following")},
)
OWN = {
    "padded": (Padded, TEXT),
    "padded-float": (partial(Padded, is_float=True), TEXT),
    "series": (Series, SERIES),
    "series-weighted": (partial(Series, "weights"), SERIES),
}


def model_of(name: str) -> tuple[CapturedModel, DataSettings]:
    if name in OWN:
        build, data = OWN[name]
        return capture(build, data.input_specs(), 2), data
    return captured(name, 2), TRAINED[name][1]


def check(model: Derived, data: DataSettings) -> None:
    check_slices(model, data, seed=3, device=CPU)


@pytest.mark.parametrize(
    ("name", "slices"),
    [
        ("gpt2", 4),
        ("llama-grouped-query", 2),
        ("gpt2-4-heads-dropout", 4),
        ("llama@bfloat16", 2),
        ("two-losses", 4),
        *((name, 2) for name in OWN),
        *soak(("gpt2", 1), ("gpt2", 16), ("llama", 8), ("gpt2@bfloat16", 4), ("llama-tied", 4)),
        *soak(*((name, 8) for name in OWN)),
    ],
)
def test_slices_compute_the_whole(name, slices):
    """Tied weights, grouped queries, dropout, low precision, two terms of the loss, masks from data, vectors."""
    model, data = model_of(name)
    check(sliced(model, slices), data)


@pytest.mark.parametrize(
    ("name", "slices"),
    [
        ("gpt2-4-heads-dropout", 4),
        ("llama-grouped-query", 2),
        ("padded", 2),
        *soak(("llama@bfloat16", 2), ("two-losses", 4)),
    ],
)
def test_slices_in_shards_compute_the_whole(name, slices):
    model, data = model_of(name)
    share = Share(tp=2, slices=slices)
    found = derived(model, share, split=planned_split(model, Share(tp=2), rules={}))
    assert found.split, "nothing is split"
    check_shards(found, data, seed=3, device=CPU)


def test_a_slice_sees_no_later_one():
    """Attention is to the keys so far. The scores of a causal kernel count in full, whether hidden or not."""
    model = captured("gpt2", 2)
    programs = sliced(model, 4).programs
    whole = sum(node.flops for node in model.graph.nodes)
    attention = sum(node.flops for node in model.graph.nodes if "attention" in node.operator)
    for number, program in enumerate(programs):
        found = sum(node.flops for node in program.graph.nodes)
        assert found == (whole - attention) / 4 + attention / 16 * (2 * (number + 1) if number else 1)


def test_scores_behind_a_mask_of_the_model_count_once():
    """Its kernel computes all of them in the whole program too."""
    model = capture(Padded, TEXT.input_specs(), 2)
    whole = sum(node.flops for node in model.graph.nodes if "attention" in node.operator)
    for number, program in enumerate(sliced(model, 4).programs):
        found = sum(node.flops for node in program.graph.nodes if "attention" in node.operator)
        assert found == whole / 16 * (number + 1)


def test_a_gradient_of_earlier_keys_that_is_lost_is_found(monkeypatch):
    def forgetful(self, name, dim, number, gradient):
        values = self._values[self.micro_batch][name]
        return gradient.split([value.shape[dim] for value in values[: number + 1]], dim)[number]

    monkeypatch.setattr(EarlierSlices, "sum_gradients", forgetful)
    with pytest.raises(
        SlicesDifferError, match="4 slices of the sequence change what the model computes: the gradient"
    ):
        check(sliced(captured("gpt2", 2), 4), TRAINED["gpt2"][1])


def test_places_of_another_slice_are_found(monkeypatch):
    """Every slice takes the positions, and the labels, of the first one."""
    original = slice_program._SliceBuilder._part_of

    def first_places(self, source, split, origin, suffix):
        number, self.number = self.number, 0
        try:
            return original(self, source, split, origin, suffix)
        finally:
            self.number = number

    monkeypatch.setattr(slice_program._SliceBuilder, "_part_of", first_places)
    with pytest.raises(SlicesDifferError, match="2 slices of the sequence change what the model computes: the loss"):
        check(sliced(captured("gpt2", 2), 2), TRAINED["gpt2"][1])


def test_a_later_slice_does_not_run_before_an_earlier_one():
    earlier = EarlierSlices()
    earlier.keep("keys", 0, torch.ones(1))
    with pytest.raises(AssertionError, match="slice 2 runs before one that it needs"):
        earlier.keep("keys", 2, torch.ones(1))


@pytest.mark.parametrize("is_float", [False, True])
def test_a_mask_that_shows_later_slices_is_refused_when_it_comes(is_float):
    """The mask follows from the data, so that no program alone can tell."""
    model = sliced(capture(partial(Padded, sees_next=True, is_float=is_float), TEXT.input_specs(), 2), 2)
    with pytest.raises(InputError, match="a mask of this batch lets a token see a later slice; use a schedule without"):
        check(model, TEXT)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "bert",
            "_attention of bert.encoder.layer.0.attention.self lets tokens attend to later ones",
        ),
        (
            "gpt2-dropout",
            "_attention of transformer.h.0.attn draws random numbers inside of attention",
        ),
        ("t5", "embedding of decoder.embed_tokens combines places of the sequence"),
        ("vit", "it has no input of tokens, .* or of vectors"),
        ("twins", "matmul of the model combines places of the sequence"),
        ("residual", "writes to the buffer normal.num_batches_tracked once per micro-batch"),
    ],
)
def test_models_that_need_the_whole_sequence_are_refused(name, reason):
    with pytest.raises(PlanError, match=f"schedule: this model cannot run in slices of its sequence: .*{reason}"):
        sliced(captured(name, 2), 2)


@pytest.mark.parametrize(
    ("mixes", "reason"),
    [
        ("convolution", "conv1d of convolution combines places"),
        ("sum so far", "cumsum of the model combines places"),
        ("mean", "mean of the model combines places"),
        ("shift", "combines places"),
        ("statistics", "batch_norm of normal combines places"),
        ("sorted", "sort of the model combines places"),
        ("reversed", "flip of the model combines places"),
        ("places", "slice of the model combines places"),
        ("weights of places", "binary_cross_entropy_with_logits of the model does not divide along the sequence"),
        ("root", "the loss is no sum of means over places"),
    ],
)
def test_layers_that_look_at_other_places_are_refused(mixes, reason):
    model = capture(partial(Series, mixes), SERIES.input_specs(), 2)
    with pytest.raises(PlanError, match=f"cannot run in slices of its sequence: .*{reason}.*; use a schedule without"):
        sliced(model, 2)


@pytest.mark.parametrize("slices", [3, 32, 64])
def test_slices_must_divide_the_sequence(slices):
    message = (
        f"slices: {slices} does not divide a sequence of 32 into slices of 2 tokens or more; use one of 1, 2, 4, 8, 16"
    )
    with pytest.raises(PlanError, match=message):
        sliced(captured("gpt2", 2), slices)


def test_keys_and_values_of_earlier_slices_are_held_once():
    """The backward of a slice keeps its own keys and values, not those of all slices so far."""
    model = sliced(captured("gpt2", 2), 4)
    for program in model.programs:
        joined = {node.name for node in program.graph.nodes if node.operator == "auto3d.with_earlier.default"}
        assert len(joined) == 8
        assert not any(joined.intersection(node.saves) for node in program.graph.nodes)
    kept = [sum(len(node.saves) for node in program.graph.nodes) for program in model.programs]
    assert len(set(kept)) == 1
