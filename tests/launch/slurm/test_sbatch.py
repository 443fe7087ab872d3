"""The sbatch scripts of a sweep's jobs equal golden files, and no value of a recipe is run by a shell.

To write the golden files anew, after looking at what changed: AUTO3D_WRITE_GOLDEN=1.
"""

import os
import subprocess
import sys
from json import dumps
from pathlib import Path

import pytest

from auto3d.errors import InputError
from launch.recipe.load import RecipeError, load
from launch.slurm.sbatch import check_folder, check_launch, text

GOLDEN = Path(__file__).parent / "sbatch"
JOBS = Path("/shared/project/runs/own/jobs/auto3d-own-0123456789ab")
HOSTILE = """it's "quoted" $(touch ran) `touch ran`; touch ran # ~ & | > ran *"""

LAUNCH = {
    "defaults": {},
    "queue": {
        "partition": "gpu",
        "account": "team-7",
        "qos": "high",
        "constraint": "a100&(ib|roce)",
        "reservation": "maintenance",
        "time_limit_s": 5401.0,
    },
    "nodes": {"nodelist": "n[1-4]", "exclude": "n3,n4", "exclusive": False, "cpus_per_node": 12, "mem": "64G"},
    "gpus": {"gpus_per_node": "a100:4"},
    "gres": {
        "gres": "gpu:a100:4,shard:2",
        "mem": "0",
        "array_throttle": 5,
        "additional_parameters": {"distribution": "block:fcyclic"},
    },
    "mail": {"mail_user": "me+jobs@example.org", "mail_type": "END,FAIL"},
    "additional": {
        "additional_parameters": {"licenses": "matlab:2", "nice": 100, "spread_job": True, "comment": HOSTILE}
    },
    "hostile": {
        "partition": HOSTILE,
        "account": "$(touch ran)",
        "constraint": "'; touch ran; '",
        "srun_args": ["--comment=" + HOSTILE, "two words", "$HOME", "back\\slash"],
    },
    "environment": {
        "setup": ["module purge", "module load 'cuda/12.4'", "export NCCL_DEBUG=INFO"],
        "teardown": ["rm -rf \"$TMPDIR/cache\""],
    },
    "apptainer": {
        "container": "apptainer",
        "container_image": "/images/my image $(touch ran).sif",
        "container_mounts": ["/data:/data", "/two words:/words"],
        "container_python": "/opt/venv/bin/python",
    },
    "pyxis": {
        "container": "pyxis",
        "container_image": "nvcr.io#nvidia/pytorch:25.01-py3",
        "container_mounts": ["/data:/data"],
    },
    "training": {"time_limit_s": 7200.0, "warning_s": 300.0},
}  # fmt: skip
CLUSTERS = {"gpus": "cuda", "gres": "cuda", "apptainer": "cuda"}


def recipe_of(folder: Path, launch: dict, *, device: str = "cpu"):
    cluster = {"nodes": 4, "devices_per_node": 4, "device": device}
    # JSON is YAML
    recipe = {"model": {"factory": "mine:make"}, "cluster": cluster, "launch": launch}
    (folder / "own.yaml").write_text(dumps(recipe))
    return load(str(folder / "own.yaml"))


@pytest.fixture
def text_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/opt/my venv/bin/python")

    def make(name: str) -> str:
        recipe = recipe_of(tmp_path, LAUNCH[name], device=CLUSTERS.get(name, "cpu"))
        check_launch(recipe)
        kind = {"trials": 1 if name in ("nodes", "training") else 11, "training": name == "training"}
        made = text(recipe, JOBS, nodes=2, name="auto3d-own-0123456789ab", **kind)
        return made.replace(str(tmp_path), "/home/me/project")

    return make


@pytest.mark.parametrize("name", LAUNCH)
def test_golden(text_of, name):
    file = GOLDEN / f"{name}.sbatch"
    if os.environ.get("AUTO3D_WRITE_GOLDEN"):
        file.write_text(text_of(name))
    assert text_of(name) == file.read_text()


def test_there_is_no_golden_file_too_many():
    assert {file.stem for file in GOLDEN.glob("*.sbatch")} == set(LAUNCH)


