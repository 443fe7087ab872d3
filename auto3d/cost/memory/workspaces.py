"""Workspaces of cuBLAS, which torch takes from its allocator and keeps (aten/src/ATen/cuda/CublasHandlePool.cpp).

Each thread that computes has a handle of cuBLAS, and each handle has a workspace on each stream. A rank computes on one
stream in two threads: its own, and the thread in which autograd runs backwards.
"""

import re
from dataclasses import replace

from auto3d.cluster import Cluster
from auto3d.cost.training_options import TrainingOptions

THREADS = 2
DETERMINISTIC = ":4096:8"
"""CUBLAS_WORKSPACE_CONFIG of deterministic runs: eight buffers of 4 MiB, so that streams share none."""
_LARGE = (9, 10, 12)  # major compute capabilities, Hopper's and Blackwell's


def workspace_bytes(capability: float | None, setting: str | None) -> int:
    """Bytes of all workspaces of a rank on a device of this compute capability; 0 if the capability is unknown.

    ``setting`` is the value of CUBLAS_WORKSPACE_CONFIG, if it is set: numbers of buffers, by their KiB.
    """
    if capability is None:
        return 0
    buffers = [(int(kib), int(count)) for kib, count in re.findall(r":(\d+):(\d+)", setting or "")]
    if not buffers:
        buffers = [(4096, 8)] if int(capability) in _LARGE else [(4096, 2), (16, 8)]
    return THREADS * sum(kib * count for kib, count in buffers) * 2**10


def with_workspaces(training: TrainingOptions, cluster: Cluster) -> TrainingOptions:
    """``training`` by this runtime with the workspaces of a device of ``cluster``: the largest, if kinds differ.

    Another system's are part of what is known of that system.
    """
    if cluster.device != "cuda" or training.system is not None:
        return training
    setting = DETERMINISTIC if training.deterministic else None
    sizes = [workspace_bytes(node.accelerator.capability, setting) for node in cluster.nodes]
    return replace(training, workspace_bytes=float(max(sizes)))
