"""Scripts of many tasks, written for transformers: the numbers, texts and saved weights of one process.

A script is changed in one line, which puts auto3d's classes in the place of transformers' after the imports.
"""

import re
import runpy
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import auto3d
from tests.soak import soak
from tests.trainer.scripts import begin, free_port

CHANGED = "\nTrainer, TrainingArguments = CLASSES"
FOLDER = Path(__file__).parent / "real"
TIMES = ("runtime", "per_second", "total_flos")  # keys of figures that differ from run to run
NAMES = (
    "audio",
    "distillation",
    "images",
    "instructions",
    "language_model",
    "masked_lm",
    "multi_label",
    "named_entities",
    "preferences",
    "regression",
    "streaming",
    "summarization",
    "unfreezing",
)


def run(world, name, folder, port, **degrees):
    """The log of a script with its last evaluation, and the lines that it prints; by transformers if ``degrees`` is
    empty."""
    begin(world, folder, port, ours=bool(degrees), **degrees)

    def arguments(*, gradient_accumulation_steps, **given):
        steps = gradient_accumulation_steps // degrees.get("dp", 1)
        return auto3d.TrainingArguments(gradient_accumulation_steps=steps, ddp_timeout=60, **given)

    classes = (auto3d.Trainer, arguments) if degrees else (transformers.Trainer, transformers.TrainingArguments)
    script = folder / f"rank-{world.rank}.py"
    script.write_text((FOLDER / f"{name}.py").read_text().replace("\nset_seed(", CHANGED + "\nset_seed(", 1))
    with redirect_stdout(StringIO()) as printed:
        variables = runpy.run_path(str(script), {"CLASSES": classes})
    by_libraries = re.compile(r"[{[]|auto3d: |  \w+ +=|\*\*\*\*\*")  # warnings, logs and metrics
    lines = [line for line in printed.getvalue().splitlines() if not by_libraries.match(line)]
    return [*variables["trainer"].state.log_history, variables["metrics"]], lines


def logs(processes, name, folder, **degrees):
    """What each rank returns of a run."""
    folder.mkdir()
    port = free_port() if degrees else None
    return processes.run(prod(degrees.values()), partial(run, **degrees), name, folder, port)


def assert_equal(found, expected, tolerance=2e-4):
    (found, printed), (expected, printed_there) = found, expected
    assert printed == printed_there
    for here, there in zip(found, expected, strict=True):
        assert here.keys() == there.keys()
        for key, value in there.items():
            if not key.endswith(TIMES):
                assert here[key] == pytest.approx(value, rel=tolerance, abs=1e-6), (key, here)


PP2, DP2_PP2 = {"pp": 2}, {"dp": 2, "pp": 2}


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("named_entities", PP2),
        ("regression", DP2_PP2),
        *soak(*((name, degrees) for name in NAMES for degrees in (PP2, DP2_PP2, {"tp": 2}))),
    ],
    ids=str,
)
def test_a_script_gives_what_it_gives_in_one_process(name, degrees, processes, tmp_path):
    (one,) = logs(processes, name, tmp_path / "one")
    assert any("eval_loss" in entry for entry in one[0])
    for found in logs(processes, name, tmp_path / "several", **degrees):
        assert_equal(found, one)
    for file in tmp_path.glob("one/*/*.safetensors"):
        saved = load_file(tmp_path / "several" / file.relative_to(tmp_path / "one"))
        for key, value in load_file(file).items():
            if not key.endswith("key.bias"):  # its gradient is nothing but rounding
                torch.testing.assert_close(saved[key], value, rtol=1e-3, atol=2e-4, msg=f"{file}: {key}")
