"""The captures that the tests of the Trainer share are equal to new ones, and are shared where nothing differs."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from auto3d.capture.empty import empty_model
from auto3d.capture.export import TRAINING, InputSpec, Mode
from auto3d.capture.model import capture
from auto3d.trainer.instance import build_of
from auto3d.trainer.own_loss import with_loss
from tests.trainer.captures import _HERE, OtherCodeError, shared_capture, traits_of

SIZES = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
INPUTS = {name: InputSpec(shape=(4,), dtype=torch.int64) for name in ("input_ids", "labels")}


def llama(**sizes):
    return LlamaForCausalLM(LlamaConfig(**SIZES | sizes))


def frozen(model):
    model.model.requires_grad_(False)


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def of_another_epsilon(model):
    model.model.norm.variance_epsilon = 0.5


def of_another_activation(model):
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()


def hooked(model):
    model.model.norm.register_forward_hook(lambda module, inputs, output: output * 2)


def hooked_gradient(model):
    model.lm_head.weight.register_hook(lambda gradient: gradient * 0)


def replaced(model):
    forward = model.forward
    model.forward = lambda **inputs: forward(**inputs)


SCALE = 2.0


class Scaled(torch.nn.Module):
    def forward(self, input_ids, labels):
        return scaled_in_place(input_ids)


def scaled_in_place(x):
    return [value * SCALE for value in (x,)]


def of_a_variable(model):
    model.scaled = Scaled()


def by_a_function(model):
    model.scale = scaled_in_place


def traits(model):
    return repr(traits_of(empty_model(build_of(model), "cpu").module))


@pytest.mark.parametrize("mode", [TRAINING, Mode(training=False, outputs=("logits",))])
def test_a_shared_capture_is_equal_to_a_new_one(mode):
    new, made = (function(build_of(llama()), INPUTS, 2, mode=mode) for function in (capture, shared_capture))
    again = shared_capture(build_of(llama()), INPUTS, 2, mode=mode)
    assert again.exported.program is made.exported.program
    _HERE.clear()
    loaded = shared_capture(build_of(llama()), INPUTS, 2, mode=mode)
    assert loaded.exported.program is not made.exported.program
    for each in (made, again, loaded):
        assert each.exported.fingerprint == new.exported.fingerprint
        assert each.graph == new.graph
        assert (each.exported.mode, each.exported.outputs) == (mode, new.exported.outputs)
    evaluated = (each.in_evaluation(("logits",)) for each in (new, loaded))
    assert len({each.exported.fingerprint for each in evaluated}) == 1


@pytest.mark.parametrize("change", [frozen, tied, of_another_epsilon, of_another_activation])
def test_a_model_that_differs_has_other_traits(change):
    model = llama()
    before = traits(model)
    assert before == traits(llama())
    change(model)
    assert traits(model) != before


def test_constants_of_each_call_are_traits():
    builds = [with_loss(build_of(llama()), None, constants={"scale": scale}) for scale in (1.0, 1.0, 2.0)]
    first, same, other = (repr(traits_of(empty_model(build, "cpu").module)) for build in builds)
    assert first == same
    assert first != other


@pytest.mark.parametrize("change", [hooked, hooked_gradient, replaced, of_a_variable, by_a_function])
def test_other_code_is_captured_each_time(change):
    model = llama()
    change(model)
    with pytest.raises(OtherCodeError):
        traits(model)
