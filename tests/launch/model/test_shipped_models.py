"""Models that are shipped in recipes/models/ have as many parameters as their publications say."""

import pytest
import torch

from launch.model.build import build_function
from launch.recipe.load import load

IMAGES = ["data.inputs={pixel_values: {kind: normal, shape: [3, 224, 224]}, labels: {kind: integers, high: 1000}}"]
PARAMETERS = {  # name -> millions of parameters. Merak and Megatron-LM print those of their GPTs with two digits
    "gpt-1.4b": 1440,
    "gpt-2.5b": 2490,
    "gpt-8.3b": 8310,
    "gpt-20b": 19550,
    "gpt2-xl": 1558,
    "gpt3-175b": 174600,
    "llama3-70b": 70550,
    "llama3-8b": 8030,
    "t5-11b": 11310,
    "vit-22b": 21740,
    "vit-h14": 632.0,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shipped_model_has_the_published_size(name: str):
    recipe = load("tiny", [f"model={name}", *(IMAGES if name.startswith("vit") else [])])
    with torch.device("meta"):
        model = build_function(recipe)()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(PARAMETERS[name] * 1e6, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "parameters", "unused"), [("bert-48", 669_790_012, 30_522), ("gpt2-64", 1_389_327_360, 0)]
)
def test_chimeras_models_have_its_counts(name: str, parameters: int, unused: int):
    """Table 4 counts each parameter. The head of BERT has a second bias here, of one element per word."""
    with torch.device("meta"):
        model = build_function(load("tiny", [f"model={name}"]))()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters + unused
