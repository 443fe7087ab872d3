"""A timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show: the Trace Event Format."""

from typing import Any

from auto3d.simulate.simulate import Timeline

_COMPUTE, _SEND, _SYNC = range(3)
_TRACKS = {_COMPUTE: "compute", _SEND: "send", _SYNC: "gradient sync"}


def trace(timeline: Timeline, *, seconds_per_unit: float = 1.0) -> dict[str, Any]:
    """One process per device with a track for its operations and, where they take time, its messages and its syncs."""
    microseconds = 1e6 * seconds_per_unit  # the format's unit
    events: list[dict[str, Any]] = []
    tracks: set[tuple[int, int]] = set()

    def add(device: int, track: int, name: str, category: str, start: float, end: float) -> None:
        tracks.add((device, track))
        events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "pid": device,
                "tid": track,
                "ts": start * microseconds,
                "dur": (end - start) * microseconds,
            }
        )

    for number, operation in enumerate(timeline.operations):
        device, end = timeline.device_of(operation), timeline.end[number]
        add(device, _COMPUTE, str(operation), operation.kind.name.lower(), timeline.start[number], end)
        _, after, link = timeline.work.steps[number]
        if after and link >= 0:
            sent = timeline.arrival[number] if timeline.costs.overlap else end + after
            add(device, _SEND, f"send {operation}", "send", sent - after, sent)
    for sync in timeline.syncs:
        for device in sync.started if sync.end > sync.begin else ():
            add(device, _SYNC, f"sync of stage {sync.stage}", "sync", sync.begin, sync.end)
    for device, track in sorted(tracks):
        names = {"process_name": f"device {device}", "thread_name": _TRACKS[track]}
        events += [
            {"name": key, "ph": "M", "pid": device, "tid": track, "args": {"name": name}} for key, name in names.items()
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": timeline.schedule.name}}
