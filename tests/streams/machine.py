"""Simulated ranks: a host and a device each, with CUDA's streams, hardware queues, blocks and events.

A host enqueues items on the streams of its device and continues. Each stream is mapped to a hardware queue. A queue
issues its items in the order of enqueueing; an item that cannot start yet blocks all items behind it, whatever their
streams. A communication kernel spins, and occupies its blocks, until the kernels of all participants run.

Hosts are threads that pass one baton to each other, in virtual time. So a run depends only on its seed, and a deadlock
is detected exactly: no kernel ends and no host can continue.
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from random import Random

import torch


class DeadlockError(AssertionError):
    """No host and no device can continue, and something is not done."""


class RaceError(AssertionError):
    """A kernel accesses memory that another one uses, and nothing orders the two."""


class _AbandonedError(BaseException):
    """Ends the thread of a host whose simulation is over."""


class Item:
    """An entry of a stream and of a hardware queue."""

    def __init__(self, stream: "Stream", label: str) -> None:
        self.stream, self.label = stream, label
        self.done = False

    def held_up_by(self) -> str:
        """The reason why it cannot start although its predecessors in the stream are done; empty if it can start."""
        return ""

    def begin(self) -> None:
        self.stream.finish(self)


class Record(Item):
    """An event: done when everything before it in its stream is done."""

    past = 0

    def begin(self) -> None:
        self.past = self.stream.past
        super().begin()


class Await(Item):
    """Blocks its stream until an event of another stream."""

    def __init__(self, stream: "Stream", record: Record) -> None:
        super().__init__(stream, f"wait for {record.label}")
        self._record = record

    def held_up_by(self) -> str:
        return "" if self._record.done else self._record.label

    def begin(self) -> None:
        self.stream.past |= self._record.past
        super().begin()


class Kernel(Item):
    """Reads and writes tensors; its work is ``effect``, which happens when it ends.

    ``past`` has one bit for each kernel that is certain to end before this one begins, in whatever order queues and
    delays let them run.
    """

    def __init__(
        self,
        stream: "Stream",
        label: str,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        effect: Callable[[], None] = lambda: None,
        blocks: int = 1,
        seconds: float,
        meeting: "Meeting | None" = None,
    ) -> None:
        super().__init__(stream, label)
        self.number = next(stream.device.machine.numbers)
        self.past = stream.device.known
        self.running = False
        self.blocks, self.seconds = blocks, seconds
        self._reads = [tensor.detach() for tensor in reads]  # aliases, so that the host can free its own tensors
        self._writes = [tensor.detach() for tensor in writes]
        self._effect = effect
        self._meeting = meeting

    def held_up_by(self) -> str:
        free = self.stream.device.free_blocks
        return "" if self.blocks <= free else f"{self.blocks} blocks, of which {free} are free"

    def begin(self) -> None:
        device = self.stream.device
        self.running = True
        self.past |= self.stream.past
        device.free_blocks -= self.blocks
        for tensor in self._reads:
            device.memory.access(tensor, self, writes=False)
        for tensor in self._writes:
            device.memory.access(tensor, self, writes=True)
        if self._meeting is None:
            device.machine.after(self.seconds, self.end)
        else:
            self._meeting.arrive()

    def end(self) -> None:
        self._effect()
        self.running = False
        self._reads = self._writes = []  # without references the memory is freed
        self._effect = lambda: None
        self.stream.past |= self.past | 1 << self.number
        self.stream.device.free_blocks += self.blocks
        self.stream.finish(self)

    def __str__(self) -> str:
        if not self.running:
            return self.label
        absent = self._meeting.absent() if self._meeting is not None else ""
        return f"{self.label} (spins until {absent})" if absent else f"{self.label} (runs)"


class Meeting:
    """A message or a collective: its kernels spin until all of them run, and they end together."""

    def __init__(self, machine: "Machine", participants: Sequence[int], effect: Callable[[dict], None]) -> None:
        self._machine = machine
        self._participants = participants
        self._effect = effect
        self.kernels: dict[int, Kernel] = {}  # rank -> its kernel, once enqueued
        self._running = 0

    def arrive(self) -> None:
        self._running += 1
        if self._running == len(self._participants):
            self._machine.after(max(kernel.seconds for kernel in self.kernels.values()), self._end)

    def absent(self) -> str:
        missing = [rank for rank in self._participants if rank not in self.kernels]
        waiting = [rank for rank, kernel in self.kernels.items() if not kernel.running]
        found = [f"rank {rank} enqueues its own" for rank in missing] + [
            f"rank {rank} starts its own" for rank in waiting
        ]
        return " and ".join(found)

    def _end(self) -> None:
        self._effect(self.kernels)
        together = 0
        for kernel in self.kernels.values():
            together |= kernel.past | 1 << kernel.number
        for kernel in self.kernels.values():
            kernel.past = together
        for kernel in list(self.kernels.values()):
            kernel.end()


class Stream:
    """Items that run one after the other."""

    def __init__(self, device: "Device", number: int, name: str) -> None:
        self.device, self.name = device, name
        self.queue = device.queues[number % len(device.queues)]
        self.past = 0
        self.pending: deque[Item] = deque()

    def enqueue(self, item: Item) -> None:
        self.pending.append(item)
        self.queue.append(item)
        self.device.progress()

    def finish(self, item: Item) -> None:
        assert self.pending.popleft() is item
        item.done = True
        self.device.changes += 1
        self.device.progress()

    def record(self, label: str) -> Record:
        record = Record(self, label)
        self.enqueue(record)
        return record

    def wait_for(self, record: Record) -> None:
        self.enqueue(Await(self, record))


class Memory:
    """Records which kernels use which bytes of a device, to find uses that nothing orders."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._uses: dict[int, list[tuple[int, int, Kernel, bool]]] = {}  # storage -> first byte, last, kernel, writes?

    def allocated(self, tensor: torch.Tensor) -> None:
        self._uses.pop(tensor.untyped_storage()._cdata, None)

    def access(self, tensor: torch.Tensor, kernel: Kernel, *, writes: bool) -> None:
        if not tensor.numel():
            return
        start = tensor.storage_offset() * tensor.element_size()
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end = start + span * tensor.element_size()
        left = []
        for use in self._uses.get(tensor.untyped_storage()._cdata, ()):
            first, last, other, wrote = use
            ordered = bool(kernel.past >> other.number & 1) or other is kernel
            if first < end and start < last and (writes or wrote) and not ordered:
                raise RaceError(
                    f"rank {self._rank}: {kernel.label} {'writes' if writes else 'reads'} a buffer that {other.label} "
                    f"{'writes' if wrote else 'reads'}, and nothing orders the two"
                )
            if not (ordered and start <= first and last <= end and (writes or not wrote)):
                left.append(use)
        left.append((start, end, kernel, writes))
        self._uses[tensor.untyped_storage()._cdata] = left


