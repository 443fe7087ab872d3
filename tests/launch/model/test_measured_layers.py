"""Layers whose passes were measured: recipes with such a file, and what the file must hold."""

import pytest

from launch.model.costs import cost_model, subject_of
from launch.model.predictions import predict
from launch.recipe.error import RecipeError
from launch.recipe.load import load

RECIPE = """
model:
  layers: {file}
  layer_sizes: [{{parameters: 10, output: 1}}, {{parameters: 30, flops: 1.0e+6, output: 1}}]
cluster: {{nodes: 1, devices_per_node: 2, device: cuda, accelerator: A100-80GB}}
training: {{global_batch: 8}}
"""
HEAD = "micro_batch_size,tp,layer,forward_s,backward_s,update_s"
ROWS = ["2,1,1,0.3,0.6,0.02", "2,1,0,0.1,0.2,0.02", "4,1,0,0.2,0.4,0.02", "4,1,1,0.6,1.2,0.02"]


def recipe_of(folder, rows, head=HEAD):
    file = folder / "layers.csv"
    file.write_text("\n".join([head, *rows]))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(file=file))
    return load(str(recipe))


def test_a_training_takes_the_measured_passes_and_updates(tmp_path):
    """Two micro-batches of 4 samples: 2 × (0.2 + 0.6 + 0.4 + 1.2) and an update of 0.04."""
    recipe = recipe_of(tmp_path, ROWS)
    row = {"micro_batch_size": "4", "tp": "1", "dp": "1", "pp": "1"}
    (found,) = predict(recipe, [row])
    host = 2 * 3440e-6 + 1e-6  # the A100's time for each micro-batch and each iteration
    assert found.seconds == pytest.approx(4.8 + 0.04 + host)
    assert not subject_of(recipe).work(4).exchanges
    assert cost_model(recipe, subject_of(recipe)).cluster.accelerator(0).update_s == pytest.approx(0.04 / 40)


@pytest.mark.parametrize(
    ("rows", "head", "words"),
    [
        (
            ROWS[:3],
            HEAD,
            "model.layer_sizes: found sizes of 2 layers; .*layers.csv has 1 at tp 1 and micro_batch_size 4",
        ),
        (ROWS, HEAD.replace("update_s", "other"), "it must have the columns model, .* or micro_batch_size, "),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, rows, head, words):
    with pytest.raises(RecipeError, match=words):
        subject_of(recipe_of(tmp_path, rows, head))
