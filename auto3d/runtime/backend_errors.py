"""Tell failures of this rank from signs that another rank is late or gone, in errors of the device and of NCCL.

torch raises all NCCL errors as torch.distributed.DistBackendError, so only their text distinguishes them. It holds
torch's description of NCCL's result code (``ncclRemoteError: …``) and, after ``Last error:``, NCCL's last warning.
"""

import re

import torch

from auto3d.runtime.out_of_memory import is_out_of_memory

_DEVICE_ERROR = re.compile(r"\bCUDA (driver )?error\b")
_NCCL_ERROR = re.compile(r"NCCL|\bnccl[A-Z]")
_LOCAL_RESULT = re.compile(r"\bnccl(UnhandledCudaError|InvalidUsage|InvalidArgument)\b")
# NCCL reports a lost peer as ncclRemoteError, but also as ncclSystemError or ncclInternalError.
_PEER_GONE = re.compile(r"\bremote\b|\bpeer\b|connect|\brecv\b|broken pipe|\baborted\b", re.IGNORECASE)
_PEER_LATE = re.compile(r"\btim(ed|ing) out\b|\btimeout\b(?!\(ms\))", re.IGNORECASE)


def is_local_failure(error: RuntimeError) -> bool:
    """Whether ``error``, raised by a call of torch.distributed, is a failure of this rank rather than of another rank.

    Failures of this rank are: out of memory; a failure of the device, such as a device-side assert or an illegal
    address; and wrong set-up or use of NCCL.
    """
    text = str(error)
    if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError) or _DEVICE_ERROR.search(text):
        return True
    if not _NCCL_ERROR.search(text):
        return False
    return bool(_LOCAL_RESULT.search(text)) or not (_PEER_GONE.search(text) or _PEER_LATE.search(text))


def is_nccl_timeout(error: RuntimeError) -> bool:
    """Whether ``error`` says that NCCL's own time-out ended a wait for another rank."""
    return bool(_NCCL_ERROR.search(str(error)) and _PEER_LATE.search(str(error)))
