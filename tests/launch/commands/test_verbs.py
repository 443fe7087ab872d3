"""status, logs, cancel, resume and --detach for trials on this machine."""

import _posixsubprocess
import csv
import fcntl
import re
import shlex
import subprocess

import psutil
import pytest

from auto3d.runtime.measurement import Status
from launch.recipe.load import load
from launch.run.scaled_down import scaled_down
from launch.store.ends import record_ends
from launch.store.manifest import Entry, State, histories
from launch.store.trials import manifest_of, trials_of
from launch.store.watcher import write_failure
from tests.launch.drivers.test_sweep import gone, left_in, wait_until
from tests.promises.preloaded import divert
from tests.promises.running import PROGRAMS, preloaded
from tests.test_plan import PLAN


@pytest.fixture
def folder(same_folder):
    return same_folder


@pytest.fixture
def fails_at_two(folder):
    """The model of own.yaml fails at micro-batches of two samples."""
    line = "    def forward(self, x, y):\n"
    mine = (folder / "mine.py").read_text()
    (folder / "mine.py").write_text(mine.replace(line, f"{line}        y = y + 3 * (x.shape[0] == 2)\n"))


def starts() -> list[int]:
    """The number of starts of each trial of own.yaml, in the order of their names."""
    known = histories(manifest_of(load("own.yaml")).entries())
    return [known[name].starts for name in sorted(known)]


def test_resume_starts_what_failed_up_to_a_limit(folder, auto3d, fails_at_two):
    space = ["search.micro_batch_size=[2,4]", "launch.attempts=2"]
    auto3d("sweep", "own.yaml", *space)
    assert starts() == [1, 1]
    status = auto3d("status", "own.yaml").out
    assert status.rstrip().endswith("1 failed, 1 ok")
    assert "; the model takes whole numbers from 0 to 2" in auto3d("logs", "own.yaml", "mb2").out
    resumed = auto3d("resume", "own.yaml")
    assert starts() == [2, 1], "with the overrides of the sweep"
    assert "1/1 dp1-tp1-pp2-mb2" in resumed.err
    auto3d("resume", "own.yaml")
    assert starts() == [2, 1], "launch.attempts is 2"
    assert "2 names contain 'dp1'" in auto3d("logs", "own.yaml", "dp1", code=2).err


@pytest.mark.soak
def test_tune_starts_what_failed_only_when_asked_to(folder, auto3d, fails_at_two):
    tune = ["tune", "own.yaml", "search.micro_batch_size=[2,4]", "search.trials=2", "prediction.profile=none"]
    assert f"1 trial failed or timed out; to run again: {shlex.join(['auto3d', *tune, '--retry'])}" in auto3d(*tune).err
    assert starts() == [1, 1]
    assert "failed" in auto3d(*tune).out
    assert starts() == [1, 1]
    auto3d(*tune, "--retry")
    assert starts() == [2, 1]


@pytest.mark.soak
def test_resume_of_a_tune_starts_what_failed_in_it_and_not_in_a_sweep(folder, auto3d, fails_at_two):
    auto3d("sweep", "own.yaml", "search.micro_batch_size=[8]", "search.pp=[1]", "launch.attempts=2")
    space = ["search.micro_batch_size=[2,4]", "search.trials=2", "prediction.profile=none"]
    tune = ["tune", "own.yaml", *space, "launch.attempts=2"]
    assert f"1 trial failed or timed out; to run again: {shlex.join(['auto3d', *tune, '--retry'])}" in auto3d(*tune).err
    assert starts() == [1, 1, 1]
    status = auto3d("status", "own.yaml").out
    assert status.count("dp1-") == 2, "not the trial of the sweep"
    assert status.rstrip().endswith(("1 failed, 1 ok", "1 ok, 1 failed"))
    assert "failed" in auto3d(*tune).out
    assert starts() == [1, 1, 1]
    for _ in range(2):
        auto3d("resume", "own.yaml")
        assert starts() == [1, 2, 1], "launch.attempts is 2"
    auto3d(*tune, "--retry")
    assert starts() == [1, 3, 1]


@pytest.fixture
def forked(monkeypatch):
    """What runs in the background is forked from the process that has torch, too."""
    for module, name in ((_posixsubprocess, "fork_exec"), (subprocess, "_fork_exec")):
        monkeypatch.setattr(module, name, getattr(module, name))  # monkeypatch restores what ``divert`` replaces
    divert(lambda: preloaded(PROGRAMS), lambda words: words[:2] == ["-m", "launch.main"])


