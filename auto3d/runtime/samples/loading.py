"""Load the inputs of a rank's micro-batches onto its device, in the order in which its program needs them.

On a GPU a thread prefetches them into pinned memory: a copy from pageable memory would block the host until the device
has finished everything queued before the copy. A CPU rank makes its inputs when it needs them, because a thread would
take time from the core that computes.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Event
from typing import Protocol

import numpy as np
import torch

from auto3d.data import MicroBatches, Reading
from auto3d.runtime.process.background import start_thread
from auto3d.runtime.samples.neighbours import Neighbour
from auto3d.schedule.operation import Kind
from auto3d.schedule.program import PipeStage, Program

PREFETCHED = 3  # micro-batches in pinned memory: the copy in progress, and two for the next forwards
_COMPARED_FIRST, _COMPARED_EVERY = 4, 16  # iterations; see ``is_compared``


@dataclass(frozen=True, slots=True)
class Need:
    """The inputs of a micro-batch called ``names`` that a forward needs; without names, fingerprints to compare."""

    iteration: int
    index: int  # index of the micro-batch in the global batch
    names: tuple[str, ...]
    replica: int | None = None  # the replica of a stage that reads it; None: this rank's


Compares = Callable[[Need], bool]  # whether fingerprints of it are compared


def is_compared(iteration: int, begin: int) -> bool:
    """Whether ranks compare what one of them reads for others in ``iteration`` of a run that began with ``begin``.

    They do in the first few, where data that differ do so from the start, and then now and then. They also do where
    ``TrainingData.begins_epoch``. Other pipelines are compared more often: see ``neighbours``.
    """
    return iteration - begin < _COMPARED_FIRST or iteration % _COMPARED_EVERY == 0


class PendingCopy(Protocol):
    """A copy that is queued on a device."""

    def synchronize(self) -> None:
        """Wait until the device has made the copy."""


class PinnedMemory(Protocol):
    """Host memory from which a device copies without the host."""

    def begin_thread(self) -> None:
        """A thread that uses this memory calls this first."""

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An empty host tensor, which the device can read."""

    def queue_copy(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], PendingCopy]:
        """Copies of ``tensors`` on the device, queued behind the work already queued there. Returns without waiting."""


