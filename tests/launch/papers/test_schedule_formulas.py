"""Chimera's tables 2 and 3: the formulas at numbers worked by hand, and our schedules beside them."""

import pytest

from launch.papers.experiments.schedule_formulas import PARAMETERS, SAVED, schedule_formulas
from launch.papers.row import Row


def rows(table: int) -> dict[tuple[str, str], Row]:
    """(scheme, formula or ours) -> row, at D = N = 8."""
    return {
        (row.setting[1], row.system): row for row in schedule_formulas(tell=lambda line: None, table=table, depths=[8])
    }


@pytest.mark.parametrize(
    ("table", "scheme", "bubble", "weights", "activations"),
    [
        (2, "GPipe", 7 / 15, (1, 1), (8, 8)),
        (2, "DAPPLE", 7 / 15, (1, 1), (1, 8)),
        (2, "Chimera, B = F", 6 / 22, (2, 2), (5, 8)),
        (2, "PipeDream", 0, (1, 8), (1, 8)),
        (2, "PipeDream-2BW", 0, (2, 2), (1, 8)),
        (3, "4 pipelines", 4 / 36, (4, 4), (7, 8)),
        (3, "8 pipelines", 0, (8, 8), (8, 8)),
    ],
)
def test_formulas_and_schedules_have_the_numbers_of_the_table(table, scheme, bubble, weights, activations):
    found = rows(table)
    for system in ("formula", "ours"):
        values = found[scheme, system].values
        assert values["bubble"] == pytest.approx(bubble, abs=1e-12)
        assert (values["weights_least"], values["weights_most"]) == weights
        assert (values["activations_least"], values["activations_most"]) == activations
    models = {"Chimera, B = F": 2, "4 pipelines": 4, "8 pipelines": 8}.get(scheme, 1)
    hand = PARAMETERS * (4 * weights[1] + 12 * models) + 4 * SAVED * activations[1]
    for system in ("formula", "ours"):
        assert found[scheme, system].values["peak_mib"] == pytest.approx(hand / 2**20)


def test_the_bubbles_of_gems_approach_its_formula():
    """At N = 8 it idles (2 N + 1) (D - 1) = 119 beside 24 of work; the formula is the limit 7 / 8.5."""
    found = rows(2)
    assert found["GEMS", "ours"].values["bubble"] == pytest.approx(119 / 143)
    assert found["GEMS", "formula"].values["bubble"] == pytest.approx(7 / 8.5)
