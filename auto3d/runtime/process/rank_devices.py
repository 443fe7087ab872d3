"""The host and GPU of each rank, and whether NCCL can connect these GPUs."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.errors import InputError
from auto3d.runtime.waiting import waiting_for


class SharedDeviceError(InputError):
    """NCCL cannot connect the GPUs of these ranks."""


@dataclass(frozen=True)
class RankDevice:
    """A rank's host and, if it computes on a GPU, that GPU."""

    host: str
    uuid: str = ""  # empty on a CPU
    gpu: str = ""  # name of the GPU, such as NVIDIA A100-SXM4-40GB, or of a MIG instance, which ends in MIG 1g.5gb

    @staticmethod
    def of_this_rank(device: torch.device) -> "RankDevice":
        if device.type != "cuda":
            return RankDevice(socket.gethostname())
        properties = torch.cuda.get_device_properties(device)
        return RankDevice(socket.gethostname(), str(properties.uuid), properties.name)


def gather_rank_devices(own: RankDevice) -> list[RankDevice]:
    """The devices of all joined ranks, by rank; ``own`` is this rank's. Raises SharedDeviceError, on every rank, if
    NCCL could not connect them.
    """
    devices = [own] * dist.get_world_size()
    with waiting_for("the names of all ranks' hosts"):
        dist.all_gather_object(devices, own)
    if problem := connection_problem(devices):
        raise SharedDeviceError(problem)
    return devices


def connection_problem(devices: Sequence[RankDevice]) -> str:
    """One line on why NCCL cannot connect ``devices``, listed by rank; empty if it can."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, device in enumerate(devices):
        if " MIG " in device.gpu and len(devices) > 1:
            problem = f"rank {rank} on {device.host} has {device.gpu}"
            return f"{problem}, and NCCL does not connect instances of MIG; use whole GPUs"
        if device.uuid:
            ranks_of.setdefault((device.host, device.uuid), []).append(rank)
    for (host, uuid), ranks in ranks_of.items():
        if len(ranks) > 1:
            problem = f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} on {host} have the same GPU, {uuid}"
            return (
                f"{problem}; start as many ranks on a node as there are GPUs, each seeing all of them or only its own"
            )
    return ""
