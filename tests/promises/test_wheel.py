"""The wheel of this tree does what the clone does, in a folder of a user's with a space in its name."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.promises.running import ROOT, has_slurm, run

SMALL = "search.pp=[2] search.dp=[1] search.tp=[1] search.schedule=[1f1b] search.micro_batch_size=[4]"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and all packages of this one, but without the clone."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():  # what the clone holds beside them, such as an older build, must not get in
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(made), str(source)]
    subprocess.run([*pip, *build], check=True)
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin/python"
    (wheel,) = made.glob("*.whl")
    install = ["--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    Path(site, "packages.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("a user's") / "folder"
    made.mkdir()
    return made


def test_the_package_is_the_installed_one(programs: Path, folder: Path):
    found = run("python -c 'import auto3d, launch.recipe.shipped as files; print(auto3d.__file__, files.RECIPES)'",
                folder, programs=programs)  # fmt: skip
    assert str(ROOT) not in found
    listed = run("auto3d recipes", folder, programs=programs).splitlines()
    shipped = [*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "recipes/public").glob("*.yaml")]
    assert len(listed) == len(shipped)
    assert re.fullmatch(r"auto3d \d+\.\d+\.\d+.*\n", run("auto3d --version", folder, programs=programs))


def test_a_recipe_is_copied_changed_planned_and_swept(programs: Path, folder: Path):
    run("auto3d recipes --copy tiny --copy slurm", folder, programs=programs)
    assert (folder / "slurm/train.sbatch").is_file()
    assert "why the best is best" in run("auto3d plan tiny", folder, programs=programs)
    run(f"auto3d sweep tiny launch.executor=local {SMALL}", folder, programs=programs)
    assert "| ok" in (folder / "tables/tiny/table.md").read_text()
    run("auto3d report tiny", folder, programs=programs)
    assert (folder / "tables/tiny/report.html").stat().st_size > 100_000


def test_a_training_is_exported(programs: Path, folder: Path):
    few = "training.iterations=4 training.checkpoint_every=4 plan.pp=2"
    run(f"auto3d train tiny launch.executor=local {few}", folder, programs=programs)
    run(f"auto3d export tiny exported {few}", folder, programs=programs)
    assert (folder / "exported/config.json").is_file()


def test_models_papers_and_published_measurements_are_found(programs: Path, folder: Path):
    assert "why the best is best" in run("auto3d plan bert48", folder, programs=programs)
    assert "subgraph" in run("auto3d capture perceptron", folder, programs=programs)  # its factory is a shipped file
    assert "chimera-table2" in run("auto3d paper --list", folder, programs=programs)
    run("auto3d paper chimera-table2", folder, programs=programs)
    scored = run("auto3d yardstick --set megatron-sc21 --predictor textbook", folder, programs=programs)
    assert "megatron-sc21" in scored


def test_the_doctor_finds_no_error(programs: Path, folder: Path):
    checks = json.loads(
        run("auto3d doctor tiny launch.executor=local --json", folder, programs=programs).splitlines()[-1]
    )
    assert not [check for check in checks if check["verdict"] == "error"]


def test_trials_on_slurm_find_the_same_installation(programs: Path, folder: Path):
    if not has_slurm():
        assert "AUTO3D_REQUIRE_SLURM" not in os.environ, "no SLURM cluster answers"
        pytest.skip("no SLURM cluster answers: trials of an installed wheel on compute nodes were not tried")
    printed = run(f"auto3d sweep tiny launch.executor=slurm training.seed=2 {SMALL}", folder, programs=programs)
    assert "1 ok" in printed
