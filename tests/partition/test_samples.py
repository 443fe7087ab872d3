"""Where samples are in a value: what a model makes of half a micro-batch is that half of what it makes of the whole."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from auto3d.capture.export import InputSpec
from auto3d.capture.model import CapturedModel, capture
from auto3d.data import Batches
from auto3d.partition.samples import made_from_samples, sample_dimensions
from auto3d.partition.segment import segments
from auto3d.partition.stage import cut
from auto3d.plan import stages_between
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.program import segment_program
from tests.models import MODELS, captured
from tests.soak import soak

CPU = torch.device("cpu")
SIZE = 4


class SequenceFirst(nn.Module):
    """Its attention flattens [sequence, batch] to one dimension: the samples are then not in slices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        sequence_first = features.transpose(0, 1)
        return self.layer(sequence_first, sequence_first, sequence_first)[0].square().mean()


def values_of(model: CapturedModel, module: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All values of the graph, run as one stage."""
    names = [value.name for node in model.graph.nodes for value in node.outputs]
    (stage,) = cut(model.graph, stages_between([0, len(model.graph.nodes)]))
    randomness = Randomness(1, first_micro_batch=0, micro_batches=1, device=CPU)
    (whole,) = segments(model.graph, stage, stages_between([0, len(model.graph.nodes)])[0].operations)
    whole = replace(whole, gives=tuple(names))
    program, _, _ = segment_program(whole, model, randomness=randomness)
    tensors = {**model.exported.constants, **dict(module.named_buffers()), **dict(module.named_parameters())}
    with torch.no_grad():
        made = program(*(tensors[name] for name in whole.state), *(inputs[name] for name in whole.takes))
    return dict(zip(names, made, strict=True))


def compare(whole: CapturedModel, part: CapturedModel, inputs: dict[str, torch.Tensor]) -> int:
    """Checks every value that can be split or is alike in all parts; returns how many are neither."""
    dimensions, from_samples = sample_dimensions(whole.graph, part.graph), made_from_samples(whole.graph)
    torch.manual_seed(1)
    module = whole.exported.build()
    all_values = values_of(whole, module, inputs)
    count, size = SIZE // part.graph.micro_batch_size, part.graph.micro_batch_size
    parts = [
        values_of(part, module, {name: value[i * size : (i + 1) * size] for name, value in inputs.items()})
        for i in range(count)
    ]
    others = 0
    for name, value in all_values.items():
        if whole.graph.nodes[whole.graph.producer[name]].from_inputs:
            continue  # is not sent; each part makes its own, and may number its samples from 0
        if name in dimensions:
            expected = value.chunk(count, dimensions[name])
        elif name not in from_samples:
            expected = [value] * count
        else:
            others += 1
            continue
        for mine, theirs in zip(parts, expected, strict=True):
            assert mine[name].shape == theirs.shape, name
            assert torch.allclose(mine[name].double(), theirs.double(), rtol=1e-4, atol=1e-5), name
    return others


MODELS_OF_SAMPLES = ("gpt2", "bert", "bert-pretraining", "t5", "llama", "vit", "swin")


@pytest.mark.parametrize(
    ("model", "parts"),
    [*product(MODELS_OF_SAMPLES, [2]), ("t5", 4), *soak(*((model, 4) for model in MODELS_OF_SAMPLES if model != "t5"))],
)
def test_values_of_a_part_are_parts_of_the_values(model, parts):
    data = MODELS[model][1]
    whole, part = captured(model, SIZE), captured(model, SIZE // parts)
    inputs = Batches(data, seed=1, global_batch=SIZE, micro_batch_size=SIZE).micro_batch(0, 0, tuple(data.inputs))
    losses = 3 if model == "bert-pretraining" else 1
    assert compare(whole, part, inputs) == losses, "nothing else of these models is made of several samples"
    assert whole.graph.loss not in sample_dimensions(whole.graph, part.graph)
    assert whole.graph.loss in made_from_samples(whole.graph)


def test_the_position_bias_of_t5_is_made_from_weights():
    """It crosses stages, and is the same in all replicas."""
    graph, smaller = captured("t5", 4).graph, captured("t5", 2).graph
    bounds = [0, *range(40, len(graph.nodes), 40), len(graph.nodes)]
    crossing = {transfer.value.name for stage in cut(graph, stages_between(bounds)) for transfer in stage.received}
    alike = crossing - made_from_samples(graph) - sample_dimensions(graph, smaller).keys()
    assert [graph.value(name).shape for name in sorted(alike)] == [(1, 2, 32, 32)] * 2, "the encoder's, the decoder's"


def test_samples_in_another_order_are_not_taken_for_slices():
    whole = capture(SequenceFirst, {"features": InputSpec(shape=(6, 8), dtype=torch.float32)}, SIZE)
    part = whole.at(2)
    inputs = {"features": torch.randn(SIZE, 6, 8)}
    compare(whole, part, inputs)
    flat = [v.name for node in whole.graph.nodes for v in node.outputs if v.shape[:1] == (6 * SIZE,)]
    assert flat
    assert set(flat).isdisjoint(sample_dimensions(whole.graph, part.graph))
    assert any(v.shape == (6, SIZE, 8) for node in whole.graph.nodes for v in node.outputs)


def test_what_gathers_samples_is_made_from_them():
    """A loss kept in a buffer, a moving average: no input is read, and yet they differ between replicas."""
    graph = captured("averaging", 4).graph
    assert {node.name for node in graph.nodes if "average" in node.state} <= made_from_samples(graph)
