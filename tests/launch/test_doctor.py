"""`auto3d doctor` on this machine, with real processes; on SLURM: tests/slurm/test_doctor.py."""

import json
import os
import signal
import subprocess
import sys

import pytest

from launch import link_probe, training_probe
from launch.doctor import clock

LOCAL = ["own.yaml", "launch.executor=local"]


def doctor(folder, *arguments: str, code: int, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "launch.main", "doctor", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_a_healthy_machine(folder):
    checks = {check["what"]: check for check in json.loads(doctor(folder, *LOCAL, "--json", code=0).stdout)}
    assert {check["verdict"] for what, check in checks.items() if what != "mpi"} == {"ok"}
    assert f"{len(os.sched_getaffinity(0))} cores" in checks["devices"]["found"]
    rates = checks["all-reduce here"]["rates"]
    assert [rate["size_bytes"] for rate in rates][:3] == [2**12, 2**16, 2**20]
    for rate in rates:
        assert rate["bus_gbit_per_s"] == pytest.approx(rate["algorithm_gbit_per_s"]), "of two ranks"
    once = [rate for rate in rates if rate["repetitions"] % 2]  # where the median is one of those timed
    for rate in once:
        assert rate["algorithm_gbit_per_s"] == pytest.approx(8e-9 * rate["size_bytes"] / rate["seconds"])


def test_all_devices_and_a_report_for_a_bug(folder, auto3d, monkeypatch):
    monkeypatch.setitem(link_probe.SIZES, "cpu", (2**12,))
    monkeypatch.setattr("launch.probe.SIZES", (2**12,))
    monkeypatch.setitem(training_probe.SIZES, "cpu", training_probe.Size(2, 16, 2, 8, 2))
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
    assert "used at most" in report
    assert "hunter2" not in report
    assert str(folder) not in report


def test_an_interrupt_leaves_nothing_behind(folder):
    command = [sys.executable, "-m", "launch.main", "doctor", *LOCAL, "--devices"]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in process.stderr:
        if "exchange messages between neighbours" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()) == (130, ["auto3d: interrupted"])
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_an_interface_that_is_not_there_is_an_error_with_what_to_do(folder):
    done = doctor(folder, *LOCAL, code=1, GLOO_SOCKET_IFNAME="nosuch")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert "rendezvous here" in line
    assert "What to do: GLOO_SOCKET_IFNAME is nosuch, and " in line
    assert "unset it" in line
    assert "Traceback" not in done.stdout + done.stderr


def test_no_slurm_is_an_error_only_where_it_is_asked_for(folder, tmp_path):
    (tmp_path / "bin").mkdir()
    path = str(tmp_path / "bin")  # without sinfo
    done = doctor(folder, "own.yaml", "launch.executor=slurm", code=1, PATH=path)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert "slurm: there is no sinfo here" in line
    done = doctor(folder, "own.yaml", "launch.executor=auto", code=0, PATH=path)
    assert "ok      slurm: there is no sinfo here; trials run on this machine" in done.stdout


def test_the_recipe_may_be_left_out_and_is_checked(folder):
    assert "launch.executor" in doctor(folder, "launch.executor=nowhere", code=2).stderr
    assert "there is no 'nosuch'" in doctor(folder, "nosuch", code=2).stderr


@pytest.mark.parametrize(
    ("least_s", "most_s", "verdict"),
    [
        (-0.1, 0.2, "ok"),
        (0.9, 1.4, "ok"),  # it may be 0.9
        (1.1, 1.4, "warning"),
        (-9.0, -1.1, "warning"),
        (-3.0, 50.0, "ok"),  # nothing is known
        (31.0, 32.0, "error"),
        (-3600.1, -3600.0, "error"),
    ],
)
def test_a_clock_is_wrong_where_that_is_certain(least_s, most_s, verdict):
    assert clock("n1", least_s, most_s).verdict == verdict
