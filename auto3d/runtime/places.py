"""Where the ranks of a run are: their hosts and GPUs, and whether NCCL can connect these."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.errors import InputError
from auto3d.runtime.waiting import waiting_for


class SharedDeviceError(InputError):
    """Ranks whose GPUs cannot be connected to each other."""


@dataclass(frozen=True)
class Place:
    """A rank's host and, if it computes on one, its GPU."""

    host: str
    uuid: str = ""
    gpu: str = ""  # such as NVIDIA A100-SXM4-40GB; an instance of MIG is NVIDIA A100-SXM4-40GB MIG 1g.5gb

    @staticmethod
    def of_this_rank(device: torch.device) -> "Place":
        if device.type != "cuda":
            return Place(socket.gethostname())
        known = torch.cuda.get_device_properties(device)
        return Place(socket.gethostname(), str(known.uuid), known.name)


def gather_places(own: Place, *, timeout_s: float) -> list[Place]:
    """The places of all joined ranks, by rank; raises SharedDeviceError, on each, where NCCL would not connect them."""
    places = [own] * dist.get_world_size()
    with waiting_for("the names of all ranks' hosts", timeout_s):
        dist.all_gather_object(places, own)
    if problem := why_not_connected(places):
        raise SharedDeviceError(problem)
    return places


def why_not_connected(places: Sequence[Place]) -> str:
    """One line that says why NCCL would not connect the ranks at ``places``, in their order; else empty."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        if " MIG " in place.gpu and len(places) > 1:
            found = f"rank {rank} on {place.host} has {place.gpu}"
            return f"{found}, and NCCL does not connect instances of MIG; give whole GPUs"
        if place.uuid:
            ranks_of.setdefault((place.host, place.uuid), []).append(rank)
    for (host, uuid), ranks in ranks_of.items():
        if len(ranks) > 1:
            found = f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} on {host} have the same GPU, {uuid}"
            return f"{found}; start as many ranks on a node as there are GPUs, each seeing all of them or its own alone"
    return ""
