"""Describes this machine: versions, devices, network interfaces, environment variables."""

import os
import platform
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from launch.run.devices import torch_device_count

PACKAGES = ("transformers", "deepspeed", "submitit", "mpi4py")
COMMAND_S = 30.0  # limit of each command that is run here
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
VARIABLES = (
    *INTERFACES,
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_IB_TIMEOUT",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_PLUGIN",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_FAMILY",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_CUDA_EVENT_CACHE",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
)  # A report shows only these variables: they control devices and connections, and contain no secrets.

_BASIC, _MORE = ("name", "memory.total", "driver_version"), ("compute_cap", "mig.mode.current")
_ECC = ("ecc.errors.uncorrected.volatile.total",)
_UNKNOWN = ("[n/a]", "n/a", "[not supported]", "not supported", "[unknown error]")


@dataclass(frozen=True)
class GpuReport:
    """One GPU as nvidia-smi describes it. A field is empty if the driver does not know it."""

    name: str
    memory: str  # such as 81559 MiB
    driver: str
    capability: str = ""  # compute capability, such as 9.0
    mig: str = ""  # Enabled or Disabled
    ecc_errors: str = ""  # uncorrected errors since the driver was loaded

    @property
    def kind(self) -> str:
        return f"{self.name}, {self.memory}"


@dataclass(frozen=True)
class Machine:
    host: str
    versions: dict[str, str]  # version of Python and of each package; empty: not installed
    cuda: str  # CUDA version that torch was built with; empty: torch has no CUDA
    architectures: tuple[str, ...]  # those that torch has kernels for, such as sm_80, or code to compile, compute_120
    nccl: str  # NCCL version that torch loads; empty: torch has no NCCL
    cores: int  # number of cores that this process may use
    gpus: list[GpuReport]
    usable_gpus: int  # number of GPUs that torch can use
    interfaces: list[str]
    variables: dict[str, str]  # values of VARIABLES, as far as they are set

    @property
    def devices(self) -> str:
        all_kinds = [gpu.kind for gpu in self.gpus]
        kinds = [f"{all_kinds.count(kind)} {kind}" for kind in dict.fromkeys(all_kinds)]
        return ", ".join([f"{self.cores} cores", *(kinds or ["no GPU"])])

    @property
    def drivers(self) -> str:
        """The version of the driver. There are several only if the machine is partly updated."""
        return " and ".join(dict.fromkeys(gpu.driver for gpu in self.gpus))


def this_machine() -> Machine:
    return Machine(
        host=socket.gethostname(),
        versions={"python": platform.python_version(), "torch": str(torch.__version__)}
        | {package: _version(package) for package in PACKAGES},
        cuda=torch.version.cuda or "",
        architectures=_architectures(),
        nccl=_nccl(),
        cores=len(os.sched_getaffinity(0)),
        gpus=_gpus(),
        usable_gpus=torch_device_count(),
        interfaces=[name for _, name in socket.if_nameindex()],
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def mpi_library() -> tuple[str, str]:
    """The MPI library that mpi4py loads and no reason, or "" and the reason why it loads none.

    It is loaded in a child process, because a library that does not fit its launcher ends its process.
    """
    program = "from mpi4py import MPI; print(MPI.Get_library_version())"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        return "", f"MPI did not start within {COMMAND_S:g} s"
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or ["MPI gave no reason"])[-1]
    return " ".join(done.stdout.splitlines()[0].split()), ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _architectures() -> tuple[str, ...]:
    if not torch.backends.cuda.is_built():
        return ()
    return tuple((torch._C._cuda_getArchFlags() or "").split())  # torch.cuda.get_arch_list asks for a driver first


def _nccl() -> str:
    if not dist.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # this does not start CUDA


def _gpus() -> list[GpuReport]:
    """The GPUs of this machine. An old driver refuses a query for a field that it lacks, so shorter queries follow."""
    for fields in ((*_BASIC, *_MORE, *_ECC), (*_BASIC, *_MORE), _BASIC):
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        if done.returncode == 0:
            return [
                _gpu(line) for line in done.stdout.splitlines() if "," in line
            ]  # a line without a comma says that there are no devices
    return []


def _gpu(line: str) -> GpuReport:
    values = [value.strip() for value in line.split(",")]
    return GpuReport(*("" if value.lower() in _UNKNOWN else value for value in values))
