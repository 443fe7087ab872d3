"""Models that are shipped in recipes/models/ have as many parameters as their publications say."""

import json
from pathlib import Path

import pytest
import torch

from launch.model.build import build_function
from launch.model.config_keys import OF_CHECKPOINTS
from launch.recipe.load import load
from launch.recipe.shipped import RECIPES

PUBLISHED = json.loads(Path(__file__).with_name("published_configurations.json").read_text())  # config.json of each
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
PUBLIC = {  # as PARAMETERS; those of recipes/public/
    "deepseek-v3": 671_026,
    "gemma3-12b": 11_766,
    "gpt-oss-20b": 20_910,
    "llama3-405b": 405_850,
    "mixtral-8x7b": 46_700,
    "phi4": 14_660,
    "qwen3-30b-a3b": 30_530,
    "qwen3-8b": 8_190,
    "whisper-large": 1_543,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shipped_model_has_the_published_size(name: str):
    recipe = load("tiny", [f"model={name}", *(IMAGES if name.startswith("vit") else [])])
    with torch.device("meta"):
        model = build_function(recipe)()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(PARAMETERS[name] * 1e6, rel=2e-3)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_recipe_has_the_published_size_and_configuration(name: str):
    """The configuration is what transformers makes of the published file."""
    with torch.device("meta"):
        model = build_function(load(f"public/{name}"))()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(PUBLIC[name] * 1e6, rel=1e-3)
    published = PUBLISHED[name]["config"]
    published = published.get("text_config", published)
    kept = {key: value for key, value in published.items() if key not in OF_CHECKPOINTS}
    expected = type(model.config).from_dict({**kept, "use_cache": False}).to_dict()
    found = model.config.to_dict()
    assert found == {key: value for key, value in expected.items() if key in found}


def test_there_is_a_recipe_for_each_public_model():
    assert {file.stem for file in RECIPES.glob("public/*.yaml")} == PUBLIC.keys() == PUBLISHED.keys()


@pytest.mark.parametrize(
    ("name", "parameters", "unused"), [("bert-48", 669_790_012, 30_522), ("gpt2-64", 1_389_327_360, 0)]
)
def test_chimeras_models_have_its_counts(name: str, parameters: int, unused: int):
    """Table 4 counts each parameter. The head of BERT has a second bias here, of one element per word."""
    with torch.device("meta"):
        model = build_function(load("tiny", [f"model={name}"]))()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters + unused
