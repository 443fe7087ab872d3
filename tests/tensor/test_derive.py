"""The derivation splits whole families of models from their graphs alone, with Megatron-LM's communication."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from auto3d.capture.model import capture
from auto3d.conversions import Collective
from auto3d.derived.explain import BACKWARD, FORWARD, exchanges, explain
from auto3d.derived.shards import tensor_parallel
from auto3d.runtime.verify.shards import check_shards
from auto3d.share import Share
from auto3d.tensor.derive import derive
from tests.models import IMAGES, TEXT, captured, resnet_of_transformers
from tests.soak import soak

check = partial(check_shards, seed=3, device=torch.device("cpu"))
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256, "use_cache": False}


class Mixer(nn.Module):
    """MLP-Mixer: one product over patches and one over channels."""

    def __init__(self, patches: int = 16, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 8, 8)
        self.over_patches = nn.Sequential(nn.Linear(patches, 64), nn.GELU(), nn.Linear(64, patches))
        self.over_channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 2)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(pixel_values).flatten(2).mT
        hidden = hidden + self.over_patches(hidden.mT).mT
        hidden = hidden + self.over_channels(self.norm(hidden))
        return nn.functional.cross_entropy(self.head(hidden.mean(1)), labels)


class UNet(nn.Module):
    """One level down and up again, with a skip that is joined along the channels, and group norms."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width)
        self.down, self.middle = nn.Conv2d(width, 2 * width, 2, 2), nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up, self.join = nn.ConvTranspose2d(2 * width, width, 2, 2), nn.Conv2d(2 * width, width, 3, padding=1)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = torch.relu(self.norm(self.enter(pixel_values)))
        inner = torch.relu(self.middle(torch.relu(self.down(first))))
        hidden = torch.relu(self.join(torch.cat([first, self.up(inner)], 1)))
        return nn.functional.cross_entropy(self.head(hidden).mean((2, 3)), labels)


class Experts(nn.Module):
    """A mixture of experts that all compute, weighted by a gate. Its weights have three dimensions, as einsum takes."""

    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(256, width), nn.Linear(width, experts), nn.Linear(width, 256)
        self.up = nn.Parameter(torch.randn(experts, width, 64) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, 64, width) * 0.1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        inner = torch.einsum("bsd,edf->besf", hidden, self.up).relu()
        hidden = hidden + torch.einsum("bse,besf,efd->bsd", self.gate(hidden).softmax(-1), inner, self.down)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class UsedWhole(nn.Module):
    """Weights that products split before an operator without a rule needs them whole."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        penalty = sum(torch.linalg.det(layer.weight.tanh()) + layer.weight.sort(-1)[0].mean() for layer in self.layers)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()) + 0.01 * penalty


FAMILIES = {
    "mixture of experts": (Experts, TEXT),
    "bloom": (lambda: BloomForCausalLM(BloomConfig(n_layer=2, n_head=4, hidden_dropout=0.0, **_of(SIZES))), TEXT),
    "falcon": (lambda: FalconForCausalLM(FalconConfig(**SIZES)), TEXT),
    "few key-value heads": (
        lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, intermediate_size=64, **SIZES)),
        TEXT,
    ),
    "resnet": (resnet_of_transformers, IMAGES),
    "mixer": (Mixer, IMAGES),
    "u-net": (UNet, IMAGES),
}


def _of(sizes: dict) -> dict:
    return {name: value for name, value in sizes.items() if not name.startswith("num_")}


@pytest.mark.parametrize("family", [*(name for name in FAMILIES if name != "bloom"), *soak("bloom")])
def test_a_family_is_split_from_its_graph_alone(family):
    build, data = FAMILIES[family]
    whole = capture(build, data.input_specs(), 2)
    for shards, sequence_parallel in ((2, False), (4, False), (2, True)):
        model = tensor_parallel(whole, Share(tp=shards, sequence_parallel=sequence_parallel))
        check(model, data)
        assert explain(model).split_bytes > 0.9


def test_state_that_a_later_operation_needs_whole_is_whole():
    whole = capture(UsedWhole, TEXT.input_specs(), 2)
    model = tensor_parallel(whole, Share(tp=2))
    check(model, TEXT)
    assert not any(name.startswith("layers") and name.endswith("weight") for name in model.split)


def test_dropout_inside_attention_may_have_fewer_key_value_heads_than_ranks():
    sizes = SIZES | {"num_key_value_heads": 2, "intermediate_size": 64, "attention_dropout": 0.1}
    whole = capture(lambda: LlamaForCausalLM(LlamaConfig(**sizes)), TEXT.input_specs(), 2)
    model = tensor_parallel(whole, Share(tp=4))
    assert any(name.endswith("attention") for name in model.drawn_per_shard)
    check(model, TEXT)


@pytest.mark.parametrize(("name", "blocks"), [("gpt2", 8), ("bert", 8), ("llama", 8), ("t5", 10)])
def test_communication_is_that_of_megatron(name, blocks):
    """One all-reduce forward and one backward for each attention and each feed-forward, and a few at both ends."""
    model = tensor_parallel(captured(name, 2), Share(tp=2))
    counts = {(each.phase, each.collective): each.count for each in exchanges(model)}
    for phase in (FORWARD, BACKWARD):
        assert blocks <= counts[phase, Collective.ALL_REDUCE] <= blocks + 6


@pytest.mark.parametrize("name", ["gpt2", "vit", *soak("bert", "llama")])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_wider_beam_finds_nothing_cheaper(name, sequence_parallel):
    model = captured(name, 2)
    narrow, wide = (
        derive(model, Share(tp=2, sequence_parallel=sequence_parallel), pinned={}, **options)
        for options in ({}, {"states": 1000})
    )
    assert narrow.cost == pytest.approx(wide.cost, rel=1e-7)  # a millionth of a byte per byte breaks ties


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        ("gpt2", True),
        ("t5", False),
        *soak(("gpt2", False), ("t5", True), *product(("bert", "llama"), (False, True))),
    ],
)
def test_decisions_do_not_depend_on_the_micro_batch_size(name, sequence_parallel):
    """Stages of unequal replicas run one program, and costs of one size are scaled to others."""
    first, *others = (
        tensor_parallel(captured(name, n), Share(tp=2, sequence_parallel=sequence_parallel)) for n in (1, 2, 4, 8)
    )
    for other in others:
        assert first.split == other.split
        assert first.program.graph.same_operations(other.program.graph)


def test_ties_go_to_megatrons_pattern():
    """The residual stream is whole: a reduce comes right behind its product, a copy right before.

    A copied stream, or a partial value that a view passes on, would cost no more communication.
    """
    graph = tensor_parallel(captured("gpt2", 2), Share(tp=2)).program.graph
    maker = {value.name: node for node in graph.nodes for value in node.outputs}
    reduces = [node for node in graph.nodes if node.operator == "auto3d.reduce.default"]
    assert [maker[node.reads[0]].operator for node in reduces] == ["aten.add.Tensor"] + ["aten.addmm.default"] * 8
    copies = {node.outputs[0].name for node in graph.nodes if node.operator == "auto3d.copy.default"}
    assert len(copies) == 9
    readers = {node.operator for node in graph.nodes if copies.intersection(node.reads)}
    assert readers == {"aten.addmm.default", "aten.linear.default"}
