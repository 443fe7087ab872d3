"""What a training shows while it runs: a bar on a terminal, lines in a log."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from rich.console import Console

from auto3d.plan import Plan
from auto3d.runtime.watch.metrics import Metrics
from auto3d.runtime.watch.of_rank import TracedIteration
from auto3d.runtime.watch.slow_rank import SlowRank
from launch.console.progress import bar
from launch.console.traces import merge
from launch.recipe.load import LoadedRecipe
from launch.watch.outlets import outlets

LINE_S = 5.0  # least seconds between two lines in a log, unless training.log_every says otherwise
BAR_WIDTH = 42  # least columns of a terminal that the bar, the count of iterations and the times take


@contextmanager
def watching(
    console: Console, recipe: LoadedRecipe, plan: Plan, checkpoints: Path
) -> Iterator[Callable[[Metrics | TracedIteration], None]]:
    """Shows the progress of a training on ``console``, writes its metrics and merges its traces.

    Yields a function of what rank 0 reports. ``checkpoints`` is the training's folder for checkpoints.
    """
    training = recipe.values.training

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with (
        training_progress(console, training.iterations, training.log_every) as show,
        outlets(recipe, checkpoints, tell) as write,
    ):

        def on_report(report: Metrics | TracedIteration) -> None:
            if isinstance(report, TracedIteration):
                merge(recipe, plan, report, tell)
                return
            write(report)
            show(report)

        yield on_report


@contextmanager
def training_progress(
    console: Console, iterations: int, log_every: int | None = None
) -> Iterator[Callable[[Metrics], None]]:
    """Shows a bar over the iterations, or lines; yields a function of the Metrics of each iteration.

    Lines come every ``log_every`` iterations, or every LINE_S seconds; the first and the last always show.
    """
    printed_at = 0.0
    slow: tuple[SlowRank, ...] = ()
    waits_for_data = False
    with bar(console) as progress:
        task = progress.add_task("starting", total=iterations)

        def on_iteration(metrics: Metrics) -> None:
            nonlocal printed_at, slow, waits_for_data
            progress.update(
                task, completed=metrics.iteration, description=_fitting(figures(metrics), console.width - BAR_WIDTH)
            )
            lines = changes(slow, metrics.slow)
            if metrics.slow_data is not None and not waits_for_data:
                lines.append(f"warning: {metrics.slow_data}")
            for line in lines:
                progress.console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
            slow, waits_for_data = metrics.slow, metrics.slow_data is not None
            due = metrics.iteration % log_every == 0 if log_every else monotonic() - printed_at >= LINE_S
            if not console.is_terminal and (due or not printed_at or metrics.iteration == iterations):
                printed_at = monotonic()
                line = f"iteration {metrics.iteration}/{iterations}: {', '.join(figures(metrics))}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield on_iteration


def figures(metrics: Metrics) -> list[str]:
    """The known figures of an iteration, the most important first."""
    loss = "emulated" if metrics.loss is None else f"loss {metrics.loss:.4f}"
    shown = [loss, f"{metrics.iteration_s:.3f} s/iteration", f"{metrics.samples_per_s:.4g} samples/s"]
    if metrics.tokens_per_s is not None:
        shown.append(f"{metrics.tokens_per_s:.4g} tokens/s")
    if metrics.loss is None:
        return shown
    if metrics.model_flops_per_s_per_device is not None:
        shown.append(f"{metrics.model_flops_per_s_per_device / 1e12:.3g} TFLOP/s per device")
    if metrics.mfu is not None:
        shown.append(f"MFU {100 * metrics.mfu:.1f} %")
    shown.append(f"learning rate {metrics.learning_rate:.3g}")
    if metrics.grad_norm is not None:
        shown.append(f"gradient norm {metrics.grad_norm:.3g}")
    if metrics.peak_bytes is not None:
        shown.append(f"peak memory {metrics.peak_bytes / 2**20:.0f} MiB on rank {metrics.peak_rank}")
    return shown


def _fitting(shown: Sequence[str], width: int) -> str:
    """The first of ``shown`` that fit into ``width`` columns, at least the first."""
    description = shown[0]
    for figure in shown[1:]:
        if len(description) + len(figure) + 2 > width:
            break
        description += f", {figure}"
    return description


def changes(before: Sequence[SlowRank], now: Sequence[SlowRank]) -> list[str]:
    """A line for each rank that is slow now and was not before, in the same way, and for each that no longer is."""
    known = {(slow_rank.rank, slow_rank.stage, slow_rank.kind) for slow_rank in before}
    lines = [
        f"warning: {slow_rank}" for slow_rank in now if (slow_rank.rank, slow_rank.stage, slow_rank.kind) not in known
    ]
    still = {slow_rank.rank for slow_rank in now}
    return lines + [
        f"rank {slow_rank.rank} on {slow_rank.host} is no longer slow"
        for slow_rank in before
        if slow_rank.rank not in still
    ]
