"""What a driver has captured, neither its ranks nor another process captures again."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from auto3d.capture import cache as cache_module
from launch.model.build import RankCaptures, captured_model, stored_model
from launch.model.candidates import of_plan
from launch.model.graphs import PlanningModel
from launch.model.identity import identity_of
from launch.model.stored_programs import copy_programs
from launch.recipe.load import load
from tests.launch.conftest import MINE, write_recipes
from tests.promises.running import PROGRAMS

# A capture runs the model's own forward twice; a run of its program never does.
COUNTED = MINE.replace(
    "        return nn.functional",
    "        with open('forwards', 'a') as file:\n            file.write('x')\n        return nn.functional",
)


@pytest.fixture
def counted(folder, monkeypatch):
    """A folder of recipes with a cache of its own; forwards of own.yaml's model are counted in its file."""
    monkeypatch.setenv("AUTO3D_CACHE", str(folder / "cache"))
    (folder / "mine.py").write_text(COUNTED)
    return folder


def run(*arguments: str, cwd: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "auto3d"), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def forwards(folder: Path) -> int:
    file = folder / "forwards"
    return file.stat().st_size if file.exists() else 0


def entries(folder: Path) -> dict[str, int]:
    """The files of the cache; one that was written again has another number."""
    return {file.name: file.stat().st_ino for file in (folder / "cache" / "models").iterdir()}


def test_what_a_training_has_captured_no_other_command_captures(counted):
    run("train", "own.yaml", cwd=counted)
    first = forwards(counted)
    assert first > 0
    run("train", "own.yaml", "--fresh", cwd=counted)
    assert forwards(counted) == first
    run("sweep", "own.yaml", "search.micro_batch_size=[4]", cwd=counted)
    assert forwards(counted) == first


def test_a_sweep_captures_each_size_once_and_its_trials_capture_nothing(counted):
    run("sweep", "own.yaml", "search.micro_batch_size=[4]", cwd=counted)
    first = forwards(counted)
    assert first > 0
    run("sweep", "own.yaml", cwd=counted)
    assert forwards(counted) == 2 * first


@pytest.mark.soak
def test_a_sweep_and_a_training_of_tiny_find_all_captures(counted):
    small = ["model.config.n_layer=2", "training.iterations=2", "training.check_capture=false", "launch.executor=local"]
    small += ["search.micro_batch_size=[4]", "search.pp=[2]", "search.dp=[1]", "search.schedule=[1f1b]"]
    run("sweep", "tiny", *small, cwd=counted)
    stored = entries(counted)
    shutil.rmtree(counted / "runs")
    run("sweep", "tiny", *small, cwd=counted)
    run("train", "tiny", *small, cwd=counted)
    assert entries(counted) == stored


