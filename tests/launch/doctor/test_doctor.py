"""`auto3d doctor` on this machine, with real processes. tests/slurm/test_doctor.py runs it on SLURM."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch.doctor import all_checks, link_probe, training_probe
from launch.doctor.all_checks import clock
from launch.doctor.all_reduce_probe import AllReduce, Rate
from launch.doctor.device_probe import DeviceReport, ExchangeRun
from launch.doctor.exchange_probe import ExchangeResult
from launch.doctor.link_probe import Links, PairRate
from launch.doctor.machine import GpuReport, this_machine
from launch.doctor.node_probe import Answer, NodeReport
from launch.doctor.report import Verdict
from launch.doctor.slurm_probe import ProbeJob
from launch.doctor.training_probe import TrainedRank
from launch.recipe.load import load

LOCAL = ["own.yaml", "launch.executor=local"]


def test_a_healthy_machine(folder, auto3d):
    checks = {check["what"]: check for check in json.loads(auto3d("doctor", *LOCAL, "--json").out)}
    assert {check["verdict"] for what, check in checks.items() if what != "mpi"} == {"ok"}
    assert f"{len(os.sched_getaffinity(0))} cores" in checks["devices"]["found"]
    rates = checks["all-reduce here"]["rates"]
    assert [rate["size_bytes"] for rate in rates][:3] == [2**12, 2**16, 2**20]
    for rate in rates:
        assert rate["bus_gbit_per_s"] == pytest.approx(rate["algorithm_gbit_per_s"]), "the factor of 2 ranks is 1"
    odd = [rate for rate in rates if rate["repetitions"] % 2]  # their median is one of the measured times
    for rate in odd:
        assert rate["algorithm_gbit_per_s"] == pytest.approx(8e-9 * rate["size_bytes"] / rate["seconds"])


def test_the_report_has_all_lines_and_no_secrets(folder, auto3d, monkeypatch):
    monkeypatch.setitem(link_probe.SIZES, "cpu", (2**12,))
    monkeypatch.setattr("launch.doctor.all_reduce_probe.SIZES", (2**12,))
    monkeypatch.setitem(training_probe.SIZES, "cpu", training_probe.ModelSize(2, 16, 2, 8, 2))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("SOME_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(folder / "nccl"))
    printed = auto3d("doctor", *LOCAL, "cluster.devices_per_node=2", "--devices", "--report", "report.md")
    report = (folder / "report.md").read_text()
    assert printed.err.splitlines()[-1] == "written: report.md"
    lines = [line for line in printed.out.splitlines() if line.startswith(("ok", "warning"))]
    for line in lines:
        verdict, _, words = line.partition(" ")
        assert f"- **{verdict}** {words.strip()}" in report
    for what in ("versions", "gpus", "variables", "messages here", "exchange here", "training here", "memory here"):
        assert any(line.startswith(f"ok      {what}: ") for line in lines), what
    assert "peak /" in report
    assert "hunter2" not in report
    assert str(folder) not in report


def test_an_interrupt_leaves_nothing_behind(folder):
    command = [sys.executable, "-m", "launch.main", "doctor", *LOCAL, "--devices"]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in process.stderr:
        if "measuring messages between neighbours" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()) == (130, ["auto3d: interrupted"])
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_missing_interface_is_an_error_with_advice(folder, auto3d, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    done = auto3d("doctor", *LOCAL, code=1)
    (line,) = [line for line in done.out.splitlines() if line.startswith("error")]
    assert "rendezvous here" in line
    assert "What to do: GLOO_SOCKET_IFNAME is nosuch, and " in line
    assert "unset it" in line
    assert "Traceback" not in done.out + done.err


def test_missing_slurm_is_an_error_only_if_the_recipe_requires_it(folder, auto3d, no_slurm, monkeypatch):
    monkeypatch.setattr("launch.doctor.all_reduce_probe.SIZES", (2**12,))
    printed = auto3d("doctor", "own.yaml", "launch.executor=slurm", code=1).out
    (line,) = [line for line in printed.splitlines() if line.startswith("error")]
    assert "slurm: sinfo is not installed here" in line
    printed = auto3d("doctor", "own.yaml", "launch.executor=auto").out
    assert "ok      slurm: sinfo is not installed here; trials run on this machine" in printed


def test_the_recipe_is_optional_and_checked(folder, auto3d):
    assert "launch.executor" in auto3d("doctor", "launch.executor=nowhere", code=2).err
    assert "there is no 'nosuch'" in auto3d("doctor", "nosuch", code=2).err


@pytest.mark.parametrize(
    ("least_s", "most_s", "verdict"),
    [
        (-0.1, 0.2, "ok"),
        (0.9, 1.4, "ok"),  # the true difference may be 0.9 s
        (1.1, 1.4, "warning"),
        (-9.0, -1.1, "warning"),
        (-3.0, 50.0, "ok"),  # the true difference may be 0
        (31.0, 32.0, "error"),
        (-3600.1, -3600.0, "error"),
    ],
)
def test_a_clock_is_wrong_only_if_that_is_certain(least_s, most_s, verdict):
    assert clock("n1", least_s, most_s).verdict == verdict


def test_the_reports_of_nodes_become_lines(monkeypatch):
    """Two nodes with GPUs; the second has another NCCL and a device with wrong results."""
    gpu = GpuReport("H100", "80 GiB", "550.54.15", "9.0", "Disabled", "0")
    first = replace(this_machine(), host="n1", gpus=[gpu] * 2, usable_gpus=2, nccl="2.27.3", cuda="12.8")
    second = replace(first, host="n2", nccl="2.19.3", variables={"NCCL_P2P_DISABLE": "1"})
    trained = [TrainedRank(rank, f"n{rank // 2 + 1}", 2**30, 2**30, "") for rank in range(4)]
    trained[3] = replace(
        trained[3], difference="the loss differs by 0.1, where rounding explains 1e-05, in iteration 1"
    )
    devices = DeviceReport(
        4,
        "cuda",
        links=Links([PairRate((1, 2), True, 2**24, 5, 180.0, 170.0)], []),
        exchanges=[ExchangeRun(1, None, "rank 2 waited"), ExchangeRun(8, ExchangeResult(99, 1.0))],
        layout="dp=2 pp=2",
        training=trained,
    )
    summed = AllReduce(4, "nccl", met=True, correct=True, rates=[Rate(2**20, 3, 1.0, 1.0, 1.0)])
    reports = {
        number: NodeReport(machine, 1.0, Answer("t", 1.0), 1.0, "", summed, devices)
        for number, machine in enumerate((first, second))
    }
    probe_job = ProbeJob("7", Path("nowhere"), "t", 2, 1.0, 1.0, reports=reports)
    monkeypatch.setattr(all_checks, "run_probe", lambda *args, **options: probe_job)
    monkeypatch.setattr(all_checks, "partitions", lambda: {"gpu": 4})
    recipe = load("tiny", ("cluster.device=cuda", "cluster.devices_per_node=2"))
    found = {check.what: check for check in all_checks._nodes(recipe, first, True, 1.0, lambda line: None)}
    verdicts = {what: check.verdict.value for what, check in found.items() if check.verdict is not Verdict.OK}
    assert verdicts == {
        "variables of n2": "warning",
        "drivers and NCCL on nodes": "error",
        "exchange of n1 and n2 with 1 connection": "error",
        "training of n1 and n2": "error",
    }
    assert "compute capability 9.0, MIG disabled, uncorrected ECC errors: 0" in found["gpus of n1"].found
    assert found["messages of n1 and n2"].found.endswith("180.00 Gbit/s one way between nodes")
    assert found["exchange of n1 and n2 with 8 connections"].found.startswith("1f1b dp=1 pp=4, ")
    assert found["training of n1 and n2"].found.startswith("rank 3 on n2: the loss differs by 0.1")
    assert found["memory of n1 and n2"].memory == trained
