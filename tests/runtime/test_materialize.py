"""A stage's initial weights equal those of the whole model, which is never held."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.runtime.materialize import InitialStateError, materialize
from auto3d.runtime.memory import PeakMemory
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


def test_no_rank_holds_more_than_its_own_stage():
    """Beside its own weights a rank holds one foreign tensor while it draws it."""
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
    """One initial weight is computed from another, by ``tie``."""

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
def test_a_weight_made_from_a_foreign_one_is_refused_unless_it_is_given(tie):
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
def test_weights_that_are_made_over_and_over(build):
    """Deep copies of a layer that is then thrown away, initialisation by algebra, and another type."""
    torch.manual_seed(3)
    whole = dict(build().named_parameters())
    for part in range(2):
        own = list(whole)[part::2]
        made = materialize(build, own, seed=3)
        assert all(torch.equal(made[name], whole[name]) for name in own)


def test_state_dict_wins_and_must_fit():
    build, _ = MODELS["gpt2"]
    name = "transformer.h.1.mlp.c_fc.weight"
    state = {name: torch.full((32, 128), 0.5)}
    assert torch.equal(materialize(build, [name], seed=1, state=state)[name], state[name])
    with pytest.raises(InitialStateError, match=r"c_fc.bias is missing"):
        materialize(build, ["transformer.h.1.mlp.c_fc.bias"], seed=1, state=state)
    with pytest.raises(InitialStateError, match=r"has shape \[3\], the model's has \[32, 128\]"):
        materialize(build, [name], seed=1, state={name: torch.zeros(3)})
