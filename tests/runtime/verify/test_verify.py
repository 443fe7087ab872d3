"""The check of a capture: ordinary models pass; what differs only in numbers is refused with its location."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.compiler import is_compiling, is_exporting  # bound here, so that a capture cannot answer them
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

from auto3d.capture.errors import CaptureError
from auto3d.capture.model import capture
from auto3d.runtime.verify.eager import check_against_eager
from tests import processes
from tests.models import FEATURES, MODELS, TEXT, TRAINED, captured
from tests.soak import soak

check = partial(check_against_eager, seed=3, device=torch.device("cpu"))


KINDS = (*MODELS, "t5-dropout", "resnet-transformers", "twins", "two-losses", "gpt2@bfloat16", "averaging@bfloat16")


@pytest.mark.parametrize("model", [*KINDS, *soak(*(model for model in TRAINED if model not in KINDS))])
def test_ordinary_models_equal_the_eager_module(model):
    """Including dropout, for which both draw the same numbers."""
    check(captured(model, 2), TRAINED[model][1])


def test_a_model_that_asks_whether_it_is_traced_gets_the_answer_no():
    """PaliGemma without token_type_ids makes another mask if it is traced."""
    check(capture(paligemma, TEXT.input_specs(), 2), TEXT)


class Sparse(nn.Module):
    """A model whose module has sparse gradients, and whose program has those of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, input_ids, labels):
        return nn.functional.cross_entropy(self.head(self.embed(input_ids)).flatten(0, 1), labels.flatten() % 2)


def test_sparse_gradients_equal_those_of_all_rows():
    check(capture(Sparse, TEXT.input_specs(), 2), TEXT)


PLACE = "test_verify.py, line"


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 4), nn.Linear(4, 4)

    def scaled(self, hidden):
        raise NotImplementedError

    def forward(self, features, label):
        return nn.functional.cross_entropy(self.second(self.scaled(self.first(features))), label)


class Compiled(Base):
    """A model whose output differs by a thousandth if it is traced."""

    def scaled(self, hidden):
        if is_compiling():
            return hidden * 1.001
        return hidden


class HalfTrained(Base):
    """A model that keeps a layer's gradient only if it is traced."""

    def scaled(self, hidden):
        return hidden if is_exporting() else hidden.detach()


class Counts(Base):
    """A model that keeps state in a Python module without any of its classes, which capture does not inspect."""

    def scaled(self, hidden):
        processes.steps = getattr(processes, "steps", 0) + 1
        return hidden * processes.steps


def paligemma() -> PaliGemmaForConditionalGeneration:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    text = {"model_type": "gemma", "vocab_size": 256, "head_dim": 16, "num_key_value_heads": 2, "use_cache": False}
    vision = {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, "vision_use_head": False}
    more = {"image_token_index": 255, "projection_dim": 32, "hidden_size": 32}
    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(text_config=text | sizes, vision_config=vision | sizes, **more)
    )


@pytest.mark.parametrize(
    ("build", "data", "words"),
    [
        (
            Compiled,
            FEATURES,
            ["the loss differs by", "takes another branch while it is traced", "test_verify.py, line"],
        ),
        (
            HalfTrained,
            FEATURES,
            ["first.weight", "in the captured program and none in the eager module", "test_verify"],
        ),
    ],
)
def test_behaviour_that_only_a_trace_has_is_refused_with_its_location(build, data, words):
    with pytest.raises(CaptureError) as refused:
        check(capture(build, data.input_specs(), 2), data)
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)