class Device:
    """One rank's device. ``known`` has a bit for each kernel whose end its host has seen, like Kernel.past."""

    def __init__(self, machine: "Machine", rank: int, *, queues: int, blocks: int) -> None:
        self.machine, self.rank = machine, rank
        self.queues: list[deque[Item]] = [deque() for _ in range(queues)]
        self.free_blocks = blocks
        self.memory = Memory(rank)
        self.known = 0
        self.changes = 0
        self._progressing = False
        self._streams: list[Stream] = []
        self.compute = self.new_stream("compute")
        self.current = self.compute

    def new_stream(self, name: str) -> Stream:
        self._streams.append(Stream(self, len(self._streams), name))
        return self._streams[-1]

    def launch(self, label: str, **kernel) -> None:
        """Enqueue a kernel of random length on the current stream."""
        self.current.enqueue(Kernel(self.current, label, seconds=self.machine.delay(), **kernel))

    def progress(self) -> None:
        """Issue everything that can be issued."""
        if self._progressing:
            return
        self._progressing = True
        issued = True
        while issued:
            issued = False
            queues = [queue for queue in self.queues if queue]
            if len(queues) > 1:
                self.machine.random.shuffle(queues)
            for queue in queues:
                while queue and queue[0].stream.pending[0] is queue[0] and not queue[0].held_up_by():
                    queue.popleft().begin()
                    issued = True
        self._progressing = False

    @property
    def idle(self) -> bool:
        return not any(stream.pending for stream in self._streams)

    def see_all(self) -> None:
        for stream in self._streams:
            self.known |= stream.past

    def __str__(self) -> str:
        """The running kernels, and what blocks each queue."""
        running = [str(s.pending[0]) for s in self._streams if s.pending and getattr(s.pending[0], "running", False)]
        stuck = []
        for queue in self.queues:
            if queue:
                head, first = queue[0], queue[0].stream.pending[0]
                cause = head.held_up_by() if first is head else f"{first.label} before it in its stream"
                stuck.append(f"{head.label} waits for {cause}, before {len(queue) - 1} others in its queue")
        return "; ".join(running + stuck) or "idle"


