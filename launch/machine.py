"""What there is on the machine of this process: versions, devices, network interfaces."""

import os
import platform
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from launch.devices import count_of_torch

PACKAGES = ("torch", "transformers", "deepspeed", "submitit", "mpi4py")
COMMAND_S = 30.0


@dataclass(frozen=True)
class Machine:
    host: str
    versions: dict[str, str]  # of Python and of packages; empty: not installed
    cores: int  # that this process may use
    gpus: list[str]  # name and memory of each, as the driver tells
    usable_gpus: int  # as torch sees it
    interfaces: list[str]
    chosen: dict[str, str]  # variables that name an interface

    @property
    def devices(self) -> str:
        kinds = [f"{self.gpus.count(kind)} {kind}" for kind in dict.fromkeys(self.gpus)]
        return ", ".join([f"{self.cores} cores", *(kinds or ["no GPU"])])


def this_machine() -> Machine:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return Machine(
        host=socket.gethostname(),
        versions={"python": platform.python_version()} | {package: _version(package) for package in PACKAGES},
        cores=len(os.sched_getaffinity(0)),
        gpus=_gpus(),
        usable_gpus=count_of_torch(),
        interfaces=[name for _, name in socket.if_nameindex()],
        chosen={name: os.environ[name] for name in names if name in os.environ},
    )


def mpi_library() -> tuple[str, str]:
    """The MPI library that mpi4py loads, or else why none.

    In a process of its own, for a library that does not fit its launcher ends its process.
    """
    program = "from mpi4py import MPI; print(MPI.Get_library_version())"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        return "", f"MPI did not start within {COMMAND_S:g} s"
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or ["it did not say why"])[-1]
    return " ".join(done.stdout.splitlines()[0].split()), ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
