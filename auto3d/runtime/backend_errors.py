"""Errors of the device and of NCCL: this rank's own failures, and signs that another rank is late or gone.

torch raises NCCL's errors as one type, torch.distributed.DistBackendError, so their text decides. It has torch's words
for NCCL's result code (``ncclRemoteError: …``) and, after ``Last error:``, NCCL's own last warning.
"""

import re

import torch

from auto3d.runtime.out_of_memory import is_out_of_memory

_OF_DEVICE = re.compile(r"\bCUDA (driver )?error\b")
_OF_NCCL = re.compile(r"NCCL|\bnccl[A-Z]")
_OWN_RESULT = re.compile(r"\bnccl(UnhandledCudaError|InvalidUsage|InvalidArgument)\b")
# NCCL reports a lost peer as ncclRemoteError, but also as ncclSystemError or ncclInternalError.
_PEER_GONE = re.compile(r"\bremote\b|\bpeer\b|connect|\brecv\b|broken pipe|\baborted\b", re.IGNORECASE)
_PEER_LATE = re.compile(r"\btim(ed|ing) out\b|\btimeout\b(?!\(ms\))", re.IGNORECASE)


def is_local_failure(error: RuntimeError) -> bool:
    """Whether ``error``, raised by a call of torch.distributed, is a failure of this rank rather than of another one.

    It is where memory ran out, where the device failed (a device-side assert, an illegal address), and where NCCL was
    not set up or used as it must be.
    """
    text = str(error)
    if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError) or _OF_DEVICE.search(text):
        return True
    if not _OF_NCCL.search(text):
        return False
    return bool(_OWN_RESULT.search(text)) or not (_PEER_GONE.search(text) or _PEER_LATE.search(text))


def is_nccl_timeout(error: RuntimeError) -> bool:
    """Whether ``error`` says that NCCL waited for another rank until its own time-out."""
    return bool(_OF_NCCL.search(str(error)) and _PEER_LATE.search(str(error)))
