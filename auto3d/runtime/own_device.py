"""Every rank has a GPU of its own: what ranks tell each other of theirs before anything connects them."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from auto3d.errors import InputError
from auto3d.runtime.waiting import waiting_for


class SharedDeviceError(InputError):
    """Ranks whose GPUs cannot be connected to each other."""


@dataclass(frozen=True)
class OwnDevice:
    """The GPU of a rank."""

    host: str
    uuid: str
    name: str  # such as NVIDIA A100-SXM4-40GB; of an instance of MIG: NVIDIA A100-SXM4-40GB MIG 1g.5gb

    @staticmethod
    def here(device: torch.device) -> "OwnDevice":
        known = torch.cuda.get_device_properties(device)
        return OwnDevice(socket.gethostname(), str(known.uuid), known.name)


OWN_DEVICE = TypeAdapter(OwnDevice)


def check_own_devices(own: OwnDevice, *, rank: int, size: int, timeout_s: float) -> None:
    """Raise SharedDeviceError, on every rank, where NCCL would not connect the GPUs of the joined ranks.

    They are exchanged through the store by which the ranks met, which needs no connection of NCCL.
    """
    store = dist.distributed_c10d._get_default_store()
    keys = [f"device of rank {number}" for number in range(size)]
    store.set(keys[rank], OWN_DEVICE.dump_json(own).decode())
    with waiting_for("the names of all ranks' devices", timeout_s):
        store.wait(keys, timedelta(seconds=timeout_s))
        found = [OWN_DEVICE.validate_json(store.get(key)) for key in keys]
    if problem := why_not_connected(found):
        raise SharedDeviceError(problem)


def why_not_connected(devices: Sequence[OwnDevice]) -> str:
    """One line that says why NCCL would not connect ranks on ``devices``, in the order of the ranks; else empty."""
    if len(devices) == 1:
        return ""
    users: dict[tuple[str, str], list[int]] = {}
    for rank, one in enumerate(devices):
        if " MIG " in one.name:
            return (
                f"rank {rank} on {one.host} has a {one.name}: NCCL does not connect instances of MIG; give whole GPUs"
            )
        users.setdefault((one.host, one.uuid), []).append(rank)
    for (host, uuid), ranks in users.items():
        if len(ranks) > 1:
            told = f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} on {host} have the same GPU, {uuid}"
            return f"{told}; start as many ranks on a node as there are GPUs, each seeing all of them or its own alone"
    return ""
