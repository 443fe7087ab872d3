"""Replaces torch's kernels in processes on the simulated CUDA, which has no cuDNN: the entry point that torch calls.

``build`` copies it beside the libraries; it imports nothing of this project.
"""

import ctypes
import os
from pathlib import Path

import torch

_KERNELS = Path(__file__).with_name("libkernels.so")
# Operators that allocate, or look at memory, and need no kernel.
_OF_TORCH = """
empty.memory_format empty_strided resize_ set_ set_.source_Storage set_.source_Tensor set_.source_Storage_storage_offset
record_stream _local_scalar_dense is_set_to _pin_memory is_pinned _efficientzerotensor _fused_sdp_choice _resize_output_
"""
# Operators without a kernel of CUDA's own, whose choice among several would take one that is not simulated.
_WHOLE = "convolution convolution_backward copy_"
# Operators without a CPU kernel, which kernels.cpp has.
_OWN = """
_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
"""


def begin() -> None:
    """Let CPU kernels compute what torch does on CUDA devices, if the process is in the computing mode.

    cuDNN builds its plans from what the device answers: of a simulated one it makes vectors of arbitrary lengths.
    """
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("SIMULATED_CUDA_COMPUTES") == "1":
        library = ctypes.CDLL(str(_KERNELS))
        for name in filter(_is_replaced, torch._C._dispatch_get_all_op_names()):
            library.simulated_kernel(name.encode())


def _is_replaced(name: str) -> bool:
    """Whether an operator, such as "aten::add.Tensor", gets a kernel here."""
    namespace, _, operator = name.partition("::")
    if namespace != "aten" or operator in _OF_TORCH.split() or not torch._C._dispatch_has_kernel(name):
        return False
    if operator in _WHOLE.split():
        return True
    base, _, overload = operator.partition(".")
    returns = torch._C._get_schema(f"aten::{base}", overload).returns
    if any(value.alias_info and not value.alias_info.is_write for value in returns):
        return False  # a view
    computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU") or operator in _OWN.split()
    return computed and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
