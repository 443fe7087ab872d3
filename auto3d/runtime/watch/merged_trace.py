"""The traces of all ranks in one timeline, beside the simulated timeline, and both compared operation by operation."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from auto3d.runtime.watch.rank_trace import RankTrace
from auto3d.schedule.operation import Kind, parse
from auto3d.simulate.cells import exposed_collectives
from auto3d.simulate.simulate import Timeline
from auto3d.simulate.trace import trace
from auto3d.simulate.work import recomputed_inside

_SIMULATED = 1_000_000  # added to the process numbers of the simulated timeline
_PER_DEVICE = 10_000  # sort keys of one pipeline device: its ranks, then the same device simulated


@dataclass(frozen=True)
class ComparedOperations:
    """The operations of one kind of one stage. Times are medians in seconds, without waits for other ranks."""

    stage: int
    kind: Kind
    count: int  # measured operations, of all ranks
    predicted_s: float | None  # None if nothing is predicted
    measured_s: float

    @property
    def ratio(self) -> float | None:
        """Measured by predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s else None


def merged(ranks: Sequence[RankTrace], timeline: Timeline | None, *, tp: int) -> dict[str, Any]:
    """The trace of all ``ranks`` in the Trace Event Format, where the first operation begins at 0.

    One process per rank; its first track has the operations, the others what torch.profiler recorded. If there is a
    ``timeline`` in seconds, its devices are further processes, each below the ranks that it predicts.
    """
    begin_s = min(operation.begin_s for rank in ranks for operation in rank.operations)
    events: list[dict[str, Any]] = []
    for rank in ranks:
        name = f"rank {rank.rank}: device {rank.device} on {rank.host}, measured"
        events += _process(rank.rank, name, _PER_DEVICE * rank.device + rank.rank)
        events.append(_thread(rank.rank, 0, "operations"))
        for operation in rank.operations:
            shown = {"computed_ms": 1e3 * operation.computed_s, "waited_ms": 1e3 * operation.waited_s}
            position = {"ts": 1e6 * (operation.begin_s - begin_s), "dur": 1e6 * (operation.end_s - operation.begin_s)}
            events.append(
                {
                    "name": operation.name,
                    "cat": "operation",
                    "ph": "X",
                    "pid": rank.rank,
                    "tid": 0,
                    **position,
                    "args": shown,
                }
            )
        events += _profiled(rank, 1e6 * begin_s)
    for event in trace(timeline, tp=tp)["traceEvents"] if timeline is not None else ():
        number = event["pid"] + _SIMULATED
        if event["name"] == "process_name":
            device = event["pid"] // tp
            events += _process(number, f"{event['args']['name']}, simulated", _PER_DEVICE * (device + 1) - 1)
        else:
            events.append({**event, "pid": number})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def compared(ranks: Sequence[RankTrace], timeline: Timeline | None) -> list[ComparedOperations]:
    """The operations of all ``ranks`` by stage and kind, beside the operations of ``timeline``, in seconds."""
    measured: dict[tuple[int, Kind], list[float]] = {}
    predicted: dict[tuple[int, Kind], list[float]] = {}
    for traced in (traced for rank in ranks for traced in rank.operations):
        operation = parse(traced.name)
        measured.setdefault((operation.stage, operation.kind), []).append(traced.computed_s)
    if timeline is not None:
        inside = recomputed_inside(timeline.schedule)
        for number, operation in enumerate(timeline.operations):
            whole = timeline.end[number] - timeline.start[number]
            exposed = exposed_collectives(timeline, number, recomputes=number in inside)
            predicted.setdefault((operation.stage, operation.kind), []).append(whole - exposed)
    kinds = list(Kind)
    return [
        ComparedOperations(
            *key, len(measured[key]), median(predicted[key]) if key in predicted else None, median(measured[key])
        )
        for key in sorted(measured, key=lambda key: (key[0], kinds.index(key[1])))
        if key[1] is not Kind.SYNC  # it only starts a sum
    ]


def _profiled(rank: RankTrace, begin_us: float) -> list[dict[str, Any]]:
    """The profiler's events of ``rank`` on tracks of its process: threads of the host, streams of a GPU."""
    tracks: dict[tuple[Any, Any], int] = {}
    names: dict[tuple[Any, Any], str] = {}
    events = []
    for event in rank.events:
        track = event.get("pid"), event.get("tid")
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[track] = event["args"]["name"]
        elif event["ph"] in ("X", "s", "f") and "ts" in event:
            moved = {"pid": rank.rank, "tid": tracks.setdefault(track, len(tracks) + 1), "ts": event["ts"] - begin_us}
            if "id" in event:
                moved["id"] = f"{rank.rank}-{event['id']}"  # arrows between events of one rank
            events.append({**event, **moved})
    return [
        *(_thread(rank.rank, number, names.get(track, f"thread {track[1]}")) for track, number in tracks.items()),
        *events,
    ]


def _process(number: int, name: str, place: int) -> list[dict[str, Any]]:
    return [
        {"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}},
        {"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": place}},
    ]


def _thread(process: int, number: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": process, "tid": number, "args": {"name": name}}