def received_by_srun(script: str, folder: Path) -> list[str]:
    """The arguments that srun gets when the shell runs ``script``, which must run nothing else."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "srun").write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    (programs / "srun").chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": "/home/me"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split("\0")[:-1]


def test_the_shell_takes_every_value_as_one_word(text_of, tmp_path):
    before = {"own.yaml", "programs"}
    words = received_by_srun(text_of("hostile"), tmp_path)
    for word in LAUNCH["hostile"]["srun_args"]:
        assert word in words
    assert {path.name for path in tmp_path.iterdir()} == before, "nothing of it was run"
    assert words[-5:] == ["/opt/my venv/bin/python", "-u", "-m", "submitit.core._submit", str(JOBS)]


def test_a_container_image_is_one_word(text_of, tmp_path):
    words = received_by_srun(text_of("apptainer"), tmp_path)
    assert LAUNCH["apptainer"]["container_image"] in words
    assert words[words.index("apptainer") :][:3] == ["apptainer", "exec", "--nv"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (
            {"partition": "low\n#SBATCH --wrap=reboot"},
            "launch.partition: found 'low\\n#SBATCH --wrap=reboot'; SLURM accepts",
        ),
        ({"account": "a\\b"}, "without backslashes"),
        ({"qos": ""}, "launch.qos: found ''; SLURM accepts one line of text"),
        ({"nodelist": "n" * 1001}, "found 1001 characters; at most 1000 are accepted"),
        ({"srun_args": ["a\nb"]}, "launch.srun_args: found 'a\\nb'; one line of text is accepted"),
        ({"setup": ["a\nb"]}, "launch.setup: found 'a\\nb'"),
        ({"container": "apptainer", "container_image": "a\nb"}, "launch.container_image: found"),
        ({"container": "pyxis"}, "a container needs container_image, and container_image needs container"),
        ({"additional_parameters": {"comment": "a\rb"}}, "launch.additional_parameters.comment: found 'a\\rb'"),
        ({"additional_parameters": {"x=1 --wrap": "y"}}, "not an option of sbatch: its name"),
        ({"additional_parameters": {"output": "/etc/passwd"}}, "is set by auto3d: leave it out"),
        ({"additional_parameters": {"cpus_per_task": 4}}, "has its own key: use launch.cpus_per_node"),
        ({"additional_parameters": {"spread-job": False}}, "leave the option out"),
        ({"gres": "gpu:1", "gpus_per_node": "1"}, "set one of them"),
    ],
)
def test_what_cannot_be_quoted_is_refused_in_one_line(tmp_path, launch, words):
    recipe = recipe_of(tmp_path, launch)
    with pytest.raises(RecipeError) as caught:
        check_launch(recipe)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a\nb", "100%", "back\\slash"])
def test_folders_that_slurm_cannot_write_to(name):
    with pytest.raises(InputError, match="SLURM cannot write"):
        check_folder(JOBS / name)


def test_a_dry_run_needs_no_cluster_and_leaves_nothing(folder, auto3d, monkeypatch):
    monkeypatch.delenv("SLURM_CONF", raising=False)
    arguments = ["sweep", "own.yaml", "--dry-run", "cluster.nodes=2", "cluster.devices_per_node=1"]
    printed = auto3d(*arguments, "launch.partition=two words").out
    assert printed.count("#!/bin/bash") == 1
    assert "#SBATCH --nodes=2" in printed
    assert "#SBATCH --partition='two words'" in printed
    assert not (folder / "runs").exists()
    refused = auto3d(*arguments, 'launch.partition="a\\nb"', code=2).err
    assert refused == "auto3d: command line: launch.partition: found 'a\\nb'; SLURM accepts one line of text " + (
        "without backslashes\n"
    )


def test_a_dry_run_of_a_training_and_a_limit_that_it_would_never_get_beyond(folder, auto3d):
    printed = auto3d("train", "own.yaml", "--dry-run", "launch.time_limit_s=7200").out
    assert "#SBATCH --signal=URG@120" in printed
    assert "#SBATCH --time=120" in printed
    assert not (folder / "runs").exists()
    refused = auto3d("train", "own.yaml", "--dry-run", "launch.time_limit_s=180", code=2).err
    assert "launch.warning_s: found 120; it must be below 120 for a job of 180 s" in refused
