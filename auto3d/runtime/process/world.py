"""The processes of a run: this rank among them, and how it joins and leaves the others."""

import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from auto3d.runtime.activity import BEFORE_TRAINING, THIS_RANK
from auto3d.runtime.backend_errors import is_local_failure
from auto3d.runtime.process.affinity import bind_to_cores_near
from auto3d.runtime.process.gpu_environment import set_gpu_environment
from auto3d.runtime.process.preemption import wake_without_preemption
from auto3d.runtime.process.rank_devices import RankDevice, gather_rank_devices
from auto3d.runtime.waiting import WaitTimeoutError, wait, waiting_for

# NCCL's watchdog counts from the posting of a receive, which may precede its message by an iteration, so a short
# time-out would kill healthy ranks. Waits have a deadline in waiting.poll instead.
NCCL_TIMEOUT_S = 24 * 3600.0
MESSAGE_CHANNELS = 4  # NCCL channels: each occupies a multiprocessor while a message is in transit
_Result = TypeVar("_Result")
LEAVE_S = 10.0  # time to leave the other ranks after the result is reported


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all ranks. ``meeting_point`` is the rendezvous of all ranks: file:///… or tcp://host:port."""

    rank: int
    size: int
    local_rank: int  # number among the ranks of this node
    meeting_point: str
    ranks_here: int = 1  # ranks forked by one process, which share its cores; 1 if a launcher started each rank

    def device(self, kind: str) -> torch.device:
        """The device of this rank: the only GPU that it sees, or else the GPU with the number of its local rank.

        On a GPU this also sets the rank's environment variables, before the first call of CUDA.
        """
        if kind != "cuda":
            return torch.device("cpu")
        set_gpu_environment()
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else self.local_rank)


def meet(world: World) -> dist.Store:
    """A store of all ranks, by which they can tell each other something before they ``join``.

    Raises WaitTimeoutError if they have not all come within this rank's time-out.
    """
    with _meeting(world):
        store, *_ = next(rendezvous(world.meeting_point, world.rank, world.size, timeout=_timeout()))
    return store


def _timeout() -> timedelta:
    """This rank's time-out, for calls of torch.distributed that block."""
    return timedelta(seconds=THIS_RANK.timeout_s)


@contextmanager
def _meeting(world: World) -> Iterator[None]:
    """Inside, this rank meets the others: an error that comes from them is a WaitTimeoutError."""
    try:
        yield
    except RuntimeError as error:  # a dist.DistError, or a plain RuntimeError from gloo's connection set-up
        if is_local_failure(error):
            raise
        raise WaitTimeoutError(
            f"rank {world.rank} of {world.size} on {socket.gethostname()}: the ranks did not meet at "
            f"{world.meeting_point} within {THIS_RANK.timeout_s:g} s ({str(error).splitlines()[0]})"
        ) from error


def join(world: World, *, device: torch.device, timeout_s: float, collectives_on_device: bool = False) -> None:
    """Join the other ranks. A process joins once: another training in it meets the same ranks and returns at once.

    Every wait of this rank from then on ends after ``timeout_s``. Raises WaitTimeoutError if the ranks have not all
    joined within it, and SharedDeviceError if several are on one GPU. The default process group uses gloo, on GPUs too:
    it carries the objects and CPU tensors that ranks exchange rarely. Tensors of a GPU go through separate groups
    (``new_group``), except with ``collectives_on_device``: the default group then uses NCCL for them, as systems other
    than ours expect. The caller calls ``leave`` after it has reported its result.
    """
    THIS_RANK.rank, THIS_RANK.timeout_s = world.rank, timeout_s
    THIS_RANK.set_phase(BEFORE_TRAINING)
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size):
        return
    if world.meeting_point.startswith("file:"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one node, whatever its host name resolves to
    if device.type == "cuda":
        bind_to_cores_near(device, world.ranks_here)
        torch.cuda.set_device(device)
    else:
        wake_without_preemption()  # before gloo starts threads
    with _meeting(world):
        # No device_id: with it, NCCL would share a communicator between groups and so order their messages.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if collectives_on_device and device.type == "cuda" else "gloo",
            init_method=world.meeting_point,
            rank=world.rank,
            world_size=world.size,
            timeout=_timeout(),
        )
    THIS_RANK.hosts = [rank_device.host for rank_device in gather_rank_devices(RankDevice.of_this_rank(device))]


def new_group(
    ranks: Sequence[int], *, device: torch.device, messages: bool = False, numbers: bool = False
) -> dist.ProcessGroup:
    """A process group of ``ranks`` for tensors on ``device``; all ranks of the world must call it.

    A group for ``messages`` between stages occupies little of a GPU, and its kernels have priority over compute. A
    group that only adds up a few ``numbers`` has one channel of NCCL, since its memory grows with its channels.
    """
    with waiting_for(f"a process group of ranks {', '.join(map(str, ranks))}"):
        if device.type != "cuda":
            return dist.new_group(ranks, timeout=_timeout(), backend="gloo")
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=messages)
        options._timeout = timedelta(seconds=NCCL_TIMEOUT_S)  # the same as below: new_group warns if they differ
        if messages:
            options.config.max_ctas = MESSAGE_CHANNELS
        elif numbers:
            options.config.max_ctas = 1
        dist.barrier()  # new_group also waits for all ranks, but with the group's long time-out
        return dist.new_group(ranks, timeout=options._timeout, backend="nccl", pg_options=options)


def connect(group: dist.ProcessGroup, *, device: torch.device, what: str) -> None:
    """Use ``group`` once, because NCCL connects its ranks at the first use and blocks until all take part.

    All ranks of the group must call it. ``what`` names them in an error.
    """
    connection = f"a connection between {what}"
    with waiting_for(connection):
        work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    wait(work, what=connection)


def without_pair_warning(call: Callable[[], _Result]) -> _Result:
    """What ``call`` returns, without torch's warning that a pair of ranks gets a communicator of its own, as it should.

    torch prints it from C++, where no setting hides it alone. Inside an autograd Function, C++ code makes Python's
    warnings instead, which can be filtered.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "An unbatched P2P op")
        return cast(_Result, _Called.apply(call))


class _Called(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[[], Any]) -> Any:
        return call()


def leave() -> None:
    """Leave the other ranks, which may be gone already, after reporting success.

    Do not call it after a failure, or before the report: NCCL's shutdown waits for kernels that may never end.
    """
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()


def leave_or_end() -> None:
    """Call ``leave``. If that takes longer than LEAVE_S, end the process with exit code 0."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    end = threading.Timer(LEAVE_S, os._exit, [0])
    end.daemon = True
    end.start()
    leave()
    end.cancel()
