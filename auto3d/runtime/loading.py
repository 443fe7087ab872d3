"""Inputs of a rank's micro-batches on its device, made ahead in the order in which its program needs them.

On a GPU a thread makes them, in pinned memory: a copy from other memory would hold up the host until the device has
done all that was queued before it. A CPU rank makes them when they are needed, for a thread would take its core away.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol

import torch

from auto3d.runtime.data import Batches
from auto3d.schedule.operation import Kind
from auto3d.schedule.program import PipeStage, Program

AHEAD = 3  # micro-batches in pinned memory: one that is being copied, and two for the next forwards


@dataclass(frozen=True, slots=True)
class Need:
    """Inputs of one micro-batch, numbered in the global batch of an iteration."""

    iteration: int
    index: int
    names: tuple[str, ...]


class Copy(Protocol):
    """A queued copy."""

    def synchronize(self) -> None:
        """Wait until the device has done it."""


class Memory(Protocol):
    """Memory that a device copies from by itself, and its own."""

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty host tensor of the same shape and type, which the device can read."""

    def queue_copy(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Copy]:
        """Copies of ``tensors`` on the device, which it makes after all work that it has been given; never waits."""


class CudaMemory:
    """That of a GPU; it copies on the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, pin_memory=True)

    def queue_copy(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Copy]:
        copies = {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}
        done = torch.cuda.Event(blocking=True)  # whoever waits for it sleeps: the default would keep a core busy
        done.record(torch.cuda.current_stream(self._device))
        return copies, done


def memory_of(device: torch.device) -> Memory | None:
    """None for a CPU, which reads all memory itself."""
    return CudaMemory(device) if device.type == "cuda" else None


class Loader:
    """Gives a rank the inputs of its micro-batches on a device with this ``memory``; None: a CPU, without a thread."""

    def __init__(self, batches: Batches, memory: Memory | None) -> None:
        self._batches = batches
        self._memory = memory
        self._ahead: _Ahead | None = None
        self._expected: list[Need] = []  # the thread makes these after the program that runs

    def start(self, needs: Sequence[Need], iterations: int) -> None:
        """Begin a program of so many ``iterations``, whose forwards need ``needs``, in order.

        The same program is expected to follow it, so that the first inputs of an iteration are there when it begins.
        This allocates pinned memory, which may synchronise the device: no message may be pending.
        """
        if self._memory is None or not needs:
            return
        if needs != self._expected:
            self.end()
            self._ahead = _Ahead(needs, iterations, self._batches.micro_batch, self._memory)
        self._expected = _later(needs, iterations)

    def inputs(self, iteration: int, index: int, names: Collection[str]) -> dict[str, torch.Tensor]:
        """The inputs called ``names`` of micro-batch ``index`` of ``iteration``, on the device; each [samples, *shape].

        It raises what making them raised.
        """
        if self._memory is None or not names:
            return self._batches.micro_batch(iteration, index, names)
        return self._ahead.take(Need(iteration, index, tuple(names)))

    def end(self) -> None:
        """End the thread, without waiting for it. It ends with this object and with the process, too."""
        if self._ahead is not None:
            self._ahead.end()
        self._ahead, self._expected = None, []


def needs_of(
    program: Program,
    inputs_of: Mapping[PipeStage, Collection[str]],
    *,
    first_iteration: int,
    first_micro_batch: int,
    micro_batches: int,
) -> list[Need]:
    """What the forwards of ``program`` need, in order; ``inputs_of`` has the model's inputs that each stage uses.

    Each iteration has ``micro_batches`` of this replica of the pipeline: those of the global batch from
    ``first_micro_batch`` on.
    """
    needs = []
    for step in program.steps:
        operation = step.operation
        names = tuple(inputs_of[operation.stage, operation.pipe])
        if operation.kind is Kind.FORWARD and names:
            for micro_batch in operation.micro_batches:
                later, index = divmod(micro_batch, micro_batches)
                needs.append(Need(first_iteration + later, first_micro_batch + index, names))
    return needs


@dataclass
class _Buffers:
    """Pinned memory of one micro-batch, and the last copy from it."""

    pinned: dict[str, torch.Tensor]
    copy: Copy | None = None


Make = Callable[[int, int, Collection[str]], dict[str, torch.Tensor]]
Made = tuple[Need, _Buffers] | Exception


class _Ahead:
    """A thread that makes what is needed next, and pauses when all buffers are full."""

    def __init__(self, needs: Sequence[Need], iterations: int, make: Make, memory: Memory) -> None:
        self._memory = memory
        self._made: SimpleQueue[Made] = SimpleQueue()
        self._free: SimpleQueue[_Buffers | None] = SimpleQueue()
        names = dict.fromkeys(name for need in needs for name in need.names)
        example = make(needs[0].iteration, needs[0].index, tuple(names))
        for _ in range(AHEAD):
            self._free.put(_Buffers({name: memory.pinned_like(tensor) for name, tensor in example.items()}))
        ended = Event()
        self.end = weakref.finalize(self, _end, ended, self._free)
        # The thread must not hold this object, with which it ends.
        work = (_endless(needs, iterations), make, self._free, self._made, ended)
        Thread(target=_make_ahead, args=work, name="inputs", daemon=True).start()

    def take(self, need: Need) -> dict[str, torch.Tensor]:
        """Copies of what was made for ``need``, which must be the next."""
        made = self._made.get()
        if isinstance(made, Exception):
            raise made
        found, buffers = made
        assert found == need, f"{found} comes next, not {need}"
        copies, buffers.copy = self._memory.queue_copy({name: buffers.pinned[name] for name in need.names})
        self._free.put(buffers)
        return copies


def _make_ahead(
    needs: Iterable[Need],
    make: Make,
    free: SimpleQueue[_Buffers | None],
    made: SimpleQueue[Made],
    ended: Event,
) -> None:
    try:
        for need in needs:
            buffers = free.get()
            if ended.is_set():
                return
            if buffers.copy is not None:
                buffers.copy.synchronize()  # until then the device reads them
            for name, tensor in make(need.iteration, need.index, need.names).items():
                buffers.pinned[name].copy_(tensor)
            made.put((need, buffers))
    except Exception as error:
        made.put(error)


def _end(ended: Event, free: SimpleQueue[_Buffers | None]) -> None:
    ended.set()
    free.put(None)  # wakes the thread where it waits for free buffers


def _endless(needs: Sequence[Need], iterations: int) -> Iterator[Need]:
    for later in count(0, iterations):
        yield from _later(needs, later)


def _later(needs: Sequence[Need], iterations: int) -> list[Need]:
    return [replace(need, iteration=need.iteration + iterations) for need in needs]
