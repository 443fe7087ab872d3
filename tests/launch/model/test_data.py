"""Data of a user's own as the command line trains on it: the same under every plan, or one line and exit code 2."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from launch.recipe.load import load
from launch.store.trials import _files
from tests.data.corpora import SIZE, documents, save_json, save_tokenizer

MODEL = {
    "architecture": "GPT2LMHeadModel",
    "config": {"vocab_size": SIZE, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2},
}
RECIPE = {
    "model": MODEL,
    "data": {"source": "json", "files": ["rows.jsonl"], "tokenizer": "tokenizer", "sequence_length": 32},
    "cluster": {"nodes": 1, "devices_per_node": 4, "device": "cpu"},
    "training": {"global_batch": 8, "iterations": 6, "check_capture": False},
    "launch": {"executor": "local"},
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes mine.yaml with these keys of data."""
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "tokenizer")
    save_json(tmp_path / "rows.jsonl", [{"text": text, "label": n % 3} for n, text in enumerate(documents())])

    def write(**data: object) -> None:
        Path("mine.yaml").write_text(yaml.safe_dump({**RECIPE, "data": {**RECIPE["data"], **data}}))

    write()
    return write


def test_json_lines_train_under_every_plan_as_on_one_process(write, auto3d):
    losses, logs = [], []
    for degrees in ("plan.dp=1", "plan.dp=2 plan.pp=2"):
        done = auto3d("train", "mine.yaml", *degrees.split(), "plan.micro_batch_size=2", "--json")
        losses.append(json.loads(done.out)["loss"])
        logs.append(next(line for line in done.err.splitlines() if line.startswith("data: ")))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 6
    assert losses[0][-1] < losses[0][0]
    assert logs[0] == logs[1]
    assert "59 documents with" in logs[0]
    assert "rows without a token, which are left out: 1;" in logs[0]
    assert "the last batch is not full and is dropped" in logs[0]
    prepared = [path for path in Path("runs/.data").iterdir() if path.is_dir()]
    assert len(prepared) == 1, "tokenised once for both"
    assert prepared[0].stat().st_mode & 0o77 == 0


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"source": "csv"}, "data.source: found 'csv'; it takes one of text, synthetic, tokens, dataset"),
        ({"tokenizer": "none"}, "data.tokenizer: found 'none'; there is no such folder"),
        ({"text": "body"}, "rows.jsonl, line 1 has no column body; it has text, label"),
        ({"packing": "padded", "inputs": {"x": {"kind": "normal"}}}, "data.tokenizer: no input is made from tokens"),
        ({"files": ["rows.jsonl"], "source": "dataset"}, "source dataset takes folders that save_to_disk wrote"),
        ({"files": [], "source": "tokens", "tokenizer": None}, "data.files: none given; source tokens reads files"),
        ({"files": [], "source": "no.such:thing", "tokenizer": None, "inputs": {"input_ids": {"kind": "column",
          "shape": [32]}, "labels": {"kind": "column", "shape": [32]}}}, "no.such:thing cannot be imported"),
        ({"files": ["large.npy"], "source": "tokens", "tokenizer": None},
         "data.inputs.input_ids: found values up to 999 in the data; transformer.wte.weight has 300 rows"),
        ({"files": ["small.npy"], "source": "tokens", "tokenizer": None},
         "the data has 3 samples, less than one global batch of 8"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_trained_on_is_refused_in_one_line(write, auto3d, data, problem):
    np.save("large.npy", np.arange(1000))
    np.save("small.npy", np.arange(100))
    write(**data)
    done = auto3d("train", "mine.yaml", "plan.pp=1", code=2)
    assert problem in done.err
    assert sum(problem in line for line in done.err.splitlines()) == 1
    assert "Traceback" not in done.err


def test_files_in_folders_are_part_of_what_a_trial_is(write, tmp_path):
    recipe = load("mine.yaml")
    names = {Path(file).relative_to(tmp_path).as_posix() for file, *_ in _files(recipe)}
    assert names >= {"rows.jsonl", "tokenizer/tokenizer.json"}
    Path("a.bin").write_bytes(b"12")
    Path("a.idx").write_bytes(b"34")
    write(source="tokens", files=["a.bin"], tokenizer=None)
    assert {Path(file).name for file, *_ in _files(load("mine.yaml"))} == {"a.bin", "a.idx"}
