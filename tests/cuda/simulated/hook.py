"""Replaces torch's kernels in processes on the simulated CUDA, which has no cuDNN: the entry point that torch calls.

``build`` copies it beside the libraries; it imports nothing of this project.
"""

import ctypes
import os
from pathlib import Path

import torch

_KERNELS = Path(__file__).with_name("libkernels.so")


def begin() -> None:
    """Let CPU kernels compute what torch does on CUDA devices, if the process is in the computing mode.

    cuDNN builds its plans from what the device answers: of a simulated one it makes vectors of arbitrary lengths.
    """
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("SIMULATED_CUDA_COMPUTES") == "1":
        ctypes.CDLL(str(_KERNELS)).simulated_kernels()


def write_operators(file: str) -> None:
    """Write a line to ``file`` for each operator that this process has computed: its calls and its name."""
    ctypes.CDLL(str(_KERNELS)).simulated_operators(file.encode())
