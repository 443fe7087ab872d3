"""A stage's initial weights equal those of the whole model, which is never held."""

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
    """One initial weight is computed from another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.middle, self.right = (nn.Linear(4, 4) for _ in range(3))
        with torch.no_grad():
            self.right.weight.copy_(self.left.weight)


def test_a_weight_made_from_a_foreign_one_is_refused():
    assert torch.equal(*materialize(Twins, ["left.weight", "right.weight"], seed=1).values())
    with pytest.raises(InitialStateError, match="give a state dict"):
        materialize(Twins, ["right.weight"], seed=1)


def test_state_dict_wins_and_must_fit():
    build, _ = MODELS["gpt2"]
    name = "transformer.h.1.mlp.c_fc.weight"
    state = {name: torch.full((32, 128), 0.5)}
    assert torch.equal(materialize(build, [name], seed=1, state=state)[name], state[name])
    with pytest.raises(InitialStateError, match=r"c_fc.bias is missing"):
        materialize(build, ["transformer.h.1.mlp.c_fc.bias"], seed=1, state=state)
    with pytest.raises(InitialStateError, match=r"has shape \[3\], the model's has \[32, 128\]"):
        materialize(build, [name], seed=1, state={name: torch.zeros(3)})
