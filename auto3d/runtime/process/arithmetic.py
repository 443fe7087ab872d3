"""Settings of torch that change how a rank computes: TF32 and deterministic algorithms."""

import os
from typing import Any

import torch

from auto3d.cost.memory.workspaces import DETERMINISTIC, workspace_bytes


def set_arithmetic(device: torch.device, *, tf32: bool, deterministic: bool, only_warn: bool = False) -> None:
    """Set TF32 and deterministic algorithms for this process, which must not have used CUDA yet.

    With ``only_warn``, an operator that has no deterministic algorithm warns and runs; otherwise it raises an error.

    On GPUs, TF32 is set for matrix products and convolutions alike; torch's default is TF32 in convolutions only.
    """
    if device.type == "cuda":
        # torch has an older and a newer interface for both settings, and raises an error if one is read after only the
        # other was written. The first line writes both interfaces for matrix products. For convolutions, only the newer
        # one can state that they do not inherit torch.backends.fp32_precision.
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        cudnn: Any = torch.backends.cudnn  # torch's stubs lack its precisions
        cudnn.allow_tf32 = tf32
        cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"
        cudnn.rnn.fp32_precision = "tf32" if tf32 else "ieee"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", DETERMINISTIC)
        torch.use_deterministic_algorithms(True, warn_only=only_warn)  # cuDNN's included
        torch.backends.cudnn.benchmark = False  # benchmarking may choose another algorithm in another run


def uses_tf32() -> bool:
    """Whether matrix products or convolutions on a GPU use TF32."""
    backends: Any = torch.backends  # torch's stubs lack these precisions
    precisions = (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision)
    return "tf32" in precisions


def cublas_workspaces(device: torch.device) -> int:
    """Bytes of cuBLAS's workspaces of a rank on ``device``; 0 on a CPU and on devices of other makers."""
    return workspace_bytes(capability(device), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))


def capability(device: torch.device) -> float | None:
    """The compute capability of ``device``; None if it is no GPU of NVIDIA's."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major + minor / 10
