"""The figures of accelerators that come from published times of single layers still give those times."""

import csv

import pytest

from auto3d.cost.times import times_of
from launch.model.costs import subject_of
from launch.model.measured_layers import published
from launch.recipe.load import load
from launch.recipe.settings import cluster

SAMPLES = 16  # a micro-batch that fills the device, so that no host's launches bound it

RECIPE = """
model:
  architecture: BertForPreTraining
  config:
    num_hidden_layers: {layers}
    hidden_size: 1024
    intermediate_size: 4096
    num_attention_heads: 16
    vocab_size: 64
data:
  source: synthetic
  sequence_length: 128
  vocabulary_size: 64
  inputs: {{input_ids: {{kind: tokens}}, labels: {{kind: tokens}}, next_sentence_label: {{kind: integers}}}}
cluster: {{device: cuda}}
prediction: {{attention: unfused}}
"""


def test_figures_from_published_layers_give_their_times(tmp_path):
    """Forward and backward of a layer of BERT-large are within 10 % of PipeFisher's on each device."""
    file = tmp_path / "layers.yaml"
    seconds: dict[str, list[float]] = {"P100-16GB": [], "V100-16GB": [], "V100-32GB": []}
    for layers in (1, 2):
        file.write_text(RECIPE.format(layers=layers))
        recipe = load(str(file))
        work = subject_of(recipe).work(SAMPLES)
        for name, found in seconds.items():
            kind = cluster(recipe.changed([f"cluster.accelerator={name}"])).accelerator(0)
            times = times_of(work, kind)
            found.append(float(times.forward[-1] + times.backward[-1]))
    for name, (one, two) in seconds.items():
        assert 1e3 * (two - one) == pytest.approx(_measured_ms(name.split("-")[0]), rel=0.1), name


def _measured_ms(device: str) -> float:
    with published("layer_profiles.csv").open(newline="") as lines:
        (row,) = [
            row
            for row in csv.DictReader(lines)
            if (row["model"], row["device"], row["micro_batch"]) == ("bert-large", device, str(SAMPLES))
        ]
    return float(row["forward_ms"]) + float(row["backward_ms"])
