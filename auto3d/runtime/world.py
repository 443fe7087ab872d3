"""The processes of a run: this rank's place among them, and joining them."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from auto3d.runtime.own_device import OwnDevice, check_own_devices
from auto3d.runtime.waiting import WaitTimeoutError, waiting_for
from auto3d.runtime.whereabouts import BEFORE, HERE


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place. ``meeting_point`` is where all ranks find each other: ``file:///…`` or ``tcp://host:port``."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this node
    meeting_point: str

    def device(self, kind: str) -> torch.device:
        """The device of this rank: of the GPUs that it sees, the only one, or the one of its place on the node."""
        if kind != "cuda":
            return torch.device("cpu")
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else self.local_rank)


def join(world: World, *, device: torch.device, timeout_s: float) -> None:
    """Join the other ranks; raises WaitTimeoutError if they are not all there within ``timeout_s``."""
    if world.meeting_point.startswith("file:"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one node: whatever its host name resolves to
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        # Without device_id: with it, NCCL would share one communicator between groups, and order their messages.
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=world.meeting_point,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:  # a dist.DistError or, where gloo connects the ranks, a plain one
        raise WaitTimeoutError(
            f"rank {world.rank} of {world.size} on {socket.gethostname()}: the ranks did not meet at "
            f"{world.meeting_point}, for which they have {timeout_s:g} s ({str(error).splitlines()[0]})"
        ) from error
    HERE.rank, hosts = world.rank, [""] * world.size
    HERE.is_at(BEFORE)
    if device.type == "cuda":
        check_own_devices(OwnDevice.here(device), rank=world.rank, size=world.size, timeout_s=timeout_s)
    with waiting_for("the names of all ranks' hosts", timeout_s):
        dist.all_gather_object(hosts, socket.gethostname())
    HERE.hosts = hosts


def new_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A process group with our time-out; torch's own default is half an hour. All ranks of the world must call it."""
    with waiting_for(f"a process group of ranks {', '.join(map(str, ranks))}", timeout_s):
        return dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))


def leave() -> None:
    """Leave the other ranks, also where they are gone already: an error that led here stays the one that is seen."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
