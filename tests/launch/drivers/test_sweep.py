"""Sweeps as a user runs them: real processes, real trials, real faults."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from auto3d.runtime.measurement import Measurement
from auto3d.search.axes import Candidate
from launch.model.graphs import PlanningModel
from launch.model.sweep_plans import plans_of_sweep
from launch.recipe.load import load
from launch.store.trials import exclusive
from tests.launch.conftest import write_recipes
from tests.promises.running import PROGRAMS
from tests.soak import soak

AUTO3D = [sys.executable, str(PROGRAMS / "auto3d")]


@pytest.fixture
def folder(same_folder):
    return same_folder


def start_sweep(folder: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*AUTO3D, "sweep", "own.yaml", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def forks_trials(process: psutil.Process) -> bool:
    """Whether this is the process that a sweep forks its trials from, or was forked from it."""
    return "launch.executors" in process.cmdline() or process.name() == "launch.executors"[:15]  # if it was forked


def warm_below(pid: int) -> list[psutil.Process]:
    """The process that trials are forked from; not the process that captures the model before them."""
    found = []
    for process in processes_below(pid):
        with suppress(psutil.NoSuchProcess, AttributeError):
            found += [process] * (forks_trials(process) and not forks_trials(process.parent()))
    return found


def trial_of(pid: int) -> list[psutil.Process]:
    """All processes of the one trial that a sweep runs."""
    (warm,) = warm_below(pid)
    (trial,) = warm.children()
    return [trial, *processes_below(trial.pid)]


def processes_below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ranks_below(pid: int) -> list[psutil.Process]:
    """Ranks are what the process of a trial forked."""
    found = []
    for process in processes_below(pid):
        with suppress(psutil.NoSuchProcess, AttributeError):
            if all(map(forks_trials, [process, process.parent(), process.parent().parent()])):
                found.append(process)
    return found


def two_ranks_at_work(sweep: subprocess.Popen) -> list[psutil.Process]:
    """The two ranks of the running trial, in the middle of an iteration."""
    ranks = wait_until(lambda: len(found := ranks_below(sweep.pid)) == 2 and found, "the ranks of a trial")
    # Building takes a rank less than 0.1 s of processor time.
    wait_until(lambda: all(sum(rank.cpu_times()[:2]) > 0.3 for rank in ranks), "the ranks to be at work")
    return ranks


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


def trial_lines(output: str) -> dict[str, str]:
    """The status of each trial that a sweep ran, by name."""
    return dict(re.findall(r"^\d+/\d+ (\S+)-[0-9a-f]{8} (\w+)", output, flags=re.MULTILINE))


# Faults

LONG = "measure.iterations=1000000"
HIT = ["search.micro_batch_size=[2,4,8]", "measure.iterations=20"]  # with a wide model: half a second of iterations


def widen(folder: Path) -> None:
    """Make the model so wide that an iteration computes for tens of milliseconds, and waits for few messages."""
    text = (folder / "mine.py").read_text()
    (folder / "mine.py").write_text(text.replace("width=16", f"width={2**18}"))


def test_a_sweep_survives_killed_and_hung_ranks_and_interrupts_and_runs_nothing_twice(folder, auto3d):
    widen(folder)
    space = HIT
    sweep = start_sweep(folder, *space, "training.timeout_s=4")
    ranks = two_ranks_at_work(sweep)
    everything = trial_of(sweep.pid)
    ranks[0].send_signal(signal.SIGKILL)
    wait_until(lambda: gone(everything), "the trial of the killed rank to be gone", timeout_s=15)
    two_ranks_at_work(sweep)
    everything = trial_of(sweep.pid)
    sweep.terminate()
    output, _ = sweep.communicate(timeout=30)
    assert sweep.returncode == 130, output
    assert output.rstrip().endswith("the same command runs the rest")
    assert "Traceback" not in output
    assert gone(everything)
    (killed,) = trial_lines(output)

    sweep = start_sweep(folder, *space, "training.timeout_s=4")
    ranks = two_ranks_at_work(sweep)
    ranks[1].send_signal(signal.SIGSTOP)
    output, _ = sweep.communicate(timeout=200)
    assert sweep.returncode == 0, output
    assert gone(ranks)
    assert list(trial_lines(output).values()) == ["timeout", "ok"], output
    assert "was killed by SIGKILL" in output, "why the first failed, which did not run again"
    assert re.search(r"rank 0 on .*, in iteration .* waited 4 s for (activations|gradients|the)", output), output
    hung, _ = trial_lines(output)

    again = auto3d("sweep", "own.yaml", *space)  # another time-out does not change what is measured
    assert trial_lines(again.err) == {}, "every trial has ended, so none runs"
    assert again.err.count("(not run again)") == 2
    command = shlex.join(["auto3d", "sweep", "own.yaml", *space, "--retry"])
    assert f"2 trials failed or timed out; to run again: {command}" in again.err
    retried = auto3d("sweep", "own.yaml", *space, "--retry")
    assert trial_lines(retried.err) == {killed: "ok", hung: "ok"}


def test_trials_are_forked_from_one_process_and_each_dies_by_itself(folder):
    """A trial that is killed ends itself alone; where the process that forks trials dies, it is started again."""
    widen(folder)
    sweep = start_sweep(folder, *HIT)
    two_ranks_at_work(sweep)
    (first,) = warm_below(sweep.pid)
    trial, *ranks = trial_of(sweep.pid)
    trial.send_signal(signal.SIGSEGV)
    wait_until(lambda: gone([trial, *ranks]), "the trial and its ranks to be gone", timeout_s=15)
    two_ranks_at_work(sweep)
    (second,) = warm_below(sweep.pid)
    assert second == first
    everything = trial_of(sweep.pid)
    second.kill()
    output, _ = sweep.communicate(timeout=200)
    assert sweep.returncode == 0, output
    assert gone(everything)
    assert list(trial_lines(output).values()) == ["failed", "failed", "ok"], output
    assert "its process was killed by SIGSEGV" in output
    assert "the process that forks trials was killed by SIGKILL, as the kernel does when memory runs out" in output


def interrupt_twice(sweep: subprocess.Popen) -> None:
    os.killpg(sweep.pid, signal.SIGINT)
    time.sleep(0.05)
    os.killpg(sweep.pid, signal.SIGINT)


ENDS = {
    "ctrl-c": interrupt_twice,
    "terminate": subprocess.Popen.terminate,
    "kill": subprocess.Popen.kill,  # kills the driver only
}


# A sweep that is terminated while a trial runs is above.
CUT_SHORT = [("kill", "running"), ("ctrl-c", "submitted"), *soak(("terminate", "submitted"))]


@pytest.mark.parametrize(("how", "when"), CUT_SHORT)
def test_an_interrupted_sweep_leaves_no_process(folder, how, when):
    sweep = start_sweep(folder, LONG)
    if when == "running":
        two_ranks_at_work(sweep)
    else:
        wait_until(lambda: warm_below(sweep.pid), "the process that trials are forked from")
    everything = processes_below(sweep.pid)
    ENDS[how](sweep)
    output, _ = sweep.communicate(timeout=30)
    if how != "kill":
        assert sweep.returncode == 130, output
        assert output.rstrip().endswith("the same command runs the rest")
        assert "Traceback" not in output
    wait_until(lambda: gone(everything) and not left_in(folder), "all processes to be gone", timeout_s=20)


def left_in(folder: Path) -> list[psutil.Process]:
    """Processes of trials that work in ``folder``, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if forks_trials(process) and process.cwd() == str(folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [process for process in found if not gone([process])]


def test_two_sweeps_of_one_recipe_do_not_mix(folder, auto3d):
    with exclusive(load("own.yaml")):
        refused = auto3d("sweep", "own.yaml", code=2)
    assert f"another sweep of own is running (process {os.getpid()})" in refused.err


# Results


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A folder in which a sweep of three trials has run; the one with a micro-batch of 1 failed."""
    folder = tmp_path_factory.mktemp("swept")
    write_recipes(folder)
    model = (folder / "mine.py").read_text()
    line = "    def forward(self, x, y):\n"
    fault = f"{line}        y = y + 8 // (x.shape[0] * x.shape[0]) // 8 * 3\n"  # a target beyond the classes
    wide = model.replace("width=16", "width=16384")  # large enough to be seen beside the interpreter's memory
    (folder / "mine.py").write_text(wide.replace(line, fault))
    command, path = [*AUTO3D, "sweep", "own.yaml", SPACE], f"{PROGRAMS}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}  # commands that it names begin with auto3d
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done


SPACE = "search.micro_batch_size=[1,2,4]"
DEVICE = "cluster.accelerator=./device.yaml"


@pytest.fixture
def in_swept(swept, monkeypatch):
    monkeypatch.chdir(swept[0])
    return swept[0]


def test_a_trial_that_fails_shows_its_error_and_the_sweep_goes_on(swept, in_swept, auto3d):
    _, done = swept
    assert list(trial_lines(done.stderr).values()) == ["failed", "ok", "ok"]
    fault = "what the model makes of y: found 4 in sample 0; the model takes whole numbers from 0 to 2"
    assert fault in done.stderr
    assert f"1 trial failed or timed out; to run again: auto3d sweep own.yaml '{SPACE}' --retry" in done.stderr
    hint = f"auto3d train own.yaml '{SPACE}' --plan tables/own/best_plan.json"
    assert hint in done.stdout
    auto3d(*shlex.split(hint)[1:])  # the hint works as it stands


def test_the_table_is_complete_and_best_first(in_swept, auto3d):
    shown = auto3d("table", "own.yaml").out
    with (in_swept / "tables/own/table.csv").open() as file:
        records = list(csv.DictReader(file))
    assert [record["status"] for record in records] == ["ok", "ok", "failed"]
    times = [float(record["iteration_s"]) for record in records[:2]]
    assert times == sorted(times)
    for record in records[:2]:
        assert float(record["samples_per_s"]) == pytest.approx(8 / float(record["iteration_s"]))
        assert int(record["peak_bytes"]) > 0
    markdown = (in_swept / "tables/own/table.md").read_text()
    assert markdown.count("\n|") == 4
    assert "Measured" in markdown
    assert f"Again: `auto3d sweep own.yaml '{SPACE}'`" in markdown
    assert f"Again: auto3d sweep own.yaml '{SPACE}'" in shown.splitlines()
    rows = json.loads(auto3d("table", "own.yaml", "--json").out)
    assert rows[0]["iteration_s"] == times[0]
    assert "what the model makes of y: found " in rows[2]["error"]
    best = json.loads((in_swept / "tables/own/best_plan.json").read_text())
    assert rows[0]["plan"] == best
    assert str(best["micro_batch_size"]) == records[0]["micro_batch_size"]
    for private in (in_swept / "runs/own", *(in_swept / "runs/own/trials").glob("*/job")):
        assert private.stat().st_mode & 0o077 == 0, private


def test_the_table_is_of_the_last_sweep_alone(in_swept, auto3d):
    for overrides in (["training.global_batch=16"], ["search.micro_batch_size=[2]"]):
        refused = auto3d("table", "own.yaml", *overrides, code=2).err
        assert "its last sweep had other settings" in refused
        assert refused.rstrip().endswith(shlex.join(["auto3d", "sweep", "own.yaml", *overrides]))
    assert auto3d("table", "own.yaml", SPACE).out == auto3d("table", "own.yaml").out

    narrow = auto3d("sweep", "own.yaml", "search.micro_batch_size=[4]")
    assert trial_lines(narrow.err) == {}, "the one trial has run"
    assert len(json.loads(auto3d("table", "own.yaml", "--json").out)) == 1
    few = auto3d("sweep", "own.yaml", "search.micro_batch_size=[4,2]", "search.max_trials=1")
    assert "1 candidate is left out" in few.err
    assert "1 more candidate is left out by search.max_trials = 1" in " ".join(few.out.split())

    recipe = in_swept / "own.yaml"
    before = recipe.read_text()
    recipe.write_text(before.replace("global_batch: 8", "global_batch: 16"))
    assert "the recipe has changed since its last sweep" in auto3d("table", "own.yaml", code=2).err
    recipe.write_text(before)
    auto3d("sweep", "own.yaml", SPACE)


def test_damaged_and_stray_files_do_not_harm(in_swept, auto3d):
    trials = in_swept / "runs/own/trials"
    (trials / "stray").write_text("")
    damaged = next(trials.glob("*mb4*")) / "measurement.json"
    for text in ("", "[" * 5000, damaged.read_text().replace('"iteration_s"', '"iteration"')):
        before = damaged.read_text()
        damaged.write_text(text)
        assert len(json.loads(auto3d("table", "own.yaml", "--json").out)) == 2
        damaged.write_text(before)
    assert "1 of 3 trials has not run" not in auto3d("table", "own.yaml").out
    sweep_file = in_swept / "runs/own/sweep.json"
    before = sweep_file.read_text()
    sweep_file.write_text("{")
    assert "no finished trial" in auto3d("table", "own.yaml", code=2).err
    sweep_file.write_text(before)


def test_a_trial_is_known_by_what_it_measures(folder):
    from launch.store.trials import trials_of
    from tests.test_plan import PLAN

    def name(*overrides: str) -> str:
        return trials_of(load("small.yaml", overrides), [PLAN])[0].name

    (folder / "a.txt").write_text("x" * 100)
    files = "data.files=[a.txt]"
    assert name("training.timeout_s=5", "training.iterations=9", "plan.pp=4", "launch.trial_timeout_s=9") == name()
    assert len({name(), name(files), name("training.seed=2"), name("measure.iterations=9")}) == 4
    before = name(files)
    os.utime(folder / "a.txt", ns=(1, 1))
    assert name(files) != before, "the file may hold something else now"


@pytest.mark.soak
def test_uneven_replicas_and_a_shared_optimizer_are_tried_and_told(folder, auto3d):
    (folder / "device.yaml").write_text("peak_tflops: {float32: 1}\nmemory_gb_per_s: 10\n")
    axes = ["search.replicas=[uneven]", "search.shard_optimizer=auto", "search.micro_batch_size=[4]"]
    done = auto3d("sweep", "own.yaml", "cluster.devices_per_node=3", "measure.warmup_iterations=0", *axes, DEVICE)
    assert "ZeRO-1" in done.out
    text = (folder / "tables" / "own" / "table.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert sorted((row["replicas"], row["shard_optimizer"], row["status"]) for row in rows) == [
        ("1+2", "False", "ok"),
        ("1+2", "True", "ok"),
    ]
    for row in rows:
        seconds = float(row["iteration_s"])
        rate = 6400 / seconds / 3  # per sample: 2 × 8 × 16 twice, without a gradient of x, and 2 × 16 × 3 three times
        assert float(row["model_flops_per_s_per_device"]) == pytest.approx(rate)
        assert float(row["mfu"]) == pytest.approx(rate / 1e12)
        assert float(row["prediction_error"]) == pytest.approx(float(row["predicted_s"]) / seconds - 1)
    auto3d("table", "own.yaml")
    assert (folder / "tables" / "own" / "table.csv").read_text() == text, "the sweep has stored its predictions"
    auto3d("table", "own.yaml", "--baseline", "shard_optimizer=true placement=megatron")
    refused = auto3d("table", "own.yaml", "--baseline", "placement=vertical", code=2).err
    assert "--baseline: no row matches 'placement=vertical'" in refused


@pytest.mark.soak
def test_a_sweep_trains_and_tabulates_tensor_parallel_plans(folder, auto3d):
    rules = "model.tensor_parallel={a: column, b: row}"
    axes = ["search.tp=[1,2]", "search.pp=[1]", "search.micro_batch_size=[4]", "search.sequence_parallel=auto", rules]
    auto3d("sweep", "own.yaml", "measure.warmup_iterations=0", *axes)
    rows = list(csv.DictReader((folder / "tables" / "own" / "table.csv").open()))
    shown = sorted((row["tp"], row["sequence_parallel"], row["status"]) for row in rows)
    assert shown == [("1", "False", "ok"), ("2", "False", "ok"), ("2", "True", "ok")]
    losses = set()
    for file in (folder / "runs").rglob("measurement.json"):
        found = Measurement.from_json(file.read_text())
        losses.add(tuple(round(loss, 5) for loss in found.loss))
        split = {name: (each.dim, each.blocks) for name, each in found.plan.split.items()}
        expected = {"a.weight": (0, (16,)), "a.bias": (0, (16,)), "b.weight": (1, (16,))}
        assert split == (expected if found.plan.tp == 2 else {})
    assert len(losses) == 1, "every plan trains the same"


@pytest.mark.soak  # the next test tunes too, and tables of sweeps have the same columns
def test_tune_tries_the_best_and_never_twice(folder, auto3d):
    arguments = ["tune", "own.yaml", "training.compute=emulated", "search.pp=[1,2]", "search.trials=2"]
    arguments += ["search.algorithm=random", "search.tp=[1,2]"]
    first = auto3d(*arguments)
    assert first.err.count(" ok ") == 2
    assert "mean error of 2 trials" in first.out
    assert "cost model" in (folder / "tables/own/tune.md").read_text()
    with (folder / "tables/own/tune.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        measured, devices = float(row["measured_s"]), int(row["dp"]) * int(row["tp"]) * int(row["pp"])
        assert float(row["model_flops_per_s_per_device"]) == pytest.approx(6400 / measured / devices)
        assert float(row["prediction_error"]) == pytest.approx(float(row["predicted_s"]) / measured - 1)
    assert [row["status"] for row in rows] == ["ok", "ok"]
    again = auto3d(*arguments)
    assert " ok " not in again.err
    assert again.out == first.out


@pytest.mark.soak
def test_tune_tries_the_fastest_again_in_turns_and_goes_on_after_an_interrupt(folder, auto3d):
    arguments = ["tune", "own.yaml", "training.compute=emulated", "search.pp=[1,2]", "search.micro_batch_size=[2,4]"]
    few = auto3d(*arguments, "search.trials=2")
    assert "each plan was tried once, so it is not known how certain their order is" in few.out
    sweep = subprocess.Popen(
        [*AUTO3D, *arguments, "search.trials=7"], cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert any(" ok " in line for line in sweep.stderr), "the first trial that is not remembered"
    os.killpg(sweep.pid, signal.SIGINT)
    _, rest = sweep.communicate(timeout=60)
    assert sweep.returncode == 130, rest
    done = auto3d(*arguments, "search.trials=7")
    manifest = [json.loads(line) for line in (folder / "runs/own/manifest.jsonl").read_text().splitlines()]
    ended = [entry["trial"] for entry in manifest if entry["state"] == "ended"]
    assert len(ended) == len(set(ended)), "what ended is kept"
    again = [trial for trial in ended if re.search(r"-[0-9a-f]{8}-2$", trial)]
    assert len(again) >= 2, "the fastest two at least ran a second time"
    lines = (folder / "tables/own/tune.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("|")]
    tries = rows[0].index("trials")
    counts = [int(row[tries]) for row in rows[2:]]
    assert sum(counts) <= 7
    assert counts[0] > 1, "the fastest was tried again"
    assert re.search(r"the fastest is (not )?certain", done.out)
    assert auto3d(*arguments, "search.trials=7").out == done.out, "nothing runs again, and the verdict is the same"
    status = auto3d("status", "own.yaml").out
    assert all(trial in status for trial in again)


def test_a_sweep_of_too_many_plans_runs_the_best_predicted_and_keeps_to_them(folder, auto3d):
    space = ["training.compute=emulated", "search.pp=[1,2]", "search.micro_batch_size=[1,2,4,8]"]
    ranked = json.loads(auto3d("plan", "own.yaml", *space, "--json").out)["candidates"]
    best = sorted((one["pp"], one["micro_batch_size"]) for one in ranked[:2])
    assert best != [(1, 1), (1, 2)], "the first that are listed"
    done = auto3d("sweep", "own.yaml", *space, "search.max_trials=2")
    assert f"{len(ranked) - 2} candidates are left out, the slowest by prediction" in done.err
    rows = json.loads(auto3d("table", "own.yaml", *space, "search.max_trials=2", "--json").out)
    assert sorted((row["pp"], row["micro_batch_size"]) for row in rows) == best

    recipe = load("own.yaml", [*space, "search.max_trials=2"])
    model = PlanningModel(recipe)
    fields = {name: ranked[-1][name] for name in Candidate.__dataclass_fields__}
    found = plans_of_sweep(model, before=[Candidate(**fields)])
    assert list(found.candidates.values()) == [Candidate(**fields)], "a candidate that was chosen before stays"


def test_a_space_without_plans_of_as_many_devices_is_refused_in_one_line(folder, auto3d):
    said = auto3d("sweep", "own.yaml", "cluster.devices_per_node=8", "search.allow_idle_devices=false", code=2).err
    assert said.splitlines()[-1].endswith("uses 2 of 8 devices, and allow_idle_devices is false")
    assert "Traceback" not in said
