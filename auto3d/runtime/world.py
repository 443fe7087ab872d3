"""The processes of a run: this rank's place among them, and joining them."""

import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from auto3d.runtime.activity import BEFORE_TRAINING, THIS_RANK
from auto3d.runtime.affinity import bind_to_cores_near
from auto3d.runtime.backend_errors import is_local_failure
from auto3d.runtime.gpu_environment import set_gpu_environment
from auto3d.runtime.rank_devices import RankDevice, gather_rank_devices
from auto3d.runtime.waiting import WaitTimeoutError, wait, waiting_for

# NCCL's watchdog counts from the posting of a receive, which may be an iteration before its message: a short time-out
# would end ranks without a reason. Waits have a deadline of ours (waiting.poll).
NCCL_TIMEOUT_S = 24 * 3600.0
MESSAGE_CHANNELS = 4  # NCCL's channels: each takes a multiprocessor while a message is on its way
LEAVE_S = 10.0  # to leave the other ranks after the result is reported


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place. ``meeting_point`` is where all ranks find each other: ``file:///…`` or ``tcp://host:port``."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this node
    meeting_point: str
    ranks_here: int = 1  # ranks that one process of this node forked, which share its cores; 1: a launcher started each

    def device(self, kind: str) -> torch.device:
        """The device of this rank: of the GPUs that it sees, the only one, or the one of its place on the node.

        A rank on a GPU sets its variables here, before it asks CUDA for anything.
        """
        if kind != "cuda":
            return torch.device("cpu")
        set_gpu_environment()
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else self.local_rank)


def join(world: World, *, device: torch.device, timeout_s: float) -> None:
    """Join the other ranks; raises WaitTimeoutError if they are not all there within ``timeout_s``.

    Raises SharedDeviceError where several are on one GPU.

    The default process group is one of gloo, on GPUs too: what ranks tell each other once goes through it, from memory
    of the CPU. Tensors of a GPU go through groups of their own (``new_group``).

    Whoever runs the process calls ``leave`` once it has reported what came of it.
    """
    THIS_RANK.rank = world.rank
    THIS_RANK.set_phase(BEFORE_TRAINING)
    if world.meeting_point.startswith("file:"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one node: whatever its host name resolves to
    if device.type == "cuda":
        bind_to_cores_near(device, world.ranks_here)
        torch.cuda.set_device(device)
    try:
        # Without device_id: with it, NCCL would share one communicator between groups, and order their messages.
        dist.init_process_group(
            "gloo",
            init_method=world.meeting_point,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:  # a dist.DistError or, where gloo connects the ranks, a plain one
        if is_local_failure(error):
            raise
        raise WaitTimeoutError(
            f"rank {world.rank} of {world.size} on {socket.gethostname()}: the ranks did not meet at "
            f"{world.meeting_point}, for which they have {timeout_s:g} s ({str(error).splitlines()[0]})"
        ) from error
    THIS_RANK.hosts = [one.host for one in gather_rank_devices(RankDevice.of_this_rank(device), timeout_s=timeout_s)]


def new_group(
    ranks: Sequence[int], timeout_s: float, *, device: torch.device, messages: bool = False
) -> dist.ProcessGroup:
    """A process group for tensors of ``device``'s type; all ranks of the world must call it.

    One for ``messages`` between stages leaves most of a GPU to computing, and is served before it.
    """
    with waiting_for(f"a process group of ranks {', '.join(map(str, ranks))}", timeout_s):
        if device.type != "cuda":
            return dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=messages)
        options._timeout = timedelta(seconds=NCCL_TIMEOUT_S)  # the same as below, else new_group warns
        if messages:
            options.config.max_ctas = MESSAGE_CHANNELS
        dist.barrier()  # new_group waits for all ranks, too, but with the group's time-out in place of ours
        return dist.new_group(ranks, timeout=options._timeout, backend="nccl", pg_options=options)


def connect(group: dist.ProcessGroup, *, device: torch.device, what: str, timeout_s: float) -> None:
    """Use ``group`` once; all its ranks must call it. NCCL connects at the first use, and blocks until all are there.

    ``what`` are its ranks, for a person.
    """
    told = f"a connection between {what}"
    with waiting_for(told, timeout_s):
        work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    wait(work, timeout_s=timeout_s, what=told)


def leave() -> None:
    """Leave the other ranks after a success that is reported; they may be gone already.

    Never after a failure, and never before the report: NCCL's shutdown waits for kernels that may never end.
    """
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()


def leave_or_end() -> None:
    """``leave``, and end the process, as a success, if that takes longer than LEAVE_S."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    end = threading.Timer(LEAVE_S, os._exit, [0])
    end.daemon = True
    end.start()
    leave()
    end.cancel()
