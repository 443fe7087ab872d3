"""Progress of sweeps, trainings and other long work, on standard error: standard output holds only results."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import inf

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from auto3d.runtime.measurement import Measurement, Status
from auto3d.words import counted
from launch.store.trials import Trial
from launch.store.watcher import ERROR_LINES, FINAL, Ended, Watcher

COLOURS = {Status.OK: "green", Status.OOM: "yellow", Status.FAILED: "red", Status.TIMEOUT: "red"}


@contextmanager
def at_work(console: Console, work: str) -> Iterator[None]:
    """Shows what is being done; only on a terminal."""
    if not console.is_terminal:
        yield
        return
    with console.status(work):
        yield


@contextmanager
def work_progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Shows the step of some work that is under way, only on a terminal; yields a function of that step."""
    if not console.is_terminal:
        yield lambda step: None
        return
    with console.status("starting") as status:
        yield lambda step: status.update(escape(step))


@contextmanager
def search_progress(console: Console) -> Iterator[Callable[[int, float, bool], None]]:
    """Shows the progress of a search, only on a terminal; yields the function ``tell`` of ``search_recipe``."""
    work = "capturing the model and searching"
    if not console.is_terminal:
        yield lambda looked_at, best_s, sought: None
        return
    with console.status(work) as status:

        def tell(looked_at: int, best_s: float, sought: bool) -> None:
            best = f", best {best_s:.4g} s" if best_s < inf else ""
            order = "; searching for an order of operations" if sought else ""
            status.update(f"{work}: {counted(looked_at, 'candidate')}{best}{order}")

        yield tell


@contextmanager
def doctor_progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Shows what the doctor is waiting for; yields a function of a line. Without a terminal, each line appears once."""
    if not console.is_terminal:
        yield cache(lambda line: console.print(line, markup=False, soft_wrap=True))
        return
    with console.status("looking at this machine") as status:
        yield lambda line: status.update(escape(line))


@contextmanager
def sweep_progress(console: Console) -> Iterator[Watcher]:
    """Shows a bar over the trials, and prints a line for each trial that has ended."""
    with bar(console) as progress:
        yield _SweepProgress(progress)


class _SweepProgress:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("capturing the model and looking for plans", total=None)

    def begin(self, total: int, kept: Sequence[tuple[Trial, Measurement]], left_out: int) -> None:
        self._progress.update(self._task, total=total)
        if left_out:
            candidates = counted(left_out, "candidate is left out", "candidates are left out")
            self._print(f"{candidates}, the slowest by prediction: there are more than search.max_trials")
        for trial, measurement in kept:
            if measurement.status not in FINAL:
                self._print_end(f"{trial.name} (not run again)", measurement)

    def tell(self, line: str) -> None:
        self._print(escape(line))

    def start(self, trial: Trial) -> None:
        self._progress.update(self._task, description=trial.name)

    def end(self, ended: Ended) -> None:
        self._print_end(f"{ended.number}/{ended.total} {ended.trial.name}", ended.measurement)
        self._progress.update(self._task, completed=ended.number)

    def _print_end(self, trial: str, measurement: Measurement) -> None:
        status = measurement.status
        figure = f" {measurement.median_s:.3f} s/iteration" if measurement.iteration_s else ""
        figure += " (emulated)" if measurement.emulated else ""
        self._print(f"{escape(trial)} [{COLOURS.get(status, 'white')}]{status}[/]{figure}")
        for line in measurement.error.splitlines()[-ERROR_LINES:]:
            self._print(f"    {escape(line)}")

    def _print(self, text: str) -> None:
        self._progress.console.print(text, soft_wrap=True)


@contextmanager
def profile_progress(console: Console, parts: int | None) -> Iterator[Callable[[str], None]]:
    """Shows a bar over the parts of a measurement; yields a function of the name of a part that is done."""
    with bar(console) as progress:
        task = progress.add_task("starting", total=parts)
        yield lambda part: progress.update(task, advance=1, description=part)


def bar(console: Console) -> Progress:
    """A bar that is shown only on a terminal, and disappears at the end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
