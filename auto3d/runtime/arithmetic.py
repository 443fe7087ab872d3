"""Settings of torch that change how a rank computes: TF32 and deterministic algorithms."""

import os

import torch

CUBLAS_WORKSPACES = ":4096:8"  # eight of 4 MiB for each stream: cuBLAS then needs none that streams would share


def set_arithmetic(device: torch.device, *, tf32: bool, deterministic: bool) -> None:
    """Set both for this process, which must not have used CUDA yet.

    On GPUs matrix products and convolutions take TF32 both, or neither: torch's own default is convolutions alone.
    """
    if device.type == "cuda":
        # torch has an older and a newer interface to each, and raises an error where it reads the one after only the
        # other was written. The first line writes both. Of convolutions only the newer can say that they inherit
        # nothing from torch.backends.fp32_precision.
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"
        torch.backends.cudnn.rnn.fp32_precision = "tf32" if tf32 else "ieee"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES)
        torch.use_deterministic_algorithms(True)  # also of cuDNN
        torch.backends.cudnn.benchmark = False  # it may choose another algorithm in another run


def uses_tf32() -> bool:
    """Whether matrix products or convolutions on a GPU take TF32."""
    precisions = (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
    return "tf32" in precisions
