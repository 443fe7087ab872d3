"""Memory of published runs of other systems: the predictions of rows that no parameter was fitted to."""

import csv
import json
from collections.abc import Mapping

import pytest

from launch.model.measured_layers import published
from launch.model.predictions import plan_rows
from launch.recipe.load import load
from launch.recipe.shipped import RECIPES
from tests.soak import soak

MIB, GIB = 2**20, 2**30


def predicted(name: str, row: Mapping[str, str]) -> tuple[float, ...]:
    """Bytes on each pipeline device, for a row of the recipe's file of measurements."""
    recipe = load(str(RECIPES / "published" / f"{name}.yaml"))
    renamed = recipe.values.prediction.columns
    (planned,) = plan_rows(recipe, [{renamed.get(key, key): value for key, value in row.items()}])
    assert planned.plan is not None, planned.problem
    return planned.model.memory.of(planned.plan)


def test_every_rank_of_megatron_lm_on_b200():
    """Eight ranks of two set-ups: SimuMax, which models this system alone, is 0.06 to 1.4 % off."""
    with published("b200_llama70b_ranks.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))[:2]
    errors = []
    for row in rows:
        stages = predicted("b200-llama70b", row)
        measured = json.loads(row["max_allocated_mb_by_rank"])
        each = len(measured) // len(stages)
        errors += [stages[rank // each] / MIB / value - 1 for rank, value in enumerate(measured)]
    assert len(errors) == 16
    assert max(map(abs, errors)) < 0.005


@pytest.mark.parametrize(
    ("model", "degrees", "error"),
    [  # measured 48.10 and 16.24 GiB
        *soak(("3.57B", {"dp": 32, "pp": 1, "tp": 1, "zero": 1, "micro_batch": 1}, -0.033)),
        ("1.34B", {"dp": 64, "pp": 2, "tp": 1, "zero": 1, "micro_batch": 1}, -0.050),
    ],
)
def test_first_rank_of_nanotron_on_h100(model, degrees, error):
    with published("h100_llama_trials.csv").open(newline="") as lines:
        (row,) = (
            row
            for row in csv.DictReader(lines)
            if row["model"] == model and all(int(row[key]) == value for key, value in degrees.items())
        )
    first, *_ = predicted("h100-llama", row)
    assert first / GIB / float(row["memory_gb"]) - 1 == pytest.approx(error, abs=0.002)
