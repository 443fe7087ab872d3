"""The interface for progress of trials, and helpers for everything that runs them."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

from auto3d.runtime.measurement import Measurement, Status
from launch.recipe.settings import emulation
from launch.store.files import write_whole
from launch.store.trials import Trial

ERROR_LINES = 8
FINAL = (Status.OK, Status.OOM, Status.INFEASIBLE)  # a trial with another status may succeed if it runs again


@dataclass(frozen=True)
class Ended:
    """A trial that has just ended."""

    trial: Trial
    measurement: Measurement
    number: int  # counts the trials that this sweep has run, from 1
    total: int


class Watcher(Protocol):
    """Receives the progress of a sweep."""

    def begin(self, total: int, kept: Sequence[tuple[Trial, Measurement]], left_out: int) -> None:
        """Called before the first of ``total`` trials; ``kept`` trials ended earlier, ``left_out`` plans do not run."""

    def tell(self, line: str) -> None:
        """Receives a message that is neither the start nor the end of a trial."""

    def start(self, trial: Trial) -> None: ...

    def end(self, ended: Ended) -> None: ...


@dataclass(frozen=True)
class SomeTrials:
    """Passes the progress of some trials to ``watcher``: of ``total`` trials, they come after the first ``before``."""

    watcher: Watcher
    before: int
    total: int

    def begin(self, total: int, kept: Sequence[tuple[Trial, Measurement]], left_out: int) -> None: ...

    def tell(self, line: str) -> None:
        self.watcher.tell(line)

    def start(self, trial: Trial) -> None:
        self.watcher.start(trial)

    def end(self, ended: Ended) -> None:
        self.watcher.end(replace(ended, number=self.before + ended.number, total=self.total))


def write_failure(trial: Trial, status: Status, error: str) -> Measurement:
    """Write and return the measurement of a trial that could not write its own."""
    measurement = Measurement(
        plan=trial.plan,
        status=status,
        emulated=emulation(trial.recipe.values) is not None,
        error="\n".join(error.rstrip().splitlines()[-ERROR_LINES:]),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_whole(trial.measurement_file, measurement.to_json())
    return measurement


@contextmanager
def interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Delay SIGINT and SIGTERM, so that no trial starts unrecorded; yields a function that says whether one came."""
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: noted.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(noted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
