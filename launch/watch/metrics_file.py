"""The metrics of a training as JSON lines: one line per iteration, through all of its runs."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from auto3d.runtime.watch.metrics import Metrics
from launch.store.files import write_whole


class MetricsFile:
    """Appends to ``file`` from iteration ``first`` on; lines from that iteration on are removed before."""

    def __init__(self, file: Path, first: int) -> None:
        kept = [line for line, content in _lines(file) if content["iteration"] < first]
        write_whole(file, "".join(f"{line}\n" for line in kept))
        self._stream = file.open("a", buffering=1)  # one write per line

    def write(self, metrics: Metrics) -> None:
        self._stream.write(json.dumps(json_of(metrics), allow_nan=False) + "\n")

    def close(self) -> None:
        self._stream.close()


def json_of(metrics: Metrics) -> dict[str, Any]:
    """The fields of ``metrics``; numbers that JSON cannot express (nan, inf) become null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(metrics).items()
    }


def numbers_of(metrics: Metrics) -> dict[str, float]:
    """The numbers of ``metrics`` that are known, except for the iteration."""
    return {
        name: value
        for name, value in asdict(metrics).items()
        if name != "iteration" and isinstance(value, (int, float)) and value is not None
    }


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of ``file`` with their contents, up to a line that a killed process has not written to its end."""
    if not file.exists():
        return
    for line in file.read_text().splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            return
        yield line, content
