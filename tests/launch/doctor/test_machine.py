"""The description of a machine: GPUs by any version of nvidia-smi, and only environment variables from a list."""

from dataclasses import replace

import pytest

from launch.doctor.gpu_checks import gpu_check, same_libraries, variable_check
from launch.doctor.machine import GpuReport, this_machine
from launch.doctor.report import Verdict

H100 = "NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15"


def install(folder, monkeypatch, script: str) -> None:
    """Install an nvidia-smi that runs ``script``."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_new_driver_reports_all_fields(tmp_path, monkeypatch):
    lines = [f"{H100}, 9.0, Disabled, 0", f"{H100}, 9.0, [N/A], 3"]
    install(tmp_path, monkeypatch, f"printf '{lines[0]}\\n{lines[1]}\\n'")
    machine = this_machine()
    first = GpuReport("NVIDIA H100 80GB HBM3", "81559 MiB", "550.54.15", "9.0", "Disabled", "0")
    assert machine.gpus == [first, replace(first, mig="", ecc_errors="3")]
    assert machine.devices.endswith("cores, 2 NVIDIA H100 80GB HBM3, 81559 MiB")
    check = gpu_check("gpus", machine, needed=True)
    assert check.verdict is Verdict.WARNING
    assert "driver 550.54.15, torch has " in check.found
    assert check.found.endswith("compute capability 9.0, MIG disabled, uncorrected ECC errors: GPU 1 has 3")
    assert "launch.exclude" in check.advice


def test_a_driver_that_lacks_a_field_gets_a_shorter_query(tmp_path, monkeypatch):
    refuses = 'case "$1" in *compute_cap*) echo "Field \\"compute_cap\\" is not a valid field"; exit 2;; esac'
    install(tmp_path, monkeypatch, f"{refuses}\necho '{H100}'")
    assert this_machine().gpus == [GpuReport("NVIDIA H100 80GB HBM3", "81559 MiB", "550.54.15")]


@pytest.mark.parametrize("script", ["echo 'No devices were found'", "echo 'NVIDIA-SMI has failed'; exit 9"])
def test_a_machine_without_gpus_has_one_line(tmp_path, monkeypatch, script):
    install(tmp_path, monkeypatch, script)
    machine = this_machine()
    assert machine.gpus == []
    check = gpu_check("gpus", machine, needed=False)
    assert check.verdict is Verdict.OK
    assert check.found.startswith("nvidia-smi lists none; torch has ")
    assert same_libraries([machine, machine]).found == "no node has a GPU"


GPU = GpuReport("H100", "80 GiB", "550.54.15")


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        ({}, Verdict.OK, "the same on all"),
        ({"gpus": [replace(GPU, driver="535.1")]}, Verdict.WARNING, "n1 has driver 550.54.15; n2 has driver 535.1"),
        ({"nccl": "2.19.3"}, Verdict.ERROR, "n1 has NCCL 2.27.3; n2 has NCCL 2.19.3"),
        ({"cuda": ""}, Verdict.ERROR, "n1 has CUDA of torch 12.8; n2 has CUDA of torch none"),
    ],
)
def test_nodes_with_different_libraries_are_reported(change, verdict, words):
    first = replace(this_machine(), host="n1", gpus=[GPU], nccl="2.27.3", cuda="12.8")
    check = same_libraries([first, replace(first, host="n2", **change)])
    assert (check.verdict, check.found) == (verdict, words)
    assert bool(check.advice) == (verdict is not Verdict.OK)


def test_mig_is_a_warning_only_if_ranks_need_the_gpus():
    machine = replace(this_machine(), gpus=[replace(GPU, mig="Enabled")])
    assert gpu_check("gpus", machine, needed=True).verdict is Verdict.WARNING
    assert gpu_check("gpus", machine, needed=False).verdict is Verdict.OK


def test_only_listed_variables_are_shown(monkeypatch):
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    monkeypatch.setenv("NCCL_SECRET", "hunter2")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    check = variable_check("variables", this_machine())
    assert check.verdict is Verdict.OK
    assert "NCCL_IB_HCA=mlx5_0" in check.found
    assert "hunter2" not in check.found
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    check = variable_check("variables", this_machine())
    assert check.verdict is Verdict.WARNING
    assert check.advice == "unset CUDA_LAUNCH_BLOCKING: it makes the host wait for each kernel"
