"""`auto3d yardstick`: the table, the pages, programs, and errors in one line."""

import sys
from pathlib import Path
from shlex import join

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "yardstick_predictor.py"
SMALL = ("--set", "t4x16-gpt2", "--set", "trace_dp2_pp4")


@pytest.mark.soak
def test_the_table_and_the_pages_of_a_small_set(auto3d, folder):
    """Measured layers need no capture. A second run gives the same bytes."""
    command = ["yardstick", *SMALL, "--program", join([sys.executable, str(EXAMPLE)]), "--out"]
    printed = auto3d(*command, "first")
    lines = [line.split() for line in printed.out.splitlines() if line.startswith(("t4x16", "trace"))]
    rows = {words[1]: words for words in lines}
    assert set(rows) == {
        "auto3d-simulated", "auto3d-amp", "auto3d-chimera", "amp", "chimera", "textbook", "yardstick_predictor.py",
        "simulator",
    }  # fmt: skip
    assert rows["auto3d-simulated"][2] == "47"
    assert float(rows["auto3d-simulated"][3]) < 9  # per cent of time
    assert rows["simulator"][2:5] == ["32", "0.18", "%"]
    assert "OOM precision: share of the runs predicted not to fit" in printed.out
    assert "t4x16-gpt2: auto3d-amp" in printed.err  # progress
    auto3d(*command, "second")
    files = sorted(file.name for file in Path("first").iterdir())
    assert files == ["README.md", "t4x16-gpt2.png"]
    for name in files:
        assert Path("first", name).read_bytes() == Path("second", name).read_bytes()
    page = Path("first", "README.md").read_text()
    assert "AMP (Li et al., NeurIPS 2022), released results; licence:" in page
    assert "| trace_dp2_pp4 | 32" in page


def test_a_list(auto3d, folder):
    kinds = [line.split("\t")[:2] for line in auto3d("yardstick", "--list").out.splitlines()]
    assert ["set", "h100-llama"] in kinds
    assert ["predictor", "textbook"] in kinds


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--set", "h200"], "--set: 'h200' is not known; there are t4x16-gpt2, a100-node"),
        (["--predictor", "oracle"], "--predictor: 'oracle' is not known; there are auto3d-simulated"),
        ([*SMALL, "--predictor", "textbook", "--program", "./none"], "--program: ./none on t4x16-gpt2: it cannot be"),
        ([*SMALL, "--timeout", "0"], "0.0 is not in the range x>0"),
    ],
)
def test_errors_are_one_line(auto3d, folder, arguments, problem):
    printed = auto3d("yardstick", *arguments, code=2)
    assert printed.out == ""
    assert problem in printed.err.splitlines()[-1]
