"""A stage's initial weights equal those of the whole model, which is never in memory."""

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.capture.shard import Shard
from auto3d.capture.skeleton import seed_all
from auto3d.runtime.watch.peak_memory import PeakMemory
from auto3d.runtime.weights.files import Weights
from auto3d.runtime.weights.materialize import InitialStateError, materialize
from auto3d.tensor_placement import Split
from tests.models import MODELS


@pytest.mark.parametrize("model", MODELS)
def test_bitwise_equal_to_the_whole_model(model):
    build, _ = MODELS[model]
    torch.manual_seed(7)
    whole = build()
    expected = {**dict(whole.named_buffers()), **dict(whole.named_parameters())}
    names = list(expected)
    state = torch.get_rng_state()
    for part in range(3):
        own = names[part::3]
        made = materialize(build, own, seed=7)
        assert set(made) == set(own)
        for name in own:
            assert torch.equal(made[name], expected[name]), name
    assert torch.equal(torch.get_rng_state(), state), "the caller's random state is untouched"


def wide_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=1024, n_head=8, n_positions=64, vocab_size=256))


def test_no_rank_holds_more_than_its_stage():
    """Besides its stage's weights, a rank holds one tensor of another stage while it draws its values."""
    with torch.device("meta"):
        model = wide_gpt2()
    own = [name for name, _ in model.named_parameters() if ".h.3." in name]
    own_bytes = sum(p.nbytes for name, p in model.named_parameters() if name in own)
    all_bytes = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    memory = PeakMemory(torch.device("cpu"))
    made = materialize(wide_gpt2, own, seed=1)
    assert sum(tensor.nbytes for tensor in made.values()) == own_bytes
    assert memory.bytes() < own_bytes + 2 * largest + 20e6 < all_bytes / 3


class Twins(nn.Module):
    """``tie`` computes one initial weight from another."""

    def __init__(self, tie: Callable[[nn.Linear, nn.Linear], None]) -> None:
        super().__init__()
        self.left, self.middle, self.right = (nn.Linear(4, 4) for _ in range(3))
        tie(self.left, self.right)


def by_copy(left: nn.Linear, right: nn.Linear) -> None:
    with torch.no_grad():
        right.weight.copy_(left.weight)


def by_data(left: nn.Linear, right: nn.Linear) -> None:
    right.weight.data.copy_(left.weight.data)


def by_view(left: nn.Linear, right: nn.Linear) -> None:
    right.weight.data[:2].add_(left.weight.data.t().reshape(2, 8)[:, :4])


def by_deep_copy(left: nn.Linear, right: nn.Linear) -> None:
    right.weight = copy.deepcopy(left.weight)


@pytest.mark.parametrize("tie", [by_copy, by_data, by_view, by_deep_copy])
def test_a_weight_computed_from_another_stages_is_refused_unless_a_state_dict_has_it(tie):
    torch.manual_seed(1)
    whole = Twins(tie).state_dict()
    both = materialize(lambda: Twins(tie), ["left.weight", "right.weight"], seed=1)
    assert all(torch.equal(both[name], whole[name]) for name in both)
    with pytest.raises(InitialStateError, match=r"right.weight: the module computes.*give a state dict"):
        materialize(lambda: Twins(tie), ["right.weight"], seed=1)
    assert torch.equal(materialize(lambda: Twins(tie), ["left.weight"], seed=1)["left.weight"], whole["left.weight"])
    given = materialize(lambda: Twins(tie), ["right.weight"], seed=1, state={"right.weight": torch.ones(4, 4)})
    assert torch.equal(given["right.weight"], torch.ones(4, 4))


def transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3)


def orthogonal() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    nn.init.orthogonal_(module[0].weight)
    nn.init.orthogonal_(module[1].weight)
    return module


def half() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)


@pytest.mark.parametrize("build", [transformer, orthogonal, half])
def test_weights_that_are_made_repeatedly(build):
    """Deep copies of a layer that is then discarded, initialisation by algebra, and another data type."""
    torch.manual_seed(3)
    whole = dict(build().named_parameters())
    for part in range(2):
        own = list(whole)[part::2]
        made = materialize(build, own, seed=3)
        assert all(torch.equal(made[name], whole[name]) for name in own)