def test_a_detached_sweep_is_followed_and_cancelled(folder, auto3d, forked):
    told = auto3d("sweep", "own.yaml", "search.micro_batch_size=[4]", "--detach").out
    assert "auto3d status own.yaml --watch" in told
    driver = psutil.Process(int(told.split()[1]))
    log = folder / "runs" / "own" / "driver.log"
    wait_until(lambda: gone([driver]), "the sweep in the background", timeout_s=120)
    assert "to train under the fastest plan" in log.read_text()
    assert auto3d("status", "own.yaml", "--watch").out.rstrip().endswith("1 ok")
    assert log.stat().st_mode & 0o077 == 0 or log.parent.stat().st_mode & 0o077 == 0

    told = auto3d("sweep", "own.yaml", "measure.iterations=1000000", "--detach").out
    driver = psutil.Process(int(told.split()[1]))
    wait_until(lambda: "1 running" in auto3d("status", "own.yaml").out, "its first trial")
    refused = auto3d("sweep", "own.yaml", "--detach", code=2).err
    assert f"process {driver.pid} runs its trials in the background; to end it: auto3d cancel own.yaml" in refused
    assert f"asked process {driver.pid}" in auto3d("cancel", "own.yaml").out
    wait_until(lambda: gone([driver]) and not left_in(folder), "all its processes to be gone", timeout_s=30)
    assert "1 interrupted, 1 not run" in auto3d("status", "own.yaml").out


@pytest.mark.soak
def test_a_detached_training_is_cancelled_and_goes_on(folder, auto3d):
    options = ["training.iterations=600", "training.checkpoint_every=75"]
    told = auto3d("train", "own.yaml", *options, "--detach").out
    driver = psutil.Process(int(told.split()[1]))
    folders = folder / "runs" / "own" / "checkpoints"
    wait_until(lambda: list(folders.glob("*/*/checkpoint.json")), "its first checkpoint")
    assert "1 running" in auto3d("status", "own.yaml").out
    auto3d("cancel", "own.yaml")
    wait_until(lambda: gone([driver]) and not left_in(folder), "all its processes to be gone", timeout_s=30)
    assert auto3d("status", "own.yaml").out.rstrip().endswith("1 interrupted")

    resumed = auto3d("resume", "own.yaml")
    (first,) = re.findall(r"^continuing after iteration (\d+) of 600", resumed.err, re.MULTILINE)
    assert int(first) % 75 == 0
    assert int(first) > 0
    assert f"iteration {int(first) + 1}/600" in resumed.err
    assert f"{600 - int(first)} iterations under dp=1" in resumed.out
    assert auto3d("status", "own.yaml").out.rstrip().endswith("1 ok")
    assert "done already; to train anew: auto3d train own.yaml" in auto3d("resume", "own.yaml").out
    again = auto3d("train", "own.yaml", *options)
    assert "is after iteration 600; --fresh starts over" in again.err
    (file,) = folder.glob("runs/own/train-*.lock")
    with file.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "this training is running (process " in auto3d("train", "own.yaml", *options, "--fresh", code=2).err
    short = ["training.iterations=2", *options[1:]]
    assert "iteration 1/2" in auto3d("train", "own.yaml", *short, "--fresh").err


@pytest.mark.soak
def test_a_detached_training_whose_order_is_sought_is_done_under_any_order(folder, auto3d):
    """The process in the background finds another order than the one that starts it: there are many micro-batches."""
    plan = [
        "plan.schedule=synthesized",
        "search.order_seconds=0.2",
        "plan.micro_batch_size=1",
        "training.global_batch=32",
    ]
    told = auto3d("train", "own.yaml", *plan, "--detach").out
    driver = psutil.Process(int(told.split()[1]))
    wait_until(lambda: gone([driver]), "the training in the background", timeout_s=60)
    assert auto3d("status", "own.yaml").out.rstrip().endswith("1 ok")
    assert "done already; to train anew: auto3d train own.yaml" in auto3d("resume", "own.yaml").out


def test_an_end_is_noted_once_and_not_of_a_trial_that_another_process_has_started_again(folder):
    recipe = load("own.yaml")
    (trial,) = trials_of(recipe, [PLAN])
    manifest = manifest_of(recipe)
    trial.prepare()
    manifest.append([Entry(trial=trial.name, state=State.SUBMITTED, job="1")])
    failed = write_failure(trial, Status.FAILED, "of job 1")
    trial.prepare()
    manifest.append([Entry(trial=trial.name, state=State.SUBMITTED, job="2")])
    record_ends(recipe, {trial: failed})
    assert [one.state for one in manifest.entries()] == [State.SUBMITTED] * 2
    measured = write_failure(trial, Status.OOM, "of job 2")
    for _ in range(2):
        record_ends(recipe, {trial: measured})
    (ended,) = [one for one in manifest.entries() if one.state is State.ENDED]
    assert (ended.job, ended.told) == ("2", "oom")


