"""The trace of one rank through one iteration: its operations, and what torch.profiler records inside of them."""

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from auto3d.runtime.watch.observer import ObservedOperation

_ANNOTATION = "user_annotation"  # category of record_function's events


@dataclass(frozen=True)
class TracedOperation:
    """An operation in seconds on rank 0's clock; ``waited_s`` of it passed in waits for other ranks."""

    name: str
    begin_s: float
    end_s: float
    waited_s: float

    @property
    def computed_s(self) -> float:
        return max(0.0, self.end_s - self.begin_s - self.waited_s)


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One rank's trace. ``events`` are torch.profiler's, in the Trace Event Format and in µs on rank 0's clock."""

    rank: int
    device: int  # pipeline device
    host: str
    operations: tuple[TracedOperation, ...]
    events: list[dict[str, Any]]

    def write(self, file: Path) -> None:
        with gzip.open(file, "wt", compresslevel=4) as stream:
            json.dump(asdict(self), stream)

    @staticmethod
    def read(file: Path) -> "RankTrace":
        with gzip.open(file, "rt") as stream:
            content = json.load(stream)
        operations = tuple(TracedOperation(**operation) for operation in content.pop("operations"))
        return RankTrace(operations=operations, **content)


class IterationTracer:
    """Records an iteration from now on."""

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile = profile(activities=activities)
        self._begun: list[tuple[str, float]] = []  # each operation with the host's time
        self._profile.start()

    @contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        """Record what runs inside as the operation ``name``."""
        self._begun.append((name, perf_counter()))
        with record_function(name):
            yield

    def end(
        self,
        observed: Sequence[ObservedOperation],
        *,
        origin_s: float,
        ahead_s: float,
        rank: int,
        device: int,
        host: str,
    ) -> RankTrace:
        """The trace. ``origin_s`` is this host's time from which ``observed`` counts; its clock is ``ahead_s``."""
        self._profile.stop()
        with TemporaryDirectory(prefix="auto3d-trace-") as folder:
            file = f"{folder}/trace.json"
            self._profile.export_chrome_trace(file)
            events = json.loads(Path(file).read_text())["traceEvents"]
        shift = origin_s - ahead_s
        operations = tuple(
            TracedOperation(
                str(operation.operation), operation.begin_s + shift, operation.end_s + shift, operation.waited_s
            )
            for operation in observed
        )
        behind_us = self._profiler_ahead_us(events) + 1e6 * ahead_s
        for event in events:
            if "ts" in event:
                event["ts"] -= behind_us
        return RankTrace(rank=rank, device=device, host=host, operations=operations, events=events)

    def _profiler_ahead_us(self, events: Sequence[dict[str, Any]]) -> float:
        """Microseconds by which the profiler's clock is ahead of perf_counter, from the operations that both have."""
        annotated: dict[str, list[float]] = {}
        for event in events:
            if event.get("cat") == _ANNOTATION and event["ph"] == "X":
                annotated.setdefault(event["name"], []).append(event["ts"])
        differences, seen = [], dict.fromkeys(annotated, 0)
        for name, begun_s in self._begun:
            if name in annotated and seen[name] < len(annotated[name]):
                differences.append(sorted(annotated[name])[seen[name]] - 1e6 * begun_s)
                seen[name] += 1
        return median(differences) if differences else 0.0
