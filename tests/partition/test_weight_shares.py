"""nanotron's partition against the layers of its published runs."""

from itertools import accumulate
from types import SimpleNamespace

import pytest

from auto3d.partition.methods.weight_shares import choose_stages
from auto3d.partition.outline import Outline
from auto3d.partition.stage import PartitionError


def layers_of(layers: int, head: float, stages: int) -> list[int]:
    """Blocks on each stage of an embedding, ``layers`` blocks, a norm and a head as heavy as ``head`` blocks."""
    flops = [0.0, *accumulate([0.0, *[1.0] * layers, 0.0, head])]
    outline = Outline(
        positions=range(layers + 4),
        flops=flops,
        weight_flops=flops,
        sent=[0.0] * (layers + 4),
        block_starts=range(1, layers + 2),
    )
    bounds = [stage.operations[0] for stage in choose_stages(SimpleNamespace(outline=outline, stages=stages))]
    assert [last for _, last in bounds[:-1]] == [first for first, _ in bounds[1:]]
    assert bounds[-1][1] == layers + 3
    return [min(max(last, 1), layers + 1) - min(max(first, 1), layers + 1) for first, last in bounds]


@pytest.mark.parametrize(
    ("layers", "head", "stages", "expected"),
    [
        (16, 4.0, 1, [16]),
        (16, 4.0, 2, [10, 6]),  # LLaMA 1.34B: a block that reaches its share ends the stage
        (16, 4.0, 4, [5, 5, 5, 1]),
        (16, 4.0, 8, [3, 2, 3, 2, 3, 2, 1, 0]),
        (28, 3.56, 2, [16, 12]),  # LLaMA 3.57B
        (28, 3.56, 8, [4, 4, 4, 4, 4, 4, 4, 0]),
        (28, 3.56, 16, [*[2] * 14, 0, 0]),
    ],
)
def test_stages_end_with_the_block_that_completes_their_share(layers, head, stages, expected):
    assert layers_of(layers, head, stages) == expected


def test_too_many_stages_are_refused_with_how_many_the_blocks_fill():
    with pytest.raises(PartitionError, match="32 stages, but 28 repeated blocks and the head fill 29"):
        layers_of(28, 3.56, 32)
