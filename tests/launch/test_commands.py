"""The commands as a user runs them: real processes, real trials, real faults."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from auto3d.schedule import SCHEDULES
from tests.launch.test_recipe import GPT2

BIN = Path(sys.executable).parent
AUTO3D = [str(BIN / "auto3d")]
SPACE = ["search.dp=[1,2]", "search.pp=[2]", "search.micro_batch_size=[2]", "search.allow_idle_devices=true"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "small.yaml").write_text(GPT2)
    return tmp_path


def run(
    folder: Path, *command: str, code: int = 0, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | (environment or {}),
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def train_json(folder: Path, *command: str) -> dict:
    (line,) = run(folder, *command).stdout.splitlines()
    return json.loads(line)


# Training


def test_training_is_the_same_however_its_processes_are_started(folder):
    """By auto3d itself, by torchrun, and by mpirun: the same losses to the last bit."""
    arguments = ["train", "small.yaml", "plan.dp=2", "plan.pp=2", "training.iterations=4", "--json"]
    own = train_json(folder, *AUTO3D, *arguments)
    assert len(own["loss"]) == len(own["grad_norm"]) == len(own["iteration_s"]) == 4
    assert len(own["peak_bytes"]) == 4
    assert min(own["peak_bytes"]) > 0
    assert (own["plan"]["dp"], own["plan"]["pp"], own["plan"]["schedule"]) == (2, 2, "1f1b")
    assert own["samples_per_s"] > 0

    torchrun = [str(BIN / "torchrun"), "--nproc-per-node=4", "--master-port=0", "--rdzv-backend=c10d"]
    by_torchrun = train_json(folder, *torchrun, "--rdzv-endpoint=localhost:0", str(BIN / "auto3d"), *arguments)
    assert by_torchrun["loss"] == own["loss"]
    by_mpirun = train_json(folder, str(BIN / "mpirun"), "-n", "4", *AUTO3D, *arguments)
    assert by_mpirun["loss"] == own["loss"]
    assert by_mpirun["grad_norm"] == own["grad_norm"]

    too_few = run(folder, str(BIN / "mpirun"), "-n", "3", *AUTO3D, *arguments, code=2)
    assert "plan: it needs dp × tp × pp = 4 ranks; the launcher started 3" in too_few.stderr


def test_the_plan_can_come_from_a_file_or_by_hand(folder):
    by_hand = train_json(folder, *AUTO3D, "train", "small.yaml", "training.iterations=2", "--json")
    (folder / "plan.json").write_text(json.dumps(by_hand["plan"]))
    from_file = train_json(
        folder, *AUTO3D, "train", "small.yaml", "training.iterations=2", "--json", "--plan", "plan.json"
    )
    assert from_file["loss"] == by_hand["loss"]
    other = run(folder, *AUTO3D, "train", "small.yaml", "model.config.n_layer=3", "--plan", "plan.json", code=2)
    assert "the plan was made for model" in other.stderr


def test_a_factory_and_weights_of_ones_own(folder):
    (folder / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.Linear(8, width), nn.Linear(width, 3)\n"
        "    def forward(self, x, y):\n"
        "        return nn.functional.cross_entropy(self.b(torch.relu(self.a(x))), y)\n"
        "def make(width=16):\n"
        "    return Net(width)\n"
        "if __name__ == '__main__':\n"
        "    from safetensors.torch import save_file\n"
        "    save_file({name: torch.zeros_like(p) for name, p in make().named_parameters()}, 'zeros.safetensors')\n"
    )
    (folder / "own.yaml").write_text(
        "model: {factory: 'mine:make'}\n"
        "data: {source: synthetic, inputs: {x: {kind: normal, shape: [8]}, y: {kind: integers, high: 3}}}\n"
        "training: {global_batch: 8, iterations: 2}\n"
        "plan: {pp: 2, micro_batch_size: 4}\n"
    )
    drawn = train_json(folder, *AUTO3D, "train", "own.yaml", "--json")
    run(folder, sys.executable, "mine.py")
    zeros = train_json(folder, *AUTO3D, "train", "own.yaml", "--json", "model.weights=zeros.safetensors")
    assert zeros["loss"][0] == pytest.approx(1.0986122886681098)  # ln 3: all classes alike
    assert drawn["loss"][0] != zeros["loss"][0]
    refused = run(folder, *AUTO3D, "train", "own.yaml", "model.arguments.widht=3", code=2)
    assert "model.arguments: refused by mine:make" in refused.stderr


def test_the_loss_falls_on_real_text(tmp_path):
    """From about ln(256) = 5.5 to below 3.5 in 60 iterations of the shipped recipe."""
    result = train_json(tmp_path, *AUTO3D, "train", "tiny", "training.iterations=60", "--json")
    assert 5.0 < result["loss"][0] < 5.8
    assert result["loss"][-1] < 3.5


# Sweeps


def processes_below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ranks_below(pid: int) -> list[psutil.Process]:
    """Ranks are what a trial's own process forked."""
    found = []
    for process in processes_below(pid):
        try:
            if "submitit.core._submit" in process.cmdline() and "submitit.core._submit" in process.parent().cmdline():
                found.append(process)
        except (psutil.NoSuchProcess, AttributeError):
            continue
    return found


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 90) -> object:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)
    return value


