"""TF32 and deterministic algorithms. Each case runs in a new process, because the settings are global."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from auto3d.runtime.measurement import Environment
from auto3d.runtime.process.arithmetic import set_arithmetic, uses_tf32

CUDA = torch.device("cuda", 0)


def in_new_process(function: Callable, *arguments):
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(function, *arguments).result(timeout=60)


def touch_nothing() -> None:
    pass


def write_newer_interface() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"


def write_every_backend() -> None:
    torch.backends.fp32_precision = "tf32"


def write_older_interface() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = False


def precisions(before: Callable[[], None], tf32: bool) -> tuple[list[str], list[bool], str, bool]:
    """The settings according to both interfaces of torch, after a user's module has called ``before``."""
    before()
    set_arithmetic(CUDA, tf32=tf32, deterministic=False)
    cudnn = torch.backends.cudnn
    newer = [torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]
    older = [torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32]
    return newer, older, torch.get_float32_matmul_precision(), uses_tf32()


@pytest.mark.parametrize("before", [touch_nothing, write_newer_interface, write_every_backend, write_older_interface])
@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_set_for_products_and_convolutions_in_both_interfaces(before, tf32):
    newer, older, matmul, found = in_new_process(precisions, before, tf32)
    assert newer == ["tf32" if tf32 else "ieee"] * 3
    assert older == [tf32, tf32]
    assert matmul == ("high" if tf32 else "highest")
    assert found is tf32


def deterministic(wanted: bool, workspaces: str | None) -> tuple[bool, bool, str | None]:
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if workspaces is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspaces
    torch.backends.cudnn.benchmark = True
    set_arithmetic(torch.device("cpu"), tf32=True, deterministic=wanted)
    return (
        Environment.here("cpu").deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.mark.parametrize(
    ("wanted", "workspaces", "expected"),
    [
        (True, None, (True, False, ":4096:8")),
        (True, ":16:8", (True, False, ":16:8")),  # set by the user
        (False, None, (False, True, None)),
    ],
)
def test_deterministic_algorithms(wanted, workspaces, expected):
    assert in_new_process(deterministic, wanted, workspaces) == expected


@pytest.mark.parametrize(
    ("tf32", "deterministic", "caption"),
    [
        (None, False, "a device, 8 cores"),
        (False, False, "a device, 8 cores, TF32 off"),
        (True, True, "a device, 8 cores, TF32 on, deterministic algorithms"),
    ],
)
def test_captions_name_both_settings(tf32, deterministic, caption):
    known = {"host": "h", "torch": "2", "transformers": "5", "python": "3", "device": "a device", "cores": 8}
    assert Environment(**known, tf32=tf32, deterministic=deterministic).computer == caption
