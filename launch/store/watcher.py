"""What is told of trials while they run, and what is common to all that run them."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from auto3d.runtime.measurement import Measurement, Status
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import emulation
from launch.store.files import write_whole
from launch.store.trials import Trial

ERROR_LINES = 8
FINAL = (Status.OK, Status.OOM, Status.INFEASIBLE)  # results; the others may come out better another time


@dataclass(frozen=True)
class Ended:
    """A trial that ended just now."""

    trial: Trial
    measurement: Measurement
    number: int  # of those that this sweep ran, from 1
    total: int


class Watcher(Protocol):
    """What is told how a sweep goes."""

    def begin(self, total: int, kept: Sequence[tuple[Trial, Measurement]], left_out: int) -> None:
        """Before the first of ``total`` trials; those ``kept`` ended earlier, and ``left_out`` plans do not run."""

    def tell(self, line: str) -> None:
        """Something that is neither the start nor the end of a trial."""

    def start(self, trial: Trial) -> None: ...

    def end(self, ended: Ended) -> None: ...


def write_failure(recipe: LoadedRecipe, trial: Trial, status: Status, error: str) -> Measurement:
    """Write the measurement of a trial that could not write its own."""
    measurement = Measurement(
        plan=trial.plan,
        status=status,
        emulated=emulation(recipe.values) is not None,
        error="\n".join(error.rstrip().splitlines()[-ERROR_LINES:]),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_whole(trial.measurement_file, measurement.to_json())
    return measurement


@contextmanager
def interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Only note SIGINT and SIGTERM, so that no trial starts without being known; yields whether one came."""
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