@pytest.mark.parametrize("verb", ["status", "resume"])
def test_nothing_was_run(folder, auto3d, verb):
    refused = auto3d(verb, "own.yaml", code=2).err
    assert refused == "auto3d: own: nothing has run in this folder; to run it: auto3d sweep own.yaml\n"


def test_slurm_is_asked_for_where_there_is_none(folder, auto3d, no_slurm):
    refused = auto3d("sweep", "own.yaml", "launch.executor=slurm", code=2).err
    assert refused.startswith("auto3d: command line: launch.executor: SLURM cannot be used: ")
    assert refused.count("\n") == 1


@pytest.mark.parametrize("nodes", ["cluster.nodes=2", "cluster.more=[{nodes: 1}]"])
def test_several_nodes_are_not_this_machine(folder, auto3d, no_slurm, nodes):
    refused = auto3d("sweep", "own.yaml", "launch.executor=auto", nodes, code=2).err
    assert "cluster.nodes: found 2; the recipe needs " in refused
    assert ", and this machine is 1 node: `" in refused
    assert refused.count("\n") == 1


@pytest.mark.parametrize("verb", ["sweep", "tune", "train"])
def test_missing_devices_are_refused_with_three_commands_that_help(folder, auto3d, no_slurm, verb):
    refused = auto3d(verb, "gpt20b", code=2).err
    assert refused.count("\n") == 1
    assert "needs 16 nodes of 4 GPUs, and this machine is 1 node" in refused
    plan, scaled, slurm = re.findall(r"`(.+?)`", refused)
    assert plan == "auto3d plan gpt20b"
    assert slurm == f"make {verb} RECIPE=gpt20b EXECUTOR=slurm"
    program, command, *words = shlex.split(scaled)
    assert (program, command) == ("auto3d", "sweep")
    small = load(words[0], words[1:])
    assert small.values.training.compute == "emulated"
    assert (small.values.cluster.nodes, small.values.cluster.devices_per_node) == (1, 8)
    assert small.values.model.config["n_layer"] == 8


@pytest.mark.parametrize(("verb", "ranks"), [("sweep", 4), ("tune", 4), ("recompute", 2)])
def test_missing_devices_are_refused_before_the_model_is_built(folder, auto3d, no_slurm, monkeypatch, verb, ranks):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused = auto3d(verb, "small.yaml", "cluster.device=cuda", "model.config.n_layer=abc", code=2).err
    assert f"cluster.device: found 'cuda'; {ranks} ranks need a GPU each, and this process may use 0" in refused
    assert refused.count("\n") == 1


def test_a_users_own_overrides_stay_in_the_commands_that_help(folder, auto3d, no_slurm):
    refused = auto3d("sweep", "small.yaml", "cluster.nodes=2", "training.global_batch=32", "search.pp=[2]", code=2).err
    plan, scaled, slurm = re.findall(r"`(.+?)`", refused)
    assert plan == "auto3d plan small.yaml cluster.nodes=2 training.global_batch=32 'search.pp=[2]'"
    assert "'search.pp=[2]'" in scaled
    assert "cluster.nodes=1" in scaled
    assert slurm.endswith("launch.executor=slurm")


@pytest.mark.soak
def test_the_scaled_down_sweep_ends_with_a_table(folder, auto3d, no_slurm):
    """The command that the refusal names, with one candidate of each schedule."""
    overrides = scaled_down(load("gpt20b"))
    few = ["search.pp=[8]", "search.micro_batch_size=[2]", "search.recompute=[full]", "search.dp=[1]"]
    auto3d("sweep", "gpt20b", *overrides, *few)
    with (folder / "tables" / "gpt20b" / "table.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert {row["schedule"] for row in rows} == {"1f1b", "shifted-critical-path"}


def test_trials_on_slurm_are_not_those_of_this_machine_and_change_with_the_kind_of_nodes(folder):
    def name(*overrides: str) -> str:
        return trials_of(load("small.yaml", overrides), [PLAN])[0].name

    slurm = "launch.executor=slurm"
    names = [name(), name(slurm), name(slurm, "launch.partition=gpu"), name(slurm, "launch.constraint=a100")]
    assert len(set(names)) == 4
    assert name(slurm, "launch.account=b", "launch.qos=high", "launch.attempts=9") == name(slurm)