@pytest.fixture(scope="module")
def captured_elsewhere(tmp_path_factory):
    """A folder of recipes, and a cache with the program of own.yaml for 4 samples."""
    folder = tmp_path_factory.mktemp("elsewhere")
    write_recipes(folder)
    (folder / "mine.py").write_text(COUNTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTO3D_CACHE", str(folder / "cache"))
        run("sweep", "own.yaml", "search.micro_batch_size=[4]", cwd=folder)
    return folder


@pytest.fixture
def stored(captured_elsewhere, tmp_path, monkeypatch, own_modules):
    """The recipe own.yaml, its plan, and a copy of the plan's program, with an empty cache."""
    folder = captured_elsewhere
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AUTO3D_CACHE", str(folder / "cache"))
    recipe = load("own.yaml")
    model = PlanningModel(recipe)
    plan = of_plan(model, recipe.values.plan)
    assert not model.captured
    copy_programs(recipe, plan, tmp_path)
    (copy,) = tmp_path.iterdir()
    (folder / "forwards").unlink(missing_ok=True)
    monkeypatch.setenv("AUTO3D_CACHE", str(tmp_path / "none"))  # as on a node with a cache of its own
    return recipe, plan, copy


def test_the_ranks_of_a_trial_read_its_copy(stored, capsys):
    recipe, plan, copy = stored
    captured = RankCaptures(recipe, copy.parent).of_plan(plan)(None)
    assert forwards(Path()) == 0
    assert captured.graph.fingerprint == plan.graph
    assert "is not used" not in capsys.readouterr().err
    assert stored_model(recipe, 4) is None


@pytest.mark.parametrize("name", ["own.yaml", "small.yaml", "tiny"])
def test_the_recipe_in_the_folder_of_a_trial_has_the_same_entries(folder, name):
    """A node of a job loads that recipe, and finds the user's modules in the folder of the original one."""
    recipe = load(name)
    (folder / "trial").mkdir()
    (folder / "trial" / "recipe.yaml").write_text(recipe.text)
    there = replace(load("trial/recipe.yaml"), folder=recipe.folder)
    assert identity_of(there, program_at=4) == identity_of(recipe, program_at=4)


def test_a_model_is_read_without_its_code(stored):
    """A parent of ranks on GPUs does so: an import of the user's code may start CUDA."""
    recipe, _, copy = stored
    captured = stored_model(recipe, 4, folder=copy.parent)
    assert "mine" not in sys.modules
    assert type(captured.exported.build()).__name__ == "Net"
    assert "mine" in sys.modules


def signed(entry: dict) -> str:
    text = json.dumps(entry)
    return f"{sha256(text.encode()).hexdigest()}\n{text}"


def of_packages(entry: dict, *changes: tuple[str, str]) -> dict:
    key = entry["key"]
    for ours, theirs in changes:
        assert ours in key
        key = key.replace(ours, theirs)
    return entry | {"key": key}


def installed(name: str) -> str:
    return next(each for each in cache_module._installed() if each.startswith(f"{name}-"))


TORCH, TRANSFORMERS, PYTEST = map(installed, ("torch", "transformers", "pytest"))


def version(folder: str) -> str:
    return folder.removesuffix(".dist-info").partition("-")[2]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda entry: of_packages(entry, (TORCH, "torch-1.0.dist-info")), f"torch {version(TORCH)} here, 1.0 there"),
        (
            lambda entry: of_packages(
                entry, (TRANSFORMERS, "transformers-4.0.dist-info"), (PYTEST, "pytest-1.0.dist-info")
            ),
            f"transformers {version(TRANSFORMERS)} here, 4.0 there",
        ),
        (lambda entry: of_packages(entry, (sys.version.split()[0], "3.1.0")), "here, 3.1.0 there"),
        (lambda entry: of_packages(entry, ("mine:make", "other:make")), "it is of another model"),
        (lambda entry: entry | {"content": {}}, "its content cannot be read"),
        (None, "its content is damaged"),
    ],
)
def test_a_copy_that_is_not_valid_here_is_refused_in_one_line(stored, capsys, change, line):
    recipe, plan, copy = stored
    text = copy.read_text()
    copy.write_text(text[:-9] if change is None else signed(change(json.loads(text.partition("\n")[2]))))
    captured = RankCaptures(recipe, copy.parent).of_plan(plan)(None)
    assert captured.graph.fingerprint == plan.graph
    assert forwards(Path()) > 0  # the rank's process has captured the model
    (told,) = [each for each in capsys.readouterr().err.splitlines() if "is not used" in each]
    assert told.startswith(f"auto3d: the captured model in {copy} is not used: ")
    assert line in told


def test_a_copy_is_refused_where_the_users_file_differs(stored, capsys):
    recipe, plan, copy = stored
    mine = Path("mine.py").resolve()
    mine.write_text(f"{COUNTED}# changed\n")
    try:
        assert captured_model(recipe, 4, folder=copy.parent).graph.fingerprint == plan.graph
    finally:
        mine.write_text(COUNTED)
    assert f"the file {mine} differs" in capsys.readouterr().err
    assert forwards(Path()) > 0
