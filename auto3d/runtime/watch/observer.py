"""When each operation of a rank ran on its device, and how long it waited for other ranks and for data."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from auto3d.runtime.clock import Clock, Mark
from auto3d.schedule.operation import Operation


class StepObserver(Protocol):
    """What an executor and its waits tell of."""

    def begin(self, operation: Operation) -> None:
        """The executor begins to run ``operation``, or to queue it on a GPU."""

    def end(self) -> None:
        """The operation is over, or queued."""

    def begin_wait(self) -> None:
        """A wait for another rank begins, or is queued."""

    def end_wait(self) -> None:
        """The wait is over, or queued."""

    def begin_read(self) -> None:
        """The executor takes the inputs of a micro-batch from the data, or waits for the thread that reads them."""

    def end_read(self) -> None:
        """It has them, or their copies to the device are queued."""


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


class OperationTimes:
    """A StepObserver that marks the device's time, and gives the times once the device is idle.

    A mark costs a call of perf_counter on a CPU, and an event in the queue of a GPU: nothing waits for the device.
    ``annotate``, if there is one, makes a context for each operation, by its name.
    """

    def __init__(self, clock: Clock) -> None:
        self.annotate: Callable[[str], AbstractContextManager[object]] | None = None
        self._annotation: AbstractContextManager[object] | None = None
        self._seconds, self._mark = clock.seconds, clock.mark
        self._marks: list[tuple[Operation, list[Mark]]] = []  # begin, begin and end of each wait, and end
        self._present: list[Mark] | None = None  # marks of the operation that runs
        self._reads: list[Mark] = []  # begin and end of each read

    def begin(self, operation: Operation) -> None:
        if self.annotate is not None:
            self._annotation = self.annotate(str(operation))
            self._annotation.__enter__()
        self._present = [self._mark()]
        self._marks.append((operation, self._present))

    def end(self) -> None:
        assert self._present is not None
        self._present.append(self._mark())
        self._present = None
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None

    def begin_wait(self) -> None:
        if self._present is not None:  # otherwise it is between operations
            self._present.append(self._mark())

    end_wait = begin_wait

    def begin_read(self) -> None:
        self._reads.append(self._mark())

    end_read = begin_read

    def take_read_s(self) -> float:
        """Seconds of the device's time that passed in reads since the last call; the device has run them all.

        A GPU that still has work while its host reads loses none.
        """
        marks, self._reads = self._reads, []
        return sum(map(self._seconds, marks[::2], marks[1::2]))

    def take(self, origin: Mark) -> list[ObservedOperation]:
        """The operations since the last call, in order, in seconds after ``origin``; the device has run them all."""
        taken, self._marks = self._marks, []
        observed, seconds = [], self._seconds
        for operation, (begin, *waits, end) in taken:
            waited_s = sum(map(seconds, waits[::2], waits[1::2]))
            observed.append(ObservedOperation(operation, seconds(origin, begin), seconds(origin, end), waited_s))
        return observed
