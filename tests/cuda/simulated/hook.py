"""Replaces torch's kernels in processes on the simulated CUDA: the entry point by which torch loads them.

``build`` copies it beside the libraries; it imports nothing of this project.
"""

import atexit
import ctypes
import os
from pathlib import Path


def begin() -> None:
    """Let CPU kernels compute what torch does on CUDA devices, if the process is in the computing mode."""
    if os.environ.get("SIMULATED_CUDA_COMPUTES") != "1":
        return
    kernels = ctypes.CDLL(str(Path(__file__).with_name("libkernels.so")))
    kernels.simulated_kernels()
    if folder := os.environ.get("SIMULATED_CUDA_OPERATORS"):  # where each process writes which operators it computed
        atexit.register(lambda: kernels.simulated_operators(f"{folder}/{os.getpid()}.txt".encode()))
