"""The meaning of CUDA and NCCL errors, on texts that users of torch have reported, with other numbers and hosts."""

import pytest
import torch
import torch.distributed as dist

from auto3d.runtime.backend_errors import is_local_failure, is_nccl_timeout
from auto3d.runtime.out_of_memory import is_out_of_memory, out_of_memory_line
from auto3d.runtime.waiting import PeerLostError, WaitTimeoutError, naming_lost_peers, waiting_for

HINTS = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
UNHANDLED_CUDA = """\
NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:340, unhandled cuda error (run with NCCL_DEBUG=INFO for \
details), NCCL version 2.21.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
"""
SYSTEM = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error (run with \
NCCL_DEBUG=INFO for details), NCCL version 2.21.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \

Last error:
"""
INTERNAL = """\
NCCL error in: /opt/conda/conda-bld/pytorch_1670525541990/work/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1269, \
internal error, NCCL version 2.14.3
ncclInternalError: Internal check failed.
Last error:
"""
REMOTE = """\
NCCL error: remote process exited or there was a network error, NCCL version 2.19.3
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
"""
INVALID_USAGE = """\
NCCL error in: /opt/pytorch/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1727, invalid usage (run with \
NCCL_DEBUG=WARN for details), NCCL version 2.19.3
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
"""
SETTING_UP = (
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
    "but store->get('0') got error: "
)
WORK = "WorkNCCL(SeqNum=89, OpType=ALLREDUCE, NumelIn=67108864, NumelOut=67108864, Timeout(ms)=90000)"

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"),
    RuntimeError("CUDA out of memory. Tried to allocate 1024.00 MiB (GPU 0; 15.90 GiB total capacity)"),
    torch.AcceleratorError(f"CUDA error: out of memory{HINTS}"),
    RuntimeError(f"CUDA error: out of memory{HINTS}"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    dist.DistBackendError(f"{UNHANDLED_CUDA}Cuda failure 2 'out of memory'"),
    dist.DistBackendError(f"{UNHANDLED_CUDA}Cuda failure 'out of memory'"),
    dist.DistBackendError(f"{UNHANDLED_CUDA}Failed to CUDA calloc 8388608 bytes"),
    dist.DistBackendError(f"{UNHANDLED_CUDA}Failed to CUDA calloc async 2432 bytes"),
    dist.DistBackendError(f"{UNHANDLED_CUDA}Failed to CUDA malloc 4194304 bytes"),
    RuntimeError(f"{INTERNAL}Failed to CUDA calloc async 1920 bytes"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
]
OF_THIS_RANK = [
    torch.AcceleratorError(f"CUDA error: device-side assert triggered{HINTS}"),
    torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered{HINTS}"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle, opa, opb, m, n, k)`"),
    dist.DistBackendError(
        "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: CUDA error: "
        f"device-side assert triggered{HINTS}"
    ),
    dist.DistBackendError(f"{INVALID_USAGE}Duplicate GPU detected : rank 1 and rank 0 both on CUDA device e2000"),
    dist.DistBackendError(f"{UNHANDLED_CUDA}Cuda failure 1 'invalid argument'"),
    dist.DistBackendError(f"{UNHANDLED_CUDA}Cuda failure 'peer access is not supported between these two devices'"),
    dist.DistBackendError(f"{SYSTEM}Error while creating shared memory segment /dev/shm/nccl-LeXlEJ (size 9637888)"),
    RuntimeError("Distributed package doesn't have NCCL built in"),
]
PEER_GONE = [
    dist.DistBackendError(f"{REMOTE}NET/IB : Got completion from peer 10.42.0.2<47534> with error 5, opcode 48"),
    dist.DistBackendError(f"{REMOTE}socketProgress: Connection closed by remote peer node2<42830>"),
    dist.DistBackendError(f"{SYSTEM}socketProgress: Connection closed by remote peer node2<42830>"),
    dist.DistBackendError(f"{SYSTEM}Net : Call to recv from 10.200.84.247<58355> failed : Broken pipe"),
    dist.DistBackendError(f"{INTERNAL}Proxy Call to rank 14 failed (Connect)"),
    dist.DistBackendError(f"{INTERNAL}Socket recv failed while polling for opId=0x7f4774cc9620"),
    dist.DistBackendError(f"[Rank 0] Collective {WORK} raised the following async exception: {REMOTE}"),
    dist.DistBackendError("NCCL communicator was aborted on rank 2. "),
    dist.DistBackendError(f"{SETTING_UP}Connection reset by peer"),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:52611"),
]
PEER_LATE = [
    dist.DistBackendError(
        f"[Rank 0] Watchdog caught collective operation timeout: {WORK} ran for 90004 milliseconds before timing out."
    ),
    dist.DistBackendError(f"{SETTING_UP}wait timeout after 600000ms, keys: /default_pg/0//cuda//0"),
    dist.DistBackendError(f"{SETTING_UP}Socket Timeout"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_running_out_of_memory_is_recognised(error):
    assert is_out_of_memory(error)
    with pytest.raises(type(error)), naming_lost_peers(), waiting_for("a message"):
        raise error


def test_the_line_that_reports_it_is_found():
    assert out_of_memory_line(OUT_OF_MEMORY[2]) == "CUDA error: out of memory"
    assert out_of_memory_line(OUT_OF_MEMORY[11]) == "Failed to CUDA calloc 8388608 bytes"
    assert out_of_memory_line(MemoryError()) == "MemoryError"


@pytest.mark.parametrize("error", OF_THIS_RANK)
def test_a_failure_of_this_rank_is_no_lost_connection(error):
    assert is_local_failure(error)
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)), naming_lost_peers(), waiting_for("a message"):
        raise error
    with pytest.raises(type(error)), naming_lost_peers():
        raise error


@pytest.mark.parametrize("error", PEER_GONE)
def test_another_rank_that_is_gone_is_a_lost_connection(error):
    assert not is_local_failure(error)
    assert not is_nccl_timeout(error)
    lost = pytest.raises(PeerLostError, match="was waiting for a message when the connection broke")
    with lost, waiting_for("a message"):
        raise error
    with pytest.raises(PeerLostError), naming_lost_peers():
        raise error


@pytest.mark.parametrize("error", PEER_LATE)
def test_another_rank_that_is_late_is_a_timeout(error):
    assert not is_local_failure(error)
    late = pytest.raises(WaitTimeoutError, match="waited for a message until NCCL's time-out")
    with late, waiting_for("a message"):
        raise error


@pytest.mark.parametrize("text", ["the tokenizer ran out of memory slots", "CUDNN_STATUS_EXECUTION_FAILED", "no ALLOC"])
def test_other_errors_are_not_out_of_memory(text):
    assert not is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError("CUDA out of memory"))
