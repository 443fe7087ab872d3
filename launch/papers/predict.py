"""The predicted parts of several items, made in several processes at once."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from auto3d.runtime.measurement import Measurement
from launch.model.capture_process import CaptureProcess
from launch.papers.experiments import MADE
from launch.papers.item import Item, Part
from launch.papers.make import made_part
from launch.papers.rows import RowMaker
from launch.papers.write import MadePart
from launch.store.trials import Trial
from launch.store.watcher import Ended

PROCESSES = 4  # most processes: each holds torch and the models of an item, 1 to 2 GB

Ready = dict[int, MadePart]  # number of a part in its item -> the part, made


def predict_items(
    items: Mapping[Path, Item], overrides: Sequence[str], tell: Callable[[str], None]
) -> dict[Path, Ready]:
    """The predicted parts of ``items`` (by the file that declares each) under ``overrides``, on all cores.

    Parts that run something are left out: they are measured while nothing else runs. ``tell`` receives the name of each
    item whose parts are ready. Raises InputError where an item cannot be made.
    """
    waiting = iter(sorted(items, key=lambda file: _size(items[file]), reverse=True))  # the longest come first
    ready: dict[Path, Ready] = {}

    def work(process: CaptureProcess) -> None:
        for file in waiting:
            ready[file] = process.call(_predicted, file, items[file], tuple(overrides))
            tell(f"{file.stem}: predicted")

    with ExitStack() as stack:
        count = min(PROCESSES, len(items), len(os.sched_getaffinity(0)))
        pool = stack.enter_context(ThreadPoolExecutor(count))
        processes = [stack.enter_context(CaptureProcess()) for _ in range(count)]  # an interrupt ends them first
        for future in [pool.submit(work, process) for process in processes]:
            future.result()
    return ready


def _is_predicted(part: Part) -> bool:
    return part.how == "simulated" or (part.experiment is not None and MADE.get(part.experiment) == "simulated")


def _size(item: Item) -> int:
    """The number of rows that are predicted."""
    return sum(len(part.settings) * len(part.systems) for part in item.parts if part.how == "simulated")


class _Silent:
    """A Watcher that shows nothing: the driver reports when the parts of an item are ready."""

    def begin(self, total: int, kept: Sequence[tuple[Trial, Measurement]], left_out: int) -> None: ...

    def tell(self, line: str) -> None: ...

    def start(self, trial: Trial) -> None: ...

    def end(self, ended: Ended) -> None: ...


def _predicted(file: Path, item: Item, overrides: Sequence[str]) -> Ready:
    """The predicted parts of ``item``; runs in a CaptureProcess."""
    maker = RowMaker(file.stem, file, _Silent(), overrides)
    return {number: made_part(maker, part) for number, part in enumerate(item.parts) if _is_predicted(part)}
