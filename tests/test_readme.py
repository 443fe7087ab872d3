"""The commands of the README run as they are written there, one after the other, in a folder of a new user."""

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(sys.executable).parent
README = (ROOT / "README.md").read_text()
COMMANDS = [line.strip() for line in re.findall(r"^    (?:auto3d|torchrun) .*$", README, re.MULTILINE)]
KEYS = ("micro_batch_size", "tp", "dp", "pp")
with (ROOT / "results/tiny/table.csv").open() as table:
    MEASURED = [",".join([*(row[key] for key in KEYS), row["iteration_s"]]) for row in csv.DictReader(table)]
FILES = {  # files that the commands name and that a user would have
    "rows.csv": "micro_batch_size,tp,dp,pp\n2,1,2,1\n4,1,1,2\n",
    "m.csv": "\n".join([f"{','.join(KEYS)},measured_s", *MEASURED, *MEASURED]),  # two sittings: a fit needs 20
}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command as the README has it; RECIPE stands for a recipe of the user's."""
    words = shlex.split(command, comments=True)
    words = ["tiny" if word == "RECIPE" else word.replace(".venv/bin/", f"{PROGRAMS}/") for word in words]
    environment = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    return subprocess.run(
        words,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_the_commands_of_the_readme_run_in_order(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert len(COMMANDS) > 15
    has_slurm = shutil.which("sinfo") is not None and not subprocess.run(["sinfo"], capture_output=True).returncode
    for command in COMMANDS:
        if "executor=slurm" in command and not has_slurm:
            continue
        done = run(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_the_recipe_of_the_readme_is_planned_and_refused_without_its_gpus(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text(block)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("Call me Ishmael. " * 100)
    planned = run("auto3d plan mine", tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert "why the best is best" in planned.stdout
    swept = run("auto3d sweep mine launch.executor=local", tmp_path)
    assert swept.returncode == 2
    assert len(swept.stderr.strip().splitlines()) <= 4
    assert "GPU" in swept.stderr or "cuda" in swept.stderr