class CudaPinnedMemory:
    """Pinned memory for a GPU, which copies from it on its compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin_thread(self) -> None:
        torch.cuda.set_device(self._device)  # a new thread has device 0, where its first wait would make a context

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def queue_copy(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], PendingCopy]:
        copies = {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}
        done = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps; by default it would spin on a core
        done.record(torch.cuda.current_stream(self._device))
        return copies, done


def pinned_memory_of(device: torch.device) -> PinnedMemory | None:
    """Pinned memory for ``device``; None for a CPU, which needs no copies."""
    return CudaPinnedMemory(device) if device.type == "cuda" else None


class Loader:
    """The inputs of a rank's micro-batches, on its device.

    ``memory`` is the pinned memory of a GPU, through which a thread prefetches; None on a CPU, which uses no thread.
    ``largest`` has the shape of each input in the largest micro-batch; without it, the first is as large as any.
    """

    def __init__(
        self,
        batches: MicroBatches,
        memory: PinnedMemory | None,
        largest: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._batches, self._largest = batches, largest or {}
        self._memory = memory
        self._prefetcher: _Prefetcher | None = None
        self._expected: list[Need] = []  # inputs to prefetch after the present program

    def start(self, needs: Sequence[Need], iterations: int, compares: Compares = lambda _: False) -> None:
        """Begin a program of ``iterations`` iterations, whose forwards need ``needs``, in this order.

        A Need without names is read only where it ``compares``.

        The loader expects the same program again afterwards and prefetches for it, so that the first inputs of an
        iteration are ready when it begins. A call allocates pinned memory, which may synchronise the device: no message
        may be pending.
        """
        if self._memory is None or not needs:
            return
        if needs != self._expected:
            self.end()
            self._prefetcher = _Prefetcher(needs, iterations, compares, self._batches, self._memory, self._largest)
        self._expected = _later(needs, iterations)

    def read(self, iteration: int, index: int, names: Collection[str], *, compared: bool = False) -> Reading:
        """The inputs called ``names`` of micro-batch ``index`` of ``iteration``, on the device; if ``compared``, it has
        fingerprints. An error of the thread that made them is raised here."""
        need = Need(iteration, index, tuple(names))
        if self._memory is None or not names:
            return _made(self._batches, need, compared=compared)
        assert self._prefetcher is not None, "start() comes before read()"
        return self._prefetcher.take(need)

    def fingerprints(self, iteration: int, index: int, replica: int) -> np.ndarray | None:
        """The fingerprints of what ``replica`` of a stage reads of micro-batch ``index``."""
        if self._prefetcher is None:
            return self._batches.fingerprints(iteration, index, replica)
        return self._prefetcher.take_compared(Need(iteration, index, (), replica)).fingerprints

    def end(self) -> None:
        """End the thread without waiting for it. It also ends with this object and with the process."""
        if self._prefetcher is not None:
            self._prefetcher.end()
        self._prefetcher, self._expected = None, []


def needs_of(
    program: Program,
    inputs_of: Mapping[PipeStage, Collection[str]],
    *,
    first_iteration: int,
    first_micro_batch: int,
    micro_batches: int,
    slices: int = 1,
    neighbour: Neighbour | None = None,
) -> list[Need]:
    """What the forwards of ``program`` need, in order; ``inputs_of`` maps a stage to the model's inputs that it uses.

    This pipeline runs ``micro_batches`` micro-batches of each global batch, beginning with ``first_micro_batch``. With
    ``slices`` of the sequence, these numbers count slices. What ``neighbour`` reads is read too.
    """
    needs = []
    for step in program.steps:
        operation = step.operation
        names = tuple(inputs_of[operation.stage, operation.pipe])
        if operation.kind is Kind.FORWARD and names:
            for micro_batch in operation.micro_batches:
                later, index = divmod(micro_batch, micro_batches)
                needs.append(Need(first_iteration + later, (first_micro_batch + index) // slices, names))
                if neighbour is not None and operation.stage == neighbour.stage and index % slices == 0:
                    other = neighbour.first + index // slices
                    needs.append(Need(first_iteration + later, other, (), neighbour.replica))
    return needs


@dataclass
class _Buffers:
    """Pinned memory for one micro-batch, and the last copy from it."""

    pinned: dict[str, torch.Tensor]
    copy: PendingCopy | None = None


Made = tuple[Need, _Buffers, Reading] | Exception  # the inputs of the reading are in the buffers
Compared = tuple[Need, Reading] | Exception  # without inputs


def _made(batches: MicroBatches, need: Need, *, compared: bool) -> Reading:
    """What ``need`` says; if it is ``compared``, with fingerprints."""
    if not need.names and need.replica is not None:
        return Reading(fingerprints=batches.fingerprints(need.iteration, need.index, need.replica))
    reading = batches.read(need.iteration, need.index, need.names)
    if not compared or reading.fingerprints is not None:
        return reading
    return replace(reading, fingerprints=batches.fingerprints(need.iteration, need.index))


class _Prefetcher:
    """A thread that makes the next inputs, and pauses while all buffers are full."""

    def __init__(
        self,
        needs: Sequence[Need],
        iterations: int,
        compares: Compares,
        batches: MicroBatches,
        memory: PinnedMemory,
        largest: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._memory = memory
        self._made: SimpleQueue[Made] = SimpleQueue()
        self._compared: SimpleQueue[Compared] = SimpleQueue()
        self._free: SimpleQueue[_Buffers | None] = SimpleQueue()
        names = dict.fromkeys(name for need in needs for name in need.names)
        example = batches.read(needs[0].iteration, needs[0].index, tuple(names))
        for _ in range(PREFETCHED):
            pinned = {
                name: memory.empty_pinned(largest.get(name, tensor.shape), tensor.dtype)
                for name, tensor in example.inputs.items()
            }
            self._free.put(_Buffers(pinned))
        ended = Event()
        self.end = weakref.finalize(self, _end, ended, self._free)
        # The thread must not refer to this object, because it ends when this object is collected.
        needed = _endless(needs, iterations, compares)
        queues = self._free, self._made, self._compared
        work = partial(_prefetch, memory, needed, compares, batches, *queues, ended)
        start_thread("inputs", work, end=partial(_end, ended, self._free))

    def take(self, need: Need) -> Reading:
        """What was read for ``need``, which must be the next need, with copies of its inputs on the device."""
        made = self._made.get()
        if isinstance(made, Exception):
            raise made
        next_need, buffers, reading = made
        assert next_need == need, f"{next_need} comes next, not {need}"
        copies, buffers.copy = self._memory.queue_copy({name: reading.inputs[name] for name in need.names})
        self._free.put(buffers)
        return replace(reading, inputs=copies)

    def take_compared(self, need: Need) -> Reading:
        """What was read for ``need``, which must be the next need that has no names."""
        read = self._compared.get()
        if isinstance(read, Exception):
            raise read
        next_need, reading = read
        assert next_need == need, f"{next_need} is compared next, not {need}"
        return reading


def _prefetch(
    memory: PinnedMemory,
    needs: Iterable[Need],
    compares: Compares,
    batches: MicroBatches,
    free: SimpleQueue[_Buffers | None],
    made: SimpleQueue[Made],
    compared: SimpleQueue[Compared],
    ended: Event,
) -> None:
    try:
        memory.begin_thread()
        for need in needs:
            if not need.names:
                if ended.is_set():
                    return
                compared.put((need, _made(batches, need, compared=True)))
                continue
            buffers = free.get()
            if ended.is_set():
                return
            assert buffers is not None, "None is only sent to end the thread"
            if buffers.copy is not None:
                buffers.copy.synchronize()  # the device reads the buffers until then
            reading = _made(batches, need, compared=compares(need))
            ready = {}
            for name, tensor in reading.inputs.items():
                # A micro-batch may have fewer samples, or shorter samples.
                ready[name] = buffers.pinned[name].view(-1)[: tensor.numel()].view(tensor.shape)
                ready[name].copy_(tensor)
            made.put((need, buffers, replace(reading, inputs=ready)))
    except Exception as error:
        made.put(error)
        compared.put(error)


def _end(ended: Event, free: SimpleQueue[_Buffers | None]) -> None:
    ended.set()
    free.put(None)  # wakes the thread if it waits for a free buffer


def _endless(needs: Sequence[Need], iterations: int, compares: Compares) -> Iterator[Need]:
    for offset in count(0, iterations):
        for need in _later(needs, offset):
            if need.names or compares(need):
                yield need


def _later(needs: Sequence[Need], iterations: int) -> list[Need]:
    return [replace(need, iteration=need.iteration + iterations) for need in needs]
