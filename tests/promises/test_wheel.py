"""The wheel of this tree does what the clone does, in a folder of a user's; test_commands.py runs README's with it."""

import re
from pathlib import Path

import pytest

from tests.promises.running import ROOT, run
from tests.slurm.conftest import SlurmCluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("a user's") / "own folder"
    made.mkdir()
    return made


def test_the_package_is_the_installed_one(wheel: Path, folder: Path):
    code = "import auto3d, launch.recipe.shipped as files; print(auto3d.__file__, files.RECIPES)"
    assert str(ROOT) not in run(f'python -c "{code}"', folder, programs=wheel)
    listed = run("auto3d recipes", folder, programs=wheel).splitlines()
    shipped = [*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "recipes/public").glob("*.yaml")]
    assert len(listed) == len(shipped)
    assert re.fullmatch(r"auto3d \d+\.\d+\.\d+.*\n", run("auto3d --version", folder, programs=wheel))


def test_models_clusters_papers_and_published_measurements_are_found(wheel: Path, folder: Path):
    run("auto3d recipes --copy tiny --copy slurm", folder, programs=wheel)
    assert (folder / "slurm/train.sbatch").is_file()
    assert "why the best is best" in run("auto3d plan tiny cluster=h100 cluster.nodes=1", folder, programs=wheel)
    assert "subgraph" in run("auto3d capture perceptron", folder, programs=wheel)  # its factory is a shipped file
    run("auto3d paper chimera-table2", folder, programs=wheel)
    scored = run("auto3d yardstick --set megatron-sc21 --predictor textbook", folder, programs=wheel)
    assert "megatron-sc21" in scored


def test_trials_on_slurm_find_the_same_installation(wheel: Path, folder: Path, present_cluster: SlurmCluster):
    space = "search.pp=[2] search.dp=[1] search.tp=[1] search.schedule=[1f1b] search.micro_batch_size=[4]"
    slurm = {name: value for name, value in present_cluster.environment.items() if name != "PYTHONPATH"}  # the clone
    command = f"auto3d sweep tiny launch.executor=slurm training.seed=2 {space}"
    run(command, folder, programs=wheel, variables=slurm)
    assert re.search(r"\| ok +\|", (folder / "tables/tiny/table.md").read_text())
