"""A rank on a GPU sets its environment variables before CUDA starts, except those that the user has set."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import torch

from auto3d.runtime.process import affinity
from auto3d.runtime.process.gpu_environment import DEFAULTS, set_gpu_environment
from auto3d.runtime.process.world import World, join


def test_unset_variables_are_set():
    environment = {"HOME": "/home/me"}
    set_gpu_environment(environment)
    assert environment == {
        "HOME": "/home/me",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_MODULE_LOADING": "EAGER",
        "NCCL_RUNTIME_CONNECT": "0",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


def test_variables_that_the_user_has_set_stay():
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_MODULE_LOADING": "LAZY", "NCCL_RUNTIME_CONNECT": "1"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment = {**own, name: "max_split_size_mb:128"}
        set_gpu_environment(environment)
        assert environment == {**own, name: "max_split_size_mb:128"}


class StartedError(Exception):
    """The rank has asked CUDA for its devices."""


def joins(folder: str) -> tuple[dict[str, str], list[str]]:
    """The variables at the first call of CUDA when a rank joins, and the PCI addresses that the rank looks up."""
    for name in DEFAULTS:
        os.environ.pop(name, None)
    found, looked_for = {}, []

    def properties(index: int) -> SimpleNamespace:
        found.update(os.environ)
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B + index, pci_device_id=0)

    def set_device(device: torch.device) -> None:
        raise StartedError

    def near(addresses, own, allowed):
        looked_for.append(addresses[own])
        return allowed

    torch.cuda.device_count = lambda: 2
    torch.cuda.get_device_properties, torch.cuda.set_device, affinity.cores_near = properties, set_device, near
    world = World(rank=1, size=2, local_rank=1, meeting_point=f"file://{folder}/meeting-point", ranks_here=2)
    try:
        join(world, device=world.device("cuda"), timeout_s=1)
    except StartedError:
        return found, looked_for
    raise AssertionError("a rank on a GPU does not start CUDA")


def test_a_rank_sets_them_before_cuda_starts(tmp_path):
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        found, looked_for = pool.submit(joins, str(tmp_path)).result(timeout=60)
    assert DEFAULTS.items() <= found.items()
    assert looked_for == ["0000:3c:00.0"]
