"""Every model of the zoo that runs in slices computes what the whole does; all others are refused."""

import pytest
import torch

from auto3d.capture.model import capture
from auto3d.derived.slices import sliced
from auto3d.errors import InputError
from auto3d.plan import PlanError
from auto3d.runtime.verify.slices import check_slices
from tests.zoo.__main__ import ENTRIES
from tests.zoo.entry import Entry

IN_SUITE = {"Qwen3ForCausalLM": True, "HandWrittenLSTM": False, "CpmAntForCausalLM": False}  # model -> whether it runs
REFUSALS = ("cannot run in slices of its sequence", "does not divide a sequence")


def check(entry: Entry) -> bool:
    """Whether the model of ``entry`` runs in 2 slices."""
    try:
        captured = capture(entry.build, entry.data.input_specs(), 2)
    except InputError:  # it cannot be captured
        return False
    try:
        model = sliced(captured, 2)
    except PlanError as error:
        if any(words in str(error) for words in REFUSALS):
            return False
        raise
    check_slices(model, entry.data, seed=3, device=torch.device("cpu"))
    return True


def test_models_of_the_suite():
    entries = {entry.name: entry for entry in ENTRIES}
    assert {name: check(entries[name]) for name in IN_SUITE} == IN_SUITE


@pytest.mark.soak
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_no_model_is_silently_wrong(entry):
    check(entry)
