"""Predictions of published iterations stay as they are; `auto3d yardstick` predicts all of them.

Whoever changes one on purpose also runs `auto3d yardstick --out results/published`, and commits its new figures.
"""

import re

import pytest

from launch.model.measured_layers import PUBLISHED
from launch.model.predictions import predict
from launch.recipe.load import load
from launch.recipe.shipped import RECIPES
from tests.soak import soak

A100 = {"training.global_batch": "8", "model.config.n_embd": "1024", "model.config.n_layer": "16"}
MEGATRON = {"training.global_batch": "512", "model.config.n_embd": "2304", "model.config.n_layer": "24"}
ROWS = [  # recipe, degrees, keys of the recipe, predicted s; measured: 0.1857, 0.1162, 3.53 and 1.41 s
    *soak(("a100-node", {"micro_batch_size": "1", "tp": "1", "dp": "1", "pp": "4"}, A100, 0.182735)),
    ("a100-node", {"micro_batch_size": "2", "tp": "4", "dp": "2", "pp": "1"}, A100, 0.118440),
    ("megatron-sc21", {"micro_batch_size": "16", "tp": "1", "dp": "32", "pp": "1"}, MEGATRON, 3.05974),
    (
        "t4x16-gpt2",
        {"micro_batch_size": "2", "tp": "1", "dp": "4", "pp": "4", "partition_cuts": "[0,9,15,21,30]"},
        {},
        1.39317,
    ),
]


@pytest.mark.parametrize(("name", "degrees", "keys", "seconds"), ROWS)
def test_predictions_of_published_iterations_do_not_drift(name, degrees, keys, seconds):
    recipe = load(str(RECIPES / "published" / f"{name}.yaml"))
    (row,) = predict(recipe, [degrees | keys])
    assert row.seconds == pytest.approx(seconds, rel=1e-3)


def test_megatron_lm_of_the_published_iterations_had_no_flash_attention():
    """With the kernel that torch picks on a GPU, the same iteration moves fewer bytes and is predicted faster."""
    seconds = []
    for overrides in ([], ["prediction.attention=auto"], []):
        recipe = load(str(RECIPES / "published" / "a100-node.yaml"), overrides)
        keys = A100 | {"model.config.n_layer": "2"}
        (row,) = predict(recipe, [{"micro_batch_size": "4", "tp": "1", "dp": "1", "pp": "1", **keys}])
        seconds.append(row.seconds)
    unfused, one_kernel, again = seconds
    assert one_kernel < 0.95 * unfused
    assert again == unfused  # the cache keeps both Graphs


def test_every_published_file_has_its_source_beside_it():
    files = {file.name for file in PUBLISHED.glob("*.csv*")}
    rows = re.findall(r"^\| `(\S+\.csv\S*)` \| .+ \| (.+) \|$", (PUBLISHED / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == files
    assert all(re.search(r"\(.*20\d\d\)|repository", source) for _, source in rows)
