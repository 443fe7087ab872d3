"""Ranks that share one GPU. NCCL refuses two ranks of a host on one GPU, so each rank is a host of its own.

It then connects them through sockets, as it connects nodes without InfiniBand. The GPU runs their kernels in turns, so
what is computed is right, and slow.
"""

import ctypes
import os
import socket

import torch

from auto3d.runtime.process.arithmetic import set_arithmetic
from auto3d.runtime.process.gpu_environment import set_gpu_environment

GPU = torch.device("cuda", 0)
_CLONE_NEWUTS = 0x04000000  # sched.h
_THROUGH_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def begin_on_own_host(rank: int, *, deterministic: bool = True) -> None:
    """Give this process, which needs root's rights, a host name of its own (unshare(2)), and float32 that is exact.

    It must not have used CUDA yet.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(f"host-{rank}")
    os.environ |= _THROUGH_SOCKETS
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the parent hides the GPU from itself
    set_gpu_environment()
    set_arithmetic(GPU, tf32=False, deterministic=deterministic)
