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


MIXED = ["cluster.more=[{nodes: 1, devices_per_node: 1, accelerator: T4}]"]


def recipe_of(folder, rows, head=HEAD, overrides=()):
    file = folder / "layers.csv"
    file.write_text("\n".join([head, *rows]))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(file=file))
    return load(str(recipe), list(overrides))


def test_a_training_takes_the_measured_passes_and_updates(tmp_path):
    """Two micro-batches of 4 samples: 2 × (0.2 + 0.6 + 0.4 + 1.2) and an update of 0.04."""
    recipe = recipe_of(tmp_path, ROWS)
    row = {"micro_batch_size": "4", "tp": "1", "dp": "1", "pp": "1"}
    (found,) = predict(recipe, [row])
    host = 2 * 3440e-6 + 1e-6  # the A100's time for each micro-batch and each iteration
    assert found.seconds == pytest.approx(4.8 + 0.04 + host)
    assert not subject_of(recipe).work(4).exchanges
    assert cost_model(recipe, subject_of(recipe)).cluster.accelerator(0).update_s == pytest.approx(0.04 / 40)


def test_each_kind_of_device_takes_its_own_passes_and_updates(tmp_path):
    """A T4 takes ten times as long as an A100: a pipeline of both takes what its stage on the T4 takes, and more."""
    slow = [",".join([*row.split(",")[:3], *(f"{10 * float(each):g}" for each in row.split(",")[3:])]) for row in ROWS]
    rows = [f"{row},a100-80gb" for row in ROWS] + [f"{row},T4" for row in slow]
    row = {"micro_batch_size": "2", "tp": "1", "dp": "1", "pp": "2", "partition_cuts": "[0, 1, 2]"}
    seconds = {}
    for name, overrides in {"A100": [], "A100 and T4": ["cluster.devices_per_node=1", *MIXED]}.items():
        recipe = recipe_of(tmp_path, rows, f"{HEAD},device", overrides)
        (found,) = predict(recipe, [row])
        seconds[name] = found.seconds
    model = cost_model(recipe, subject_of(recipe))
    first, second = map(model.cluster.accelerator, (0, 1))
    assert (second.name, second.update_s) == ("T4", pytest.approx(10 * first.update_s))
    # Four micro-batches wait for the second layer, with passes of 0.3 s and 0.6 s on an A100. Then the first layer has
    # a backward and its update, 0.2 s and 0.01 s, while the second has its update, 0.03 s on an A100.
    assert seconds["A100"] == pytest.approx(0.1 + 4 * 0.9 + 0.2 + 0.01, abs=0.02)
    assert seconds["A100 and T4"] == pytest.approx(0.1 + 4 * 9 + 0.3, abs=0.02)


def test_an_accelerator_under_a_system_takes_the_rows_of_its_device_where_it_has_none(tmp_path):
    own = [f"{each.replace('0.3,0.6', '0.1,0.2')},H100-80GB-nanotron" for each in ROWS]
    accelerator = ["cluster.accelerator=H100-80GB-nanotron"]
    row = {"micro_batch_size": "2", "tp": "1", "dp": "1", "pp": "1"}
    seconds = []
    for name, more in {"without": [], "with": own}.items():
        (folder := tmp_path / name).mkdir()
        rows = [f"{each},H100-80GB" for each in ROWS] + more
        (found,) = predict(recipe_of(folder, rows, f"{HEAD},device", accelerator), [row])
        seconds.append(found.seconds)
    assert seconds == pytest.approx([4 * 1.2 + 0.04, 4 * 0.6 + 0.04], abs=0.01)


@pytest.mark.parametrize(
    ("rows", "head", "overrides", "words"),
    [
        (
            ROWS[:3],
            HEAD,
            [],
            "model.layer_sizes: found sizes of 2 layers; .*layers.csv has 1 on A100-80GB at tp 1 and "
            "micro_batch_size 4",
        ),
        (ROWS, HEAD.replace("update_s", "other"), [], "it must have the columns model, .* or micro_batch_size, "),
        (ROWS, HEAD, MIXED, "which has no column 'device'; it must say of which each row is: A100-80GB, T4"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, rows, head, overrides, words):
    with pytest.raises(RecipeError, match=words):
        subject_of(recipe_of(tmp_path, rows, head, overrides))
