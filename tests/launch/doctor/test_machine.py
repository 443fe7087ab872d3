"""The description of a machine: GPUs by any version of nvidia-smi, and only environment variables from a list."""

from dataclasses import replace

import pytest

from launch.doctor.gpu_checks import gpu_check, runs_on, same_libraries, variable_check
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


OF_2_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")  # architectures of the wheel on PyPI


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (OF_2_13, "7.0", False),  # V100
        (OF_2_13, "6.0", False),  # P100
        (OF_2_13, "8.9", True),  # L4: machine code for 8.6 runs on it
        (OF_2_13, "9.0", True),
        (OF_2_13, "11.0", False),
        ((*OF_2_13, "compute_100"), "11.0", True),  # compiled when it is loaded
        (("sm_86",), "8.0", False),
        (("sm_90a",), "9.0", True),
        (("sm_90a",), "10.0", False),
    ],
)
def test_the_gpus_on_which_a_build_of_torch_runs(architectures, capability, runs):
    assert runs_on(architectures, capability) == runs
    gpu = replace(GPU, capability=capability, driver="580.65.06")
    machine = replace(this_machine(), gpus=[gpu], cuda="13.0", architectures=architectures)
    check = gpu_check("gpus", machine, needed=True)
    assert (check.verdict is Verdict.ERROR) == (not runs)
    assert runs or (f"none for {capability}" in check.found and "TORCH=" in check.advice)


@pytest.mark.parametrize(
    ("cuda", "driver", "least"), [("13.0", "550.54.15", 580), ("12.8", "470.1", 525), ("12.8", "535.1", 0)]
)
def test_a_driver_that_is_too_old_for_torch_is_an_error(cuda, driver, least):
    machine = replace(this_machine(), gpus=[replace(GPU, driver=driver)], cuda=cuda, architectures=OF_2_13)
    check = gpu_check("gpus", machine, needed=True)
    assert (check.verdict is Verdict.ERROR) == bool(least)
    assert not least or f"CUDA {cuda} needs a driver of {least} or later" in check.found
    assert gpu_check("gpus", machine, needed=False).verdict is (Verdict.WARNING if least else Verdict.OK)


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