class Layers(nn.Module):
    """Layers initialised by ``initialise``: each as soon as it is made, or all at the end."""

    def __init__(
        self, initialise: Callable[[nn.Linear], object], width: int = 8, layers: int = 5, *, late: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(nn.Linear(width, width))
            if not late:
                initialise(self.layers[-1])
        for layer in self.layers if late else ():
            initialise(layer)


def until_all_fit(layer: nn.Linear) -> None:
    nn.init.trunc_normal_(layer.weight, std=0.3, a=-0.6, b=0.6)


def until_the_tail_fits(layer: nn.Linear) -> None:
    nn.init.trunc_normal_(layer.weight, std=0.3, a=0.5, b=0.7)


def from_numpy(layer: nn.Linear) -> None:
    layer.weight.data.copy_(torch.from_numpy(np.random.standard_normal(layer.weight.shape)))
    nn.init.constant_(layer.bias, random.random())


def as_data_of_numpy(layer: nn.Linear) -> None:
    layer.weight.data = torch.from_numpy(np.random.standard_normal(layer.weight.shape).astype(np.float32))


def as_new_parameter_of_numpy(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.from_numpy(np.random.standard_normal(layer.weight.shape)))


def by_memory(layer: nn.Linear) -> None:
    if not layer.weight.is_meta:
        nn.init.normal_(layer.weight).detach().numpy()[1:3] *= 2


def as_slices(layer: nn.Linear) -> None:
    both = torch.randn(2, *layer.weight.shape)
    layer.weight, layer.other = nn.Parameter(both[0]), nn.Parameter(both[1])


@pytest.mark.parametrize(
    "initialise",
    [
        until_all_fit,
        until_the_tail_fits,
        from_numpy,
        as_data_of_numpy,
        as_new_parameter_of_numpy,
        by_memory,
        as_slices,
        lambda layer: nn.init.sparse_(layer.weight, 0.3),
        lambda layer: torch._foreach_mul_([layer.weight.data, layer.bias.data], 2.0),
        parametrizations.spectral_norm,
        parametrizations.weight_norm,
        parametrizations.orthogonal,
        nn.utils.spectral_norm,
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_every_way_to_initialise_gives_the_bits_of_the_whole_model(initialise, late):
    def build() -> nn.Module:
        return Layers(initialise, late=late)

    seed_all(11)
    whole = build()
    expected = {**dict(whole.named_buffers()), **dict(whole.named_parameters())}
    states = random.getstate(), np.random.get_state()[1].tolist()
    if late and initialise is parametrizations.orthogonal:  # it branches on the values of other stages' weights
        with pytest.raises(InitialStateError, match=r"the parameter layers.0.parametrizations.weight.original at "):
            materialize(build, ["layers.0.bias"], seed=11)
        return
    for layer in range(5):
        own = [name for name in expected if name.startswith(f"layers.{layer}.")]
        made = materialize(build, own, seed=11)
        for name in own:
            assert torch.equal(made[name], expected[name]), name
            assert made[name].untyped_storage().nbytes() == made[name].nbytes
    assert states == (random.getstate(), np.random.get_state()[1].tolist()), "the caller's random states are untouched"


@pytest.mark.parametrize("initialise", [until_all_fit, as_data_of_numpy, as_new_parameter_of_numpy, by_memory])
def test_a_rank_holds_other_stages_weights_only_while_one_initialiser_works_on_them(initialise):
    def build() -> nn.Module:
        return Layers(initialise, width=1024, layers=48)

    layer_bytes = 4 * 1024 * 1024
    memory = PeakMemory(torch.device("cpu"))
    materialize(build, ["layers.3.weight"], seed=1)
    assert memory.bytes() < 18 * layer_bytes


class Reads(nn.Module):
    """A model whose last layer is initialised by code that reads the weight of its first layer with ``read``."""

    def __init__(self, read: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        if not self.layers[0].weight.is_meta:
            read(self.layers[0].weight.detach() * 2)
        nn.init.normal_(self.layers[-1].weight)


def caught(values: torch.Tensor) -> None:
    with suppress(ValueError):
        values.sum().item()


@pytest.mark.parametrize(
    "read",
    [
        lambda values: values.sum().item(),
        lambda values: bool((values > 0).any()),
        lambda values: torch.equal(values, torch.ones(4, 4)),
        lambda values: torch.allclose(values, torch.ones(4, 4)),
        lambda values: values[values > 0],
        lambda values: values.nonzero(),
        lambda values: torch.poisson(values.abs()),
        lambda values: torch.linalg.cholesky(values - torch.eye(4)),
        lambda values: values.tolist(),
        lambda values: values.numpy(),
        lambda values: np.asarray(values),
        lambda values: torch._foreach_add([torch.ones(4, 4)], [values])[0].max().item(),
        caught,
    ],
)
def test_code_that_branches_on_a_missing_value_is_refused_with_its_line(read):
    with pytest.raises(
        InitialStateError,
        match=r"depends on the parameter layers.0.weight at .*test_materialize.py, line \d+; or use plan.pp=1",
    ):
        materialize(lambda: Reads(read), ["layers.3.weight"], seed=1)
    torch.manual_seed(1)
    try:
        expected = Reads(read).layers[3].weight
    except torch.linalg.LinAlgError:
        return
    everything = [f"layers.{number}.{kind}" for number in range(4) for kind in ("weight", "bias")]
    assert torch.equal(materialize(lambda: Reads(read), everything, seed=1)["layers.3.weight"], expected)


def test_parameters_that_share_memory_are_refused():
    def share(layer: nn.Linear) -> None:
        layer.other = nn.Parameter(layer.weight.data[1:])

    with pytest.raises(
        InitialStateError, match=r"layers.0.\w+: shares memory with the parameter layers.0.*same nn.Par"
    ):
        materialize(lambda: Layers(share), ["layers.1.weight"], seed=1)


def test_a_state_dict_has_precedence_and_must_fit():
    build, _ = MODELS["gpt2"]
    name = "transformer.h.1.mlp.c_fc.weight"
    state = {name: torch.full((32, 128), 0.5)}
    assert torch.equal(materialize(build, [name], seed=1, state=state)[name], state[name])
    with pytest.raises(InitialStateError, match=r"c_fc.bias is missing"):
        materialize(build, ["transformer.h.1.mlp.c_fc.bias"], seed=1, state=state)
    with pytest.raises(InitialStateError, match=r"has shape \[3\], the model's has \[32, 128\]"):
        materialize(build, [name], seed=1, state={name: torch.zeros(3)})


# Shards of tensor-parallel ranks


def scaled_twice() -> nn.Module:
    """Weights that are scaled and then partly set after others were drawn; the last one is far larger than the rest."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 96))
    with torch.no_grad():
        for part in module:
            part.weight.mul_(0.5)
            part.bias.add_(1)
        for part in module:
            part.weight[1].zero_()
            part.weight.clamp_(-0.1, 0.1)
    return module


SHARDED_MODELS = {**{name: build for name, (build, _) in MODELS.items()}, "scaled": scaled_twice, "half": half}


@pytest.mark.parametrize("model", SHARDED_MODELS)
def test_shards_are_those_of_the_whole_model(model):
    """Every parameter and buffer split along its first or its last dimension among 2 or 3 ranks."""
    build = SHARDED_MODELS[model]
    torch.manual_seed(7)
    whole = build()
    expected = {**dict(whole.named_buffers()), **dict(whole.named_parameters())}
    for shards, shard in ((2, 0), (3, 2)):
        split = {}
        for number, (name, tensor) in enumerate(expected.items()):
            if tensor.dim():
                dim = (number + shards) % 2 * (tensor.dim() - 1)
                split[name] = Shard(Split(dim, (tensor.shape[dim],)), shard, shards)
        made = materialize(build, list(expected), seed=7, shards=split)
        for name, tensor in expected.items():
            assert torch.equal(made[name], split[name].of(tensor) if name in split else tensor), name


def test_a_rank_holds_a_whole_weight_only_while_it_is_initialised():
    with torch.device("meta"):
        model = wide_gpt2()
    split = {
        name: Shard(Split(p.dim() - 1, (p.shape[-1],)), 3, 4) for name, p in model.named_parameters() if p.dim() == 2
    }
    all_bytes = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    memory = PeakMemory(torch.device("cpu"))
    made = materialize(wide_gpt2, [name for name, _ in model.named_parameters()], seed=1, shards=split)
    held = sum(tensor.nbytes for tensor in made.values())
    assert held < 0.26 * all_bytes
    assert memory.bytes() < held + 3 * largest + 20e6 < all_bytes / 2


def orthogonal_again() -> nn.Module:
    """A weight that is needed whole after others have taken its memory."""
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    with torch.no_grad():
        module[0].weight.copy_(module[0].weight @ module[0].weight)
    return module


def test_a_weight_that_needs_its_other_shards_is_refused_unless_a_state_dict_has_it():
    shard = Shard(Split(0, (16,)), 1, 2)
    with pytest.raises(InitialStateError, match=r"0\.weight: the module .*give a state dict"):
        materialize(orthogonal_again, ["0.weight"], seed=1, shards={"0.weight": shard})
    given = torch.randn(16, 16)
    made = materialize(orthogonal_again, ["0.weight"], seed=1, state={"0.weight": given}, shards={"0.weight": shard})
    assert torch.equal(made["0.weight"], given[8:])
    half_of_it = {"0.weight": given[8:]}
    with pytest.raises(InitialStateError, match=r"0\.weight has shape \[8, 16\], the model's has \[16, 16\]"):
        materialize(orthogonal_again, ["0.weight"], seed=1, state=half_of_it, shards={"0.weight": shard})


def one_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16))


def test_only_the_shard_of_a_file_is_read(tmp_path):
    given = torch.randn(16, 12)
    save_file({"0.weight": given}, tmp_path / "weights.safetensors")
    weights = Weights(str(tmp_path / "weights.safetensors"))
    for split in (Split(0, (16,)), Split(1, (6, 6)), Split(0, (4, 8, 4)), Split(1, (12,))):
        for shards in (2, 4) if split.dim == 0 else (2, 5)[: 3 - len(split.blocks)]:
            shard = Shard(split, shards - 1, shards)
            with patch.object(Weights, "__getitem__", side_effect=AssertionError("it reads the whole tensor")):
                made = materialize(one_layer, ["0.weight"], seed=1, state=weights, shards={"0.weight": shard})
            assert torch.equal(made["0.weight"], shard.of(given))
