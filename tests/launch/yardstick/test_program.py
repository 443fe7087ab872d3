"""External programs: what they read, what they may write, and how they may fail."""

import csv
import sys
from pathlib import Path
from shlex import join, quote

import pytest

from auto3d.errors import InputError
from launch.recipe.load import load
from launch.recipe.shipped import RECIPES
from launch.yardstick.case import case_of
from launch.yardstick.predictors import NOTHING, Predicted, PredictionRequest
from launch.yardstick.program import program
from launch.yardstick.sets.h100_llama import SET

EXAMPLE = Path(__file__).parents[3] / "examples" / "yardstick_predictor.py"
PYTHON = quote(sys.executable)  # the clone may be in a folder with a space in its name
COPY = "import csv, sys; rows = list(csv.DictReader(sys.stdin)); "


@pytest.fixture(scope="module")
def asked():
    recipe = load(str(RECIPES / "published" / "h100-llama.yaml"))
    row = {
        "model": "3.57B", "model.config.num_hidden_layers": "28", "model.config.hidden_size": "3072",
        "model.config.num_attention_heads": "32", "model.config.intermediate_size": "8192", "vocab": "131072",
        "tied": "1", "sequence": "4096", "cluster.nodes": "2", "gpus": "16", "dp": "2", "pp": "4", "tp": "2",
        "shard_optimizer": "1", "micro_batch_size": "2", "training.global_batch": "256", "run_ok": "1",
        "memory_gb": "40", "measured_s": "5",
    }  # fmt: skip
    return PredictionRequest(SET, recipe, tuple(SET.read(recipe, [row, {**row, "pp": "2", "dp": "4"}])))


def ask(asked, code, *, limit_s=30.0):
    one = program(f'{PYTHON} -c "{code}"', limit_s=limit_s)
    return one.predict(asked, lambda words: None)


def test_a_program_reads_the_run_and_its_answer_counts(asked, tmp_path):
    seen = tmp_path / "seen.csv"
    code = (
        f"import sys; text = sys.stdin.read(); open('{seen}', 'w').write(text); print('peak_bytes,id,seconds'); "
        "print('1e9 2e9 3e9 4e9,h100-llama-2,1.5'); print(',h100-llama-3,')"
    )
    assert ask(asked, code) == [Predicted(1.5, (1e9, 2e9, 3e9, 4e9)), NOTHING]
    with seen.open(newline="") as lines:
        first, _ = csv.DictReader(lines)
    expected = {
        "id": "h100-llama-2", "layers": "28", "hidden": "3072", "gated": "1", "tied": "1", "sequence": "4096",
        "nodes": "2", "devices_per_node": "8", "tp": "2", "dp": "2", "pp": "4", "micro_batch_size": "2",
        "global_batch": "256", "schedule": "1f1b", "zero": "1", "sequence_parallel": "1", "recompute": "none",
        "precision": "bfloat16", "system": "nanotron 0.5",
    }  # fmt: skip
    assert expected.items() <= first.items()
    assert float(first["outside_bandwidth"]) == asked.recipe.values.cluster.outside.gbit_per_s * 1e9 / 8
    assert float(first["peak_flops"]) == pytest.approx(989e12)


def test_the_example(asked):
    one = program(join([sys.executable, str(EXAMPLE)]), limit_s=30)
    assert one.name == "yardstick_predictor.py"
    for found, run in zip(one.predict(asked, lambda words: None), asked.runs, strict=True):
        case = case_of(asked.measured, asked.recipe, run)
        flops = 6 * run.sizes.parameters * 256 * 4096 / 16
        bubble = (case.pp - 1) / case.micro_batches
        assert found.seconds == pytest.approx(flops / (0.45 * 989e12) * (1 + bubble))
        assert found.peaks == (pytest.approx(18 * run.sizes.parameters / (case.tp * case.pp)),)


def test_a_run_without_a_row_has_no_prediction(asked):
    code = f"{COPY} print('id,seconds,peak_bytes'); print(rows[1]['id'] + ',2,7')"
    assert ask(asked, code) == [NOTHING, Predicted(2.0, (7.0,))]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print('id,time'); print('h100-llama-2,1')", "lacks the column seconds; it writes id, seconds, peak_bytes"),
        ("pass", "lacks the column id"),
        ("print('id,seconds,peak_bytes'); print('x,1,1')", "line 2 of its output has the id 'x' which is not in its"),
        (
            "print('id,seconds,peak_bytes'); print('h100-llama-2,1,1'); print('h100-llama-2,1,1')",
            "line 3 of its output has the id 'h100-llama-2' a second time",
        ),
        ("print('id,seconds,peak_bytes'); print('h100-llama-2,soon,1')", "has the seconds 'soon'; it takes numbers"),
        ("print('id,seconds,peak_bytes'); print('h100-llama-2,nan,1')", "has the seconds 'nan'; it takes numbers"),
        ("print('id,seconds,peak_bytes'); print('h100-llama-2,1 2,1')", "has the seconds '1 2'; it takes one number"),
        (
            "print('id,seconds,peak_bytes'); print('h100-llama-2,1,1 2 3')",
            "has 3 numbers as peak_bytes; it takes one number, or 4, one for each pipeline device",
        ),
        ("raise SystemExit(3)", "it ended with exit code 3: it wrote no error"),
        ("raise ValueError('no such schedule')", "it ended with exit code 1: ValueError: no such schedule"),
        ("import os; os.kill(os.getpid(), 9)", "it ended with signal 9"),
        ("import sys; sys.stdout.buffer.write(bytes([255]))", "its output is not UTF-8"),
    ],
)
def test_a_wrong_answer_is_one_line(asked, code, problem):
    with pytest.raises(InputError) as caught:
        ask(asked, code)
    message = str(caught.value)
    assert message.startswith("--program: ")
    assert " on h100-llama: " in message
    assert problem in message
    assert "\n" not in message


def test_a_program_that_hangs_is_ended_with_its_children(asked):
    """The child holds the pipe to us open, so waiting for the program alone would last as long as the child."""
    code = "import subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"
    with pytest.raises(InputError, match=r"no answer within 0\.5 s; --timeout allows more"):
        ask(asked, code, limit_s=0.5)


def test_a_program_that_cannot_run(asked):
    with pytest.raises(InputError, match="cannot be started: No such file"):
        program("./no-such-program", limit_s=1).predict(asked, lambda words: None)
    with pytest.raises(InputError, match="cannot be split into words: No closing quotation"):
        program("predict 'a", limit_s=1)
    with pytest.raises(InputError, match="the command is empty"):
        program(" ", limit_s=1)


def test_no_shell_reads_the_command(asked, tmp_path):
    with pytest.raises(InputError, match="lacks the column id"):
        program(f"{PYTHON} -c pass; touch {tmp_path}/made", limit_s=30).predict(asked, lambda words: None)
    assert not (tmp_path / "made").exists()