class Host:
    """The thread of one rank, which runs only while it holds the baton."""

    def __init__(self, machine: "Machine", rank: int, body: Callable[[int], object]) -> None:
        self.machine, self.rank = machine, rank
        self.device = machine.devices[rank]
        self.result: object = None
        self.error: BaseException | None = None
        self.done = False
        self.until: Callable[[], bool] | None = None  # the call that blocks it
        self.doing = "at its start"
        self.waiting_for = ""
        self.baton = _taken_lock()
        self._body = body
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        _CURRENT.host = self
        self.baton.acquire()
        try:
            if not self.machine.over:
                self.result = self._body(self.rank)
        except _AbandonedError:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        if not self.machine.over:
            self.machine.baton.release()

    def resume(self) -> None:
        """Let the host run until it returns the baton."""
        self.until = None
        self.baton.release()
        self.machine.baton.acquire()
        if self.error is not None:
            self.error.add_note(f"on the simulated rank {self.rank}, {self.doing}")
            raise self.error

    def _yield(self) -> None:
        self.machine.baton.release()
        self.baton.acquire()
        if self.machine.over:
            raise _AbandonedError

    def spend(self) -> None:
        """Spend the time of one call, during which others continue."""
        if self.machine.over:
            raise _AbandonedError
        seconds = self.machine.delay() * self.machine.host_pace[self.rank]
        if not self.machine.advance(seconds):
            self.machine.after(seconds, self.resume)
            self._yield()

    def block(self, until: Callable[[], bool]) -> None:
        """Block until ``until()`` is true."""
        if self.machine.over:
            raise _AbandonedError
        if not until():
            self.until = until
            self._yield()

    def synchronize(self, record: Record | None = None) -> None:
        """Block until ``record``, or everything on the device, is done."""
        device = self.device
        self.doing, before = f"{self.doing}, synchronising", self.doing
        if record is None:
            self.block(lambda: device.idle)
            device.see_all()
        else:
            self.block(lambda: record.done)
            device.known |= record.past
        self.doing = before

    def sleep(self) -> None:
        """Block until something changes on the device; polling would not see anything earlier."""
        device, changes = self.device, self.device.changes
        self.block(lambda: device.changes != changes)


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


_CURRENT = threading.local()


def current() -> Host:
    """The host of the calling thread."""
    return _CURRENT.host


class Machine:
    """All ranks. ``blocks`` is the number of blocks that a device can run at once."""

    def __init__(self, ranks: int, *, queues: int, blocks: int, seed: int) -> None:
        self.random = Random(seed)
        self.numbers = count()
        self.baton = _taken_lock()
        self.over = False
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.host_pace = [self.random.choice((0.01, 0.3, 3.0)) for _ in range(ranks)]  # relative to kernels of length 1
        self.devices = [Device(self, rank, queues=queues, blocks=blocks) for rank in range(ranks)]
        self.hosts: list[Host] = []

    def delay(self) -> float:
        return self.random.expovariate(1.0)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def advance(self, seconds: float) -> bool:
        """Let time pass if nothing else can happen before; returns whether it has passed."""
        if self._events and self._events[0][0] < self.now + seconds:
            return False
        self.now += seconds
        return True

    def run(self, body: Callable[[int], object]) -> list:
        """Run ``body(rank)`` on every host; returns the results. Raises DeadlockError if they cannot all end."""
        self.hosts = [Host(self, device.rank, body) for device in self.devices]
        for host in self.hosts:
            host.thread.start()
            self.after(self.delay(), host.resume)
        try:
            while self._events:
                self.now, _, action = heapq.heappop(self._events)
                action()
                for host in self.hosts:
                    if host.until is not None and host.until():
                        host.until = None
                        self.after(0.0, host.resume)
            if not all(host.done for host in self.hosts) or not all(device.idle for device in self.devices):
                raise DeadlockError(self._state())
        finally:
            self.over = True
            for host in self.hosts:
                if not host.done:
                    host.baton.release()
                host.thread.join()
        return [host.result for host in self.hosts]

    def _state(self) -> str:
        lines = [
            f"rank {host.rank}: the host is {'done' if host.done else f'stuck {host.doing}'}; device: {host.device}"
            for host in self.hosts
        ]
        return "\n".join(["deadlock:", *lines])
