"""Products in 8 bits, by hand: those of the blocks' weights alone, with the casts of their operands."""

import numpy as np
import pytest

from auto3d.cluster import Accelerator
from auto3d.cost.times import times_of
from auto3d.cost.work import work_of
from auto3d.partition.merak import shard
from auto3d.share import Share
from launch.model.costs import cost_model, subject_of
from launch.recipe.error import RecipeError
from launch.recipe.load import load
from launch.recipe.settings import cluster
from launch.recipe.shipped import RECIPES
from tests.cost.test_model import captured_gpt2

LAYERS, HIDDEN, SAMPLES = 2, 64, 2


def test_a_block_has_four_products_in_float8_whose_operands_are_cast():
    """A block's inputs are 7 hidden sizes wide, its outputs 9, its weights 12 of their squares. 6 bytes an element."""
    graph = captured_gpt2(layers=LAYERS, hidden=HIDDEN, samples=SAMPLES)
    length = graph.inputs["input_ids"].shape[1]
    half, low = (work_of(graph, shard(graph).bounds, precision="bfloat16", float8=each) for each in (False, True))
    elements = LAYERS * SAMPLES * length * HIDDEN
    assert not half.float8_flops.any()
    assert low.float8_flops.sum() == 24 * elements * HIDDEN
    assert (low.moved - half.moved).sum() == pytest.approx(6 * 7 * elements)
    assert (low.backward_moved - half.backward_moved).sum() == pytest.approx(6 * 9 * elements)
    assert (low.launches - half.launches).sum() == (low.backward_launches - half.backward_launches).sum() == 8 * LAYERS
    assert (low.fixed - half.fixed).sum() == 2 * 12 * LAYERS * HIDDEN**2
    for same in ("flops", "backward_flops", "saved", "parameters", "crossing"):
        assert (getattr(low, same) == getattr(half, same)).all(), same


def test_only_these_products_run_at_the_peak_of_float8():
    graph = captured_gpt2(layers=LAYERS, hidden=HIDDEN, samples=SAMPLES)
    half, low = (work_of(graph, shard(graph).bounds, precision="bfloat16", float8=each) for each in (False, True))
    device = Accelerator(memory_bandwidth=1e30, half_flops=0.0, float8_flops=2 * 20e12)
    before, after = (times_of(work, device) for work in (half, low))
    rate = 20e12 * device.matrix_efficiency
    saved = np.cumsum(low.float8_flops) / rate / 2
    assert before.forward[1:] - after.forward[1:] == pytest.approx(saved)
    assert before.backward[1:] - after.backward[1:] == pytest.approx(2 * saved)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_recipe_predicts_float8_and_nothing_runs_it(tp: int):
    """Under tensor parallelism each rank has an equal part of the same products."""
    keys = ["cluster.accelerator=H100-80GB", "cluster.device=cuda", "plan.micro_batch_size=2"]
    low = subject_of(load("tiny", [*keys, "prediction.precision=float8"]))
    whole, rank = low.work(2), low.work(2, Share(tp=tp))
    assert rank.float8_flops.sum() == pytest.approx(whole.float8_flops.sum() / tp)
    assert whole.float8_flops.sum() > 0
    model = cost_model(load("tiny", [*keys, "prediction.precision=float8"]), low)
    assert model.cluster.accelerator(0).float8_flops == 1979e12
    with pytest.raises(RecipeError, match=r"training\.precision: found 'float8'"):
        load("tiny", ["training.precision=float8"])
    with pytest.raises(RecipeError, match=r"found 'float8'; .*T4\.yaml has no float8_tflops"):
        cluster(load("tiny", ["cluster.accelerator=T4", "prediction.precision=float8"]))
    with pytest.raises(RecipeError, match=r"found 'float8', but cluster\.accelerator is null"):
        cluster(load("tiny", ["prediction.precision=float8"]))


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        (
            "published/t4x16-gpt2.yaml",
            ["cluster.accelerator=L4"],
            "the layers of model.layers are known in the precision",
        ),
        ("tiny.yaml", ["prediction.profile=own.json", "cluster.accelerator=L4"], "no profile has times in float8"),
    ],
)
def test_times_that_were_measured_are_in_no_float8(name: str, keys: list[str], words: str):
    recipe = load(str(RECIPES / name), [*keys, "prediction.precision=float8"])
    with pytest.raises(RecipeError, match=f"prediction.*{words}"):
        cost_model(recipe, subject_of(recipe))
