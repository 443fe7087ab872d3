"""What a training leaves in files, read back by the tools that they are for, and what it prints."""

import gzip
import io
import json
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from auto3d.runtime.watch.metrics import Metrics
from auto3d.runtime.watch.slow_rank import SlowRank
from auto3d.schedule.operation import Kind
from launch.console.training_progress import changes, training_progress
from launch.watch.metrics_file import MetricsFile, json_of

ROOT = Path(__file__).parents[3]
SECRET = "0123456789abcdef0123456789abcdef01234567"
TRAIN = ["train", "own.yaml", "training.iterations=4", "training.checkpoint_every=2"]


def metrics(iteration: int, **others) -> Metrics:
    rates = dict.fromkeys(("tokens_per_s", "model_flops_per_s_per_device", "hardware_flops_per_s_per_device", "mfu"))
    known = {"loss": 1.0, "learning_rate": 0.1, "grad_norm": 2.0, "iteration_s": 0.5, "samples_per_s": 8.0}
    return Metrics(iteration=iteration, peak_bytes=None, peak_rank=None, **{**known, **rates, **others})


def lines_of(folder: Path) -> list[dict]:
    (file,) = folder.glob("runs/own/metrics/*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def history_of(file: Path) -> list[dict]:
    """The metrics in an offline run of W&B: records in the format of LevelDB's log, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, pending, history = file.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # a block ends with a few bytes that hold nothing
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        pending += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            record = Record.FromString(pending)
            pending = b""
            if record.HasField("history"):
                items = record.history.item
                history.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return history


def test_a_resumed_training_has_each_iteration_once_everywhere(folder, no_slurm, auto3d, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    arguments = [*TRAIN, "training.report_to=[tensorboard,wandb]", f"launch.setup=['export TOKEN={SECRET}']"]
    first = auto3d(*arguments, "--json")
    record = json.loads(first.out)
    before = lines_of(folder)
    (newest,) = folder.glob("runs/own/checkpoints/*/iteration-00000004")
    shutil.rmtree(newest)
    with next(folder.glob("runs/own/metrics/*/metrics.jsonl")).open("a") as file:
        file.write('{"iteration": 5, "lo')  # a killed process leaves such a line
    second = auto3d(*arguments)
    assert "continuing after iteration 2 of 4" in second.err
    after = lines_of(folder)
    assert [line["iteration"] for line in after] == [1, 2, 3, 4]
    assert [line["loss"] for line in after] == [line["loss"] for line in before] == record["loss"]
    assert [line["grad_norm"] for line in before] == record["grad_norm"]
    assert [line["learning_rate"] for line in after] == [1e-3] * 4
    (events,) = folder.glob("runs/own/metrics/*/tensorboard")
    read = EventAccumulator(str(events))
    read.Reload()
    assert [event.step for event in read.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in read.Scalars("loss")] == pytest.approx(record["loss"])
    assert {"learning_rate", "grad_norm", "iteration_s", "samples_per_s"} <= set(read.Tags()["scalars"])
    runs = sorted(folder.glob("runs/own/metrics/*/wandb/offline-run-*/*.wandb"))
    told = sorted([(step["_step"], step["loss"]) for step in history_of(run)] for run in runs)
    assert told == [list(enumerate(record["loss"], 1)), list(enumerate(record["loss"], 1))[2:]]
    seen = [first.out, first.err, second.out, second.err]
    files = [file for file in folder.glob("runs/own/metrics/**/*") if file.is_file()]
    assert not [file for file in files if SECRET.encode() in file.read_bytes()]
    assert not any(SECRET in text for text in seen)
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.glob("runs/own/metrics/*"))


def test_wandb_is_refused_before_training_where_it_cannot_report(folder, no_slurm, auto3d, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    refused = auto3d(*TRAIN, "training.report_to=[wandb]", code=2).err
    assert "training.report_to: found 'wandb', which has no account here; log in (wandb login)" in refused
    refused = auto3d(*TRAIN, "training.report_to=[mlflow]", code=2).err
    assert "training.report_to: found ['mlflow']; it takes" in refused


def test_wandb_is_refused_where_it_is_not_installed(folder, tmp_path):
    (installed,) = {Path(module.__file__).parents[1] for module in (pytest,)}
    without = tmp_path / "packages"
    without.mkdir()
    for package in installed.iterdir():
        if not package.name.startswith("wandb"):
            (without / package.name).symlink_to(package)
    assert "wandb" in packages_distributions()
    arguments = [sys.executable, "-S", "-m", "launch.main", *TRAIN, "training.report_to=[wandb]"]
    environment = {"PATH": str(folder), "PYTHONPATH": f"{ROOT}:{without}", "HOME": str(tmp_path)}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2, done.stderr
    assert "training.report_to: found 'wandb', which is not installed; install it (pip install wandb)" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "runs").exists()


def test_an_outlet_that_fails_is_left_out(folder, no_slurm, auto3d):
    auto3d(*TRAIN)
    (file,) = folder.glob("runs/own/metrics/*/metrics.jsonl")
    file.unlink()
    file.mkdir()
    shutil.rmtree(folder / "runs/own/checkpoints")
    printed = auto3d(*TRAIN)
    assert printed.err.count("metrics.jsonl gets no more metrics of this training") == 1
    assert "4 iterations under" in printed.out


@pytest.mark.parametrize(("log_every", "lines"), [(None, [1, 100]), (40, [1, 40, 80, 100])])
def test_a_log_has_few_lines(log_every, lines):
    written = io.StringIO()
    with training_progress(Console(file=written, width=80), 100, log_every) as show:
        for iteration in range(1, 101):
            show(metrics(iteration))
    assert [int(line.split()[1].split("/")[0]) for line in written.getvalue().splitlines()] == lines


def test_a_slow_rank_is_printed_once_until_it_changes():
    one = SlowRank(1, "n1", 0, Kind.FORWARD, 1.5)
    assert changes((), (one,)) == [f"warning: {one}"]
    assert changes((one,), (SlowRank(1, "n1", 0, Kind.FORWARD, 1.7),)) == []
    other = SlowRank(1, "n1", 0, Kind.BACKWARD, 1.7)
    assert changes((one,), (other,)) == [f"warning: {other}"]
    assert changes((one,), ()) == ["rank 1 on n1 is no longer slow"]


def test_a_file_of_metrics_holds_no_number_that_json_lacks(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 1)
    file.write(metrics(1, loss=float("nan")))
    file.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == json_of(metrics(1, loss=None)) | {"slow": []}


@pytest.mark.parametrize("emulated", [True, False])
def test_a_traced_training_prints_predicted_beside_measured(folder, no_slurm, auto3d, emulated):
    options = (
        ["training.compute=emulated", "emulation.forward_s=0.004", "emulation.backward_s=0.006"] if emulated else []
    )
    printed = auto3d(*TRAIN, *options, "--trace")
    (file,) = folder.glob("runs/own/metrics/*/trace/iteration-3.json.gz")
    assert str(file.relative_to(folder)) in printed.err
    assert len(list((file.parent / "iteration-3").iterdir())) == 2
    with gzip.open(file) as stream:
        events = json.load(stream)["traceEvents"]
    count = Counter(event["args"]["name"].split(", ")[-1] for event in events if event["name"] == "process_name")
    assert count == ({"measured": 2, "simulated": 2} if emulated else {"measured": 2})
    rows = [line.split() for line in printed.err.splitlines() if " forward " in line]
    assert [row[:3] for row in rows] == [["0", "forward", "2"], ["1", "forward", "2"]]
    assert all(row[3] == ("4.000" if emulated else "-") for row in rows)
    assert ("predicted by emulation" if emulated else "nothing is predicted: the recipe names no") in printed.err
    assert os.environ["KINETO_LOG_LEVEL"]
