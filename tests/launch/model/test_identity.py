"""What one process has captured, every other process finds in the cache, until something changes that it depends on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from auto3d.capture.cache import place_of
from launch.model.capture_process import CaptureProcess
from launch.model.graphs import PlanningModel
from launch.recipe.load import load
from tests.launch.conftest import MINE
from tests.promises.running import PROGRAMS
from tests.soak import soak

AUTO3D = [sys.executable, str(PROGRAMS / "auto3d")]
MODULE = [sys.executable, "-m", "launch.main"]


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The folder of a cache of the test's own."""
    monkeypatch.setenv("AUTO3D_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def entries(kept: Path) -> dict[str, int]:
    """The files of the cache; one that was written again has another number."""
    return {file.name: file.stat().st_ino for file in kept.iterdir()}


def cached(program: list[str], recipe: Path, cwd: Path) -> bool:
    """Whether `auto3d capture` captured nothing."""
    done = subprocess.run([*program, "capture", str(recipe), "--json"], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["cached"]


@pytest.mark.parametrize("recipe", ["own.yaml", *soak("small.yaml")])
def test_every_kind_of_process_finds_what_another_has_captured(recipe, folder, kept, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert not cached(AUTO3D, folder / recipe, folder)
    stored = entries(kept)
    assert stored
    assert cached(AUTO3D, folder / recipe, folder)
    assert cached(MODULE, folder / recipe, elsewhere)
    model = PlanningModel(load(str(folder / recipe)))
    graph = model.graph(2 if recipe == "small.yaml" else 4)
    with CaptureProcess() as process:
        spawned = PlanningModel(load(str(folder / recipe)), process=process)
        assert spawned.graph(graph.micro_batch_size) == graph
    assert not model.captured
    assert not spawned.captured
    assert entries(kept) == stored


def test_the_key_is_the_same_after_the_models_code_was_imported(folder, kept):
    model = PlanningModel(load("own.yaml"))
    before, path = model.identity(graph_at=4), list(sys.path)
    graph = model.graph(4)
    assert sys.path != path, "the capture has put the recipe's folder into sys.path"
    assert model.identity(graph_at=4) == before
    assert PlanningModel(load("own.yaml")).graph(4) == graph


def test_the_key_is_the_same_after_the_models_code_changed_its_configuration(folder, kept):
    """transformers adds keys to the rotary scaling that it is given, and a factory may change its arguments."""
    (folder / "roped.yaml").write_text(ROPED)
    (folder / "greedy.py").write_text(f"{MINE}\n\ndef greedy(sizes):\n    return make(sizes.pop())\n")
    for name, overrides in (
        ("roped.yaml", []),
        ("own.yaml", ["model.factory=greedy:greedy", "model.arguments={sizes: [3]}"]),
    ):
        model = PlanningModel(load(name, overrides))
        before = json.dumps(model.identity(graph_at=4))
        model.graph(4)
        assert json.dumps(model.identity(graph_at=4)) == before


def test_a_file_that_changes_or_hides_another_makes_an_entry_stale(folder, kept, tmp_path_factory):
    (folder / "mine.py").write_text(f"import layer\n{MINE}")
    (folder / "layer.py").write_text("width = 3\n")
    assert not cached(AUTO3D, folder / "own.yaml", folder)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "layer.py").write_text("width = 3\n")
    assert cached(MODULE, folder / "own.yaml", elsewhere)  # the folder of the recipe comes first there
    assert not cached(AUTO3D, folder / "own.yaml", elsewhere)  # here the working folder does
    assert not cached(AUTO3D, folder / "own.yaml", folder)  # the entry is of the other file
    (folder / "layer.py").write_text("width = 4\n")
    assert not cached(AUTO3D, folder / "own.yaml", folder)


def test_a_module_is_where_an_import_finds_it(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "found_here.py").write_text("")
    assert place_of("found_here", []) == ""
    assert place_of("found_here", [str(first), str(second)]) == str(first / "found_here.py")
    monkeypatch.setattr(sys, "path", [str(second), *sys.path, str(first)])
    assert place_of("found_here", [str(first)]) == str(second / "found_here.py")
    assert place_of("os", [str(first)]) == os.__file__


ROPED = """
model:
  architecture: LlamaForCausalLM
  config:
    {vocab_size: 32, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
    num_key_value_heads: 2, rope_scaling: {rope_type: llama3, factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0,
    original_max_position_embeddings: 64}}
data: {source: synthetic, sequence_length: 8, vocabulary_size: 32}
"""
