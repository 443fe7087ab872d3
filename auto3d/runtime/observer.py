"""When each operation of a rank ran on its device, and how long it waited for other ranks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from auto3d.runtime.clock import Clock, Mark
from auto3d.schedule.operation import Operation


class StepObserver(Protocol):
    """What an executor and its waits tell of."""

    def during(self, operation: Operation) -> AbstractContextManager[None]:
        """Entered before, and left after, the executor runs ``operation``, or queues it on a GPU."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Entered before, and left after, a wait for another rank, or the queueing of one."""


@dataclass(frozen=True)
class ObservedOperation:
    """One operation in seconds since the device was idle; ``waited_s`` of it passed in waits for other ranks."""

    operation: Operation
    begin_s: float
    end_s: float
    waited_s: float

    @property
    def computed_s(self) -> float:
        return max(0.0, self.end_s - self.begin_s - self.waited_s)


@dataclass
class _Marks:
    operation: Operation
    begin: Mark
    end: Mark | None = None
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)


class OperationTimes:
    """A StepObserver that marks the device's time, and gives the times once the device is idle.

    A mark costs a call of perf_counter on a CPU, and an event in the queue of a GPU: nothing waits for the device.
    ``annotate``, if there is one, makes a context for each operation, by its name.
    """

    def __init__(self, clock: Clock) -> None:
        self.annotate: Callable[[str], AbstractContextManager[object]] | None = None
        self._clock = clock
        self._marks: list[_Marks] = []
        self._present: _Marks | None = None

    @contextmanager
    def during(self, operation: Operation) -> Iterator[None]:
        with nullcontext() if self.annotate is None else self.annotate(str(operation)):
            self._present = _Marks(operation, self._clock.mark())
            self._marks.append(self._present)
            yield
            self._present.end = self._clock.mark()
            self._present = None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        if self._present is None:  # between operations
            yield
            return
        begin = self._clock.mark()
        yield
        self._present.waits.append((begin, self._clock.mark()))

    def take(self, origin: Mark) -> list[ObservedOperation]:
        """The operations since the last call, in order, in seconds after ``origin``; the device has run them all."""
        marks, self._marks = self._marks, []
        seconds = self._clock.seconds
        return [
            ObservedOperation(
                each.operation,
                seconds(origin, each.begin),
                seconds(origin, each.end),
                sum(seconds(begin, end) for begin, end in each.waits),
            )
            for each in marks
            if each.end is not None
        ]
