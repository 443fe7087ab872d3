"""What a person sees while a sweep or a training runs; on standard error, so that results stay clean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from auto3d.runtime.measurement import Status
from launch.store import Trial
from launch.sweep import ERROR_LINES, Ended

COLOURS = {Status.OK: "green", Status.OOM: "yellow", Status.FAILED: "red", Status.TIMEOUT: "red"}


@contextmanager
def sweep_progress(console: Console) -> Iterator[tuple[Callable[[Trial], None], Callable[[Ended], None]]]:
    """A bar over the trials; yields what to call when a trial starts and when it has ended."""
    with _bar(console) as progress:
        task = progress.add_task("looking for plans", total=None)

        def on_start(trial: Trial) -> None:
            progress.update(task, description=trial.name)

        def on_end(ended: Ended) -> None:
            status = ended.measurement.status
            figure = f" {ended.measurement.median_s:.3f} s/iteration" if status is Status.OK else ""
            colour = COLOURS.get(status, "white")
            line = f"{ended.number}/{ended.total} {escape(ended.trial.name)} [{colour}]{status}[/]{figure}"
            progress.console.print(line, soft_wrap=True)
            for error_line in ended.measurement.error.splitlines()[-ERROR_LINES:]:
                progress.console.print(f"    {escape(error_line)}", soft_wrap=True)
            progress.update(task, completed=ended.number, total=ended.total)

        yield on_start, on_end


@contextmanager
def training_progress(console: Console, iterations: int) -> Iterator[Callable[[tuple[int, float, float]], None]]:
    """A bar over the iterations; yields what to call with (iteration, loss, seconds)."""
    with _bar(console) as progress:
        task = progress.add_task("starting", total=iterations)

        def on_iteration(report: tuple[int, float, float]) -> None:
            iteration, loss, seconds = report
            progress.update(task, completed=iteration + 1, description=f"loss {loss:.3f}, {seconds:.3f} s/iteration")
            if not console.is_terminal:
                console.print(f"iteration {iteration + 1}/{iterations}: loss {loss:.4f}, {seconds:.3f} s")

        yield on_iteration


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
