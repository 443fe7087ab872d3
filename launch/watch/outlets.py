"""Every outlet of a training's metrics: a file of JSON lines, and those that ``training.report_to`` names."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

from auto3d.runtime.watch.metrics import Metrics
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import TENSORBOARD, WANDB
from launch.store.files import private_folder
from launch.watch.metrics_file import MetricsFile


class Outlet(Protocol):
    """Takes the metrics of each iteration, in order. It is opened when the first of them are there."""

    def write(self, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


def check_outlets(recipe: LoadedRecipe) -> None:
    """Raise RecipeError if an outlet of ``training.report_to`` cannot be used here, before anything runs."""
    if WANDB not in recipe.values.training.report_to:
        return
    try:
        version(WANDB)
    except PackageNotFoundError:
        problem = "found 'wandb', which is not installed; install it (pip install wandb), or leave it out"
        raise recipe.error("training.report_to", problem) from None
    if os.environ.get("WANDB_MODE", "online") != "online":
        return
    # W&B's own command decides whether there is an account, and may ask for it on a terminal.
    login = subprocess.run([sys.executable, "-m", WANDB, "login"], stdout=subprocess.DEVNULL, check=False)
    if login.returncode:
        problem = "found 'wandb', which has no account here; log in (wandb login), or set WANDB_MODE=offline"
        raise recipe.error("training.report_to", problem)


def metrics_folder(checkpoints: Path) -> Path:
    """The private folder for the metrics of the training that has its ``checkpoints`` in that folder."""
    return checkpoints.parent.parent / "metrics" / checkpoints.name


def trace_folder(checkpoints: Path) -> Path:
    """The folder in ``metrics_folder`` for the traces of a training."""
    return metrics_folder(checkpoints) / "trace"


@contextmanager
def outlets(
    recipe: LoadedRecipe, checkpoints: Path, tell: Callable[[str], None]
) -> Iterator[Callable[[Metrics], None]]:
    """Yields a function that writes metrics to every outlet, which are closed at the end.

    Outlets are opened at the first metrics: by then the ranks are forked, and W&B's threads are not forked with them.
    An outlet that fails is left out from then on, and ``tell`` gets one line; the training goes on.
    """
    opened: dict[str, Outlet] | None = None

    def attempt(name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if opened is not None:
                opened.pop(name, None)
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            tell(f"auto3d: {name} gets no more metrics of this training: {first}")

    def write(metrics: Metrics) -> None:
        nonlocal opened
        if opened is None:
            opened = {}
            for name in ("metrics.jsonl", *recipe.values.training.report_to):
                attempt(name, lambda name=name: opened.update({name: _open(name, recipe, checkpoints, metrics)}))  # type: ignore[misc]
        for name, outlet in list(opened.items()):
            attempt(name, lambda outlet=outlet: outlet.write(metrics))  # type: ignore[misc]

    try:
        yield write
    finally:
        for name, outlet in list((opened or {}).items()):
            attempt(name, outlet.close)


def _open(name: str, recipe: LoadedRecipe, checkpoints: Path, first: Metrics) -> Outlet:
    """The outlet ``name`` of a run whose ``first`` metrics these are."""
    folder = private_folder(metrics_folder(checkpoints))
    if name == TENSORBOARD:
        from launch.watch.tensorboard import TensorBoard  # its import takes a second

        return TensorBoard(folder / TENSORBOARD, first.iteration)
    if name == WANDB:
        from launch.watch.wandb import WeightsAndBiases

        return WeightsAndBiases(folder, recipe.name, checkpoints.name, first.iteration)
    return MetricsFile(folder / name, first.iteration)