def gone(processes: list[psutil.Process]) -> bool:
    def is_gone(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return all(is_gone(process) for process in processes)


def start_sweep(folder: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*AUTO3D, "sweep", "small.yaml", *SPACE, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def trial_lines(output: str) -> dict[str, str]:
    """Trial -> status, of the trials that a sweep ran."""
    return dict(re.findall(r"^\d+/\d+ (\S+)-[0-9a-f]{8} (\w+)", output, flags=re.MULTILINE))


def test_a_sweep_survives_killed_and_hung_ranks_and_runs_nothing_twice(folder):
    slow = "measure.iterations=400"  # long enough to be hit in the middle of an iteration
    sweep = start_sweep(folder, slow, "training.timeout_s=5")

    ranks = wait_until(lambda: len(r := ranks_below(sweep.pid)) == 2 and r, "the ranks of the first trial")
    time.sleep(2)
    everything = processes_below(sweep.pid)
    killed_at = time.monotonic()
    ranks[0].send_signal(signal.SIGKILL)
    wait_until(lambda: gone(everything), "the trial of the killed rank to be gone", timeout_s=15)
    assert time.monotonic() - killed_at < 15

    others = wait_until(lambda: len(r := ranks_below(sweep.pid)) == 2 and r, "the ranks of the second trial")
    time.sleep(2)
    others[1].send_signal(signal.SIGSTOP)
    output, _ = sweep.communicate(timeout=200)
    assert sweep.returncode == 0, output
    assert gone(others)
    statuses = trial_lines(output)
    assert list(statuses.values()) == ["failed", "timeout", "ok", "ok"], output
    assert "was killed by SIGKILL" in output
    assert re.search(r"rank 0 waited 5 s for (activations|gradients|the)", output), output

    again = run(folder, *AUTO3D, "sweep", "small.yaml", *SPACE, slow, "training.timeout_s=5")
    assert trial_lines(again.stderr) == {}, "every trial has ended, so none runs"

    retried = run(folder, *AUTO3D, "sweep", "small.yaml", *SPACE, slow, "training.timeout_s=5", "--retry")
    assert list(trial_lines(retried.stderr).values()) == ["ok", "ok"]
    assert set(trial_lines(retried.stderr)) == set(list(statuses)[:2])


def test_the_table_is_complete_and_best_first(folder):
    shown = run(folder, *AUTO3D, "sweep", "small.yaml", *SPACE)
    with (folder / "results/small/table.csv").open() as file:
        records = list(csv.DictReader(file))
    assert [record["status"] for record in records] == ["ok"] * 4
    times = [float(record["iteration_s"]) for record in records]
    assert times == sorted(times)
    for record in records:
        assert float(record["samples_per_s"]) == pytest.approx(8 / float(record["iteration_s"]))
        assert float(record["tokens_per_s"]) == pytest.approx(8 * 32 / float(record["iteration_s"]))
        assert int(record["peak_bytes"]) > 0
    markdown = (folder / "results/small/table.md").read_text()
    assert markdown.count("\n|") == 5
    assert "Measured" in markdown
    assert "make sweep RECIPE=small" in markdown
    assert json.loads(run(folder, *AUTO3D, "table", "small.yaml", "--json").stdout)[0]["iteration_s"] == times[0]
    best = json.loads((folder / "results/small/best_plan.json").read_text())
    assert [str(best[key]) for key in ("dp", "pp", "schedule")] == [records[0][key] for key in ("dp", "pp", "schedule")]
    assert "results/small/best_plan.json" in shown.stdout
    for private in (folder / "runs/small", *(folder / "runs/small/trials").glob("*/job")):
        assert private.stat().st_mode & 0o077 == 0, private

    other = run(folder, *AUTO3D, "table", "small.yaml", "training.global_batch=16", code=2)
    assert "no finished trial" in other.stderr, "trials of another batch are not shown as this one's"


def test_a_trial_that_fails_shows_its_error_and_the_sweep_goes_on(folder):
    (folder / "fragile.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embedding, self.b = nn.Embedding(8, 16), nn.Linear(16, 4)\n"
        "    def forward(self, x):  # a micro-batch of 1 reads beyond the embedding\n"
        "        shift = 8 // (x.shape[0] * x.shape[0])\n"
        "        return nn.functional.cross_entropy(self.b(self.embedding(x + shift)), x)\n"
        "def make():\n"
        "    return Net()\n"
    )
    (folder / "fragile.yaml").write_text(
        "model: {factory: 'fragile:make'}\n"
        "data: {source: synthetic, inputs: {x: {kind: integers, high: 4}}}\n"
        "training: {global_batch: 4}\n"
        "search: {dp: [1], pp: [1], micro_batch_size: [1, 2], schedule: [1f1b], allow_idle_devices: true}\n"
    )
    done = run(folder, *AUTO3D, "sweep", "fragile.yaml")
    assert list(trial_lines(done.stderr).values()) == ["failed", "ok"]
    assert "IndexError: index out of range" in done.stderr
    assert re.findall(r"\| (\w+) +\|$", (folder / "results/fragile/table.md").read_text(), re.MULTILINE) == [
        "status",
        "ok",
        "failed",
    ]


@pytest.mark.parametrize("how", ["ctrl-c", "terminate"])
def test_an_interrupted_sweep_leaves_no_process_and_resumes(folder, how):
    sweep = start_sweep(folder, "measure.iterations=60", "search.dp=[1]")
    wait_until(lambda: (folder / "runs/small/trials").glob("*/measurement.json").__next__ and
               list((folder / "runs/small/trials").glob("*/measurement.json")), "the first trial to end")  # fmt: skip
    wait_until(lambda: len(ranks_below(sweep.pid)) == 2, "the ranks of the second trial")
    everything = processes_below(sweep.pid)
    if how == "ctrl-c":
        os.killpg(sweep.pid, signal.SIGINT)
    else:
        sweep.terminate()
    output, _ = sweep.communicate(timeout=30)
    assert sweep.returncode == 130, output
    assert output.rstrip().endswith("the same command runs the rest")
    assert "Traceback" not in output
    wait_until(lambda: gone(everything), "all processes to be gone", timeout_s=10)
    resumed = run(folder, *AUTO3D, "sweep", "small.yaml", *SPACE, "measure.iterations=60", "search.dp=[1]")
    assert len(trial_lines(resumed.stderr)) == 1
    assert len(json.loads(run(folder, *AUTO3D, "table", "small.yaml", "measure.iterations=60", "--json").stdout)) == 2


def test_two_sweeps_of_one_recipe_do_not_mix(folder):
    sweep = start_sweep(folder)
    wait_until(lambda: ranks_below(sweep.pid), "the first sweep to be at work")
    refused = run(folder, *AUTO3D, "sweep", "small.yaml", *SPACE, code=2)
    assert f"another sweep of small is running (process {sweep.pid})" in refused.stderr
    output, _ = sweep.communicate(timeout=200)
    assert sweep.returncode == 0, output


def test_plan_tells_why_candidates_are_pruned(folder):
    found = json.loads(run(folder, *AUTO3D, "plan", "small.yaml", "search.micro_batch_size=[1,2,3]", "--json").stdout)
    reasons = [candidate["reason"] for candidate in found if candidate["plan"] is None]
    for words in ("needs 16 devices; the cluster has 4", "uses 1 of 4 devices", "global_batch: 8 does not divide",
                  "one stage has no pipeline"):  # fmt: skip
        assert any(words in reason for reason in reasons), words
    kept = [candidate for candidate in found if candidate["plan"]]
    assert {(c["dp"], c["pp"]) for c in kept} == {(1, 4), (2, 2), (4, 1)}
    assert all(candidate["reason"] == "" for candidate in kept)
    assert not (folder / "runs").exists(), "it trains nothing"
    shown = run(folder, *AUTO3D, "plan", "small.yaml").stdout
    assert "pruned because" in shown


def test_a_space_without_a_plan_is_refused(folder):
    refused = run(folder, *AUTO3D, "sweep", "small.yaml", "search.micro_batch_size=[3]", code=2)
    assert f"search: none of its {9 * len(SCHEDULES)} candidates can run" in refused.stderr
    assert "because" in refused.stderr
    wide = run(folder, *AUTO3D, "plan", "small.yaml", "training.global_batch=7", "search.dp=[2,4]", "search.pp=[1]",
               "search.micro_batch_size=[2]", "search.allow_idle_devices=true", code=2)  # fmt: skip
    assert "multiple of" in wide.stderr
    fine = run(folder, *AUTO3D, "plan", "small.yaml", "training.global_batch=9", "search.micro_batch_size=[3]",
               "search.allow_idle_devices=true")  # fmt: skip
    assert "to run" in fine.stdout, "the recipe's own plan does not divide 9, but a sweep does not read it"
