"""What a person sees while a sweep or a training runs; on standard error, so that results stay clean."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from auto3d.runtime.measurement import Measurement, Status
from launch.store.trials import Trial
from launch.store.watcher import ERROR_LINES, FINAL, Ended, Watcher

COLOURS = {Status.OK: "green", Status.OOM: "yellow", Status.FAILED: "red", Status.TIMEOUT: "red"}


@contextmanager
def at_work(console: Console, what: str) -> Iterator[None]:
    """Says ``what`` takes a while, to a person who waits."""
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


@contextmanager
def search_progress(console: Console) -> Iterator[Callable[[int, float], None]]:
    """Says how far a search is, to a person who waits; yields what to tell it."""
    what = "capturing the model and searching"
    if not console.is_terminal:
        yield lambda looked_at, best_s: None
        return
    with console.status(what) as status:
        yield lambda looked_at, best_s: status.update(f"{what}: {looked_at} candidates, best {best_s:.4g} s")


@contextmanager
def doctor_progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Says what the doctor waits for; yields what to tell it, where there is no terminal once for each news."""
    if not console.is_terminal:
        yield cache(lambda line: console.print(line, markup=False, soft_wrap=True))
        return
    with console.status("looking at this machine") as status:
        yield lambda line: status.update(escape(line))


@contextmanager
def sweep_progress(console: Console) -> Iterator[Watcher]:
    """A bar over the trials, and a line for each that has ended."""
    with _bar(console) as progress:
        yield _SweepProgress(progress)


class _SweepProgress:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("capturing the model and looking for plans", total=None)

    def begin(self, total: int, kept: Sequence[tuple[Trial, Measurement]], left_out: int) -> None:
        self._progress.update(self._task, total=total)
        if left_out:
            self._print(
                f"{left_out} plans are left out, the slowest by prediction: there are more than search.max_trials"
            )
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

    def _print_end(self, what: str, measurement: Measurement) -> None:
        status = measurement.status
        figure = f" {measurement.median_s:.3f} s/iteration" if measurement.iteration_s else ""
        figure += " (emulated)" if measurement.emulated else ""
        self._print(f"{escape(what)} [{COLOURS.get(status, 'white')}]{status}[/]{figure}")
        for line in measurement.error.splitlines()[-ERROR_LINES:]:
            self._print(f"    {escape(line)}")

    def _print(self, text: str) -> None:
        self._progress.console.print(text, soft_wrap=True)


@contextmanager
def training_progress(console: Console, iterations: int) -> Iterator[Callable[[tuple[int, float | None, float]], None]]:
    """A bar over the iterations; yields what to call with (iteration, loss, seconds); no loss: emulated."""
    with _bar(console) as progress:
        task = progress.add_task("starting", total=iterations)

        def on_iteration(report: tuple[int, float | None, float]) -> None:
            iteration, loss, seconds = report
            what = "emulated" if loss is None else f"loss {loss:.4f}"
            progress.update(task, completed=iteration + 1, description=f"{what}, {seconds:.3f} s/iteration")
            if not console.is_terminal:
                console.print(f"iteration {iteration + 1}/{iterations}: {what}, {seconds:.3f} s")

        yield on_iteration


@contextmanager
def profile_progress(console: Console, parts: int | None) -> Iterator[Callable[[str], None]]:
    """A bar over what is measured, of so many parts if that is known; yields what to call with each that is done."""
    with _bar(console) as progress:
        task = progress.add_task("starting", total=parts)
        yield lambda part: progress.update(task, advance=1, description=part)


def _bar(console: Console) -> Progress:
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
