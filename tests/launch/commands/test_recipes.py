"""`auto3d recipes` lists what comes with auto3d, and copies it; and `auto3d --version`."""

import json
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from launch.recipe.load import load
from launch.recipe.shipped import RECIPES


def test_every_recipe_is_listed_by_the_name_that_commands_take(auto3d, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = json.loads(auto3d("recipes", "--json").out)
    assert {one["name"] for one in listed} >= {"tiny", "gpt20b", "public/deepseek-v3"}
    for one in listed:
        assert load(one["name"]).values.model
        assert len(one["about"]) > 20
        assert one["about"].endswith((".", ":"))


def test_a_copy_comes_before_the_shipped_recipe_and_is_never_overwritten(auto3d, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    auto3d("recipes", "--copy", "tiny", "--copy", "models/gpt2-tiny")
    mine = Path("recipes/tiny.yaml")
    assert mine.read_text() == (RECIPES / "tiny.yaml").read_text()
    assert Path("recipes/models/gpt2-tiny.yaml").is_file()
    mine.write_text(re.sub(r"global_batch: \d+", "global_batch: 8", mine.read_text()))
    assert load("tiny").values.training.global_batch == 8
    assert auto3d("recipes", "--copy", "tiny", code=2).err.strip() == (
        "auto3d: recipes/tiny.yaml exists already; move it away first"
    )
    assert "global_batch: 8" in mine.read_text()


@pytest.mark.parametrize("name", ["nothing", "../setup", "/etc/hostname", "", "."])
def test_what_cannot_be_copied_is_refused_in_one_line(name, auto3d, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = auto3d("recipes", "--copy", name, code=2).err
    assert f"there is no {name!r} to copy" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_copied_scripts_are_those_of_the_clone(auto3d, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    auto3d("recipes", "--copy", "slurm")
    for file in Path("slurm").iterdir():
        assert file.read_text() == (RECIPES.parent / file).read_text()
    assert {file.suffix for file in Path("slurm").iterdir()} == {".sh", ".sbatch"}
    subprocess.run(["bash", "-n", *sorted(map(str, Path("slurm").iterdir()))], check=True)


def test_the_version_names_the_commit(auto3d):
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=RECIPES.parent, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert auto3d("--version").out.strip() == f"auto3d {version('auto3d')} (commit {commit})"
