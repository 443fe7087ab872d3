"""Faults that the simulated CUDA must find, planted in the engine and in a small program of streams."""

import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from auto3d.runtime.executor import Executor
from auto3d.runtime.messages.exchange import Exchange
from auto3d.runtime.messages.gradient_sync import GradientSync
from auto3d.runtime.messages.slice_collectives import Begun
from auto3d.runtime.messages.totals import Totals
from auto3d.runtime.process.world import World, join, leave
from auto3d.runtime.samples.loading import CudaPinnedMemory
from auto3d.schedule.program import Message

RECEIVE = Exchange.receive
RUN, FORWARD = Executor.run, Executor._forward
HOST_READ = "called a synchronizing CUDA operation"  # in torch's error
OTHER_CONTEXT = "has a context on the GPUs of other ranks:"


def _in_mode(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """``function`` in torch's ``mode`` for calls that wait for the device: "error" or "default"."""

    @wraps(function)
    def changed(*arguments: Any, **options: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            return function(*arguments, **options)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return changed


def refuse_host_reads() -> None:
    """Let the executor raise an error where it waits for the device, but for the sums with which iterations end."""
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    no_more = object()

    def run(*arguments: Any) -> Iterator[Any]:
        step = _in_mode(partial(next, RUN(*arguments), no_more), "error")
        yield from iter(step, no_more)

    Executor.run = run  # type: ignore[method-assign]
    for name in ("reduce", "_next"):
        setattr(Totals, name, _in_mode(getattr(Totals, name), "default"))


def forward_that_is_read(self: Any, *arguments: Any) -> None:
    """``Executor._forward`` after which the host looks at a value of the device."""
    FORWARD(self, *arguments)
    assert torch.ones((), device="cuda").item() == 1


def message_without_waiting(self: Any, message: Message) -> dict[str, torch.Tensor]:
    """``Exchange.receive`` whose device does not wait for the message."""
    with patch.object(self._run_ahead, "wait", lambda work, what: None):
        return RECEIVE(self, message)


def sum_without_waiting(self: Any, begun: Begun, what: str) -> None:
    """``GradientSync._wait`` whose device does not wait for the sum."""
    begun.finish()


class NothingPending:
    def synchronize(self) -> None:
        """Return at once."""


def without_event(self: Any, tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], NothingPending]:
    """``CudaPinnedMemory.queue_copy`` that says at once that the device has read the buffers."""
    return {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}, NothingPending()


def begin_on_first_device(self: Any) -> None:
    """``CudaPinnedMemory.begin_thread`` that leaves the thread the device of every new thread, GPU 0."""


# What is planted -> the class, its method, what it is replaced by, and a case of parity.py that must come out wrong.
IN_THE_ENGINE: dict[str, tuple[type, str, Callable[..., Any], str]] = {
    "no event between a message and its use": (Exchange, "receive", message_without_waiting, "1f1b"),
    "a host read of a device value": (Executor, "_forward", forward_that_is_read, "one rank"),
    "no event between a sum of gradients and its use": (GradientSync, "_wait", sum_without_waiting, "data"),
    "pinned buffers that are written while the device reads them": (
        CudaPinnedMemory,
        "queue_copy",
        without_event,
        "one rank",
    ),
    "a thread without a device of its own": (CudaPinnedMemory, "begin_thread", begin_on_first_device, "data"),
}


def _slow() -> None:
    matrix = torch.ones(400, 400, device="cuda")
    for _ in range(40):
        matrix = matrix @ matrix


def _written_by_another_stream(waits: bool) -> bool:
    """Whether this stream reads what another one writes; it should wait for it."""
    side = torch.cuda.Stream()
    written = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        _slow()
        written.fill_(1)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    found = bool((written.cpu() == 1).all())
    torch.cuda.synchronize()
    return found


def _freed_while_read(recorded: bool) -> bool:
    """Whether another stream reads the right values of a tensor that is freed meanwhile; it should be recorded."""
    side = torch.cuda.Stream()
    tensor = torch.ones(2**20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        _slow()
        copy = tensor + 0
    if recorded:
        tensor.record_stream(side)
    del tensor
    torch.zeros(2**20, device="cuda")  # takes the memory if it is free
    torch.cuda.synchronize()
    return bool((copy.cpu() == 1).all())


def of_streams(world: World) -> dict[str, tuple[bool, bool]]:
    """Kind of fault -> whether the values are right without it, and with it."""
    return {
        "a missing event": (_written_by_another_stream(True), _written_by_another_stream(False)),
        "a tensor freed while another stream reads it": (_freed_while_read(True), _freed_while_read(False)),
    }


def of_sums(world: World, sizes: tuple[int, int]) -> float:
    """A sum over two ranks, of which each has its own number of ``sizes``."""
    device = torch.device("cuda", world.rank)
    join(world, device=device, timeout_s=60)
    try:
        group = dist.new_group([0, 1], backend="nccl")
        tensor = torch.full((sizes[world.rank],), world.rank + 1.0, device=device)
        dist.all_reduce(tensor, group=group)
        return float(tensor.sum().item())
    finally:
        leave()


def of_groups(world: World, orders: tuple[tuple[int, int], tuple[int, int]]) -> float:
    """A sum in each of two groups of the same two ranks, of which each uses them in its own of ``orders`` first."""
    os.environ["SIMULATED_CUDA_JOIN_S"] = "20"
    device = torch.device("cuda", world.rank)
    join(world, device=device, timeout_s=60)
    try:
        groups = [dist.new_group([0, 1], backend="nccl") for _ in range(2)]
        tensor = torch.full((3,), world.rank + 1.0, device=device)
        for number in orders[world.rank]:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM if number == 0 else dist.ReduceOp.MAX, group=groups[number])
        return float(tensor.max().item())
    finally:
        leave()
