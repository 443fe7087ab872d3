"""A timeline as a trace in the Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from typing import Any

from auto3d.simulate.simulate import Timeline


def trace(timeline: Timeline, *, seconds_per_unit: float = 1.0) -> dict[str, Any]:
    """The trace: one process per device, with one track for its operations.

    If they take time, the messages to each other device and the gradient sync of each stage have tracks of their own.
    """
    microseconds = 1e6 * seconds_per_unit  # per unit of time; the format counts in microseconds
    events: list[dict[str, Any]] = []
    tracks: list[dict[str, int]] = [{} for _ in range(timeline.schedule.devices)]  # per device: track -> number

    def add(device: int, track: str, name: str, start: float, end: float, exposed: float = 0.0) -> None:
        events.append(
            {
                "name": name,
                "cat": track.split()[0],
                "ph": "X",
                "pid": device,
                "tid": tracks[device].setdefault(track, len(tracks[device])),
                "ts": start * microseconds,
                "dur": (end - start) * microseconds,
            }
        )
        if exposed:
            events[-1]["args"] = {"waits for tensor-parallel collectives": f"{exposed:.1%}"}

    receiver_of = {number: receiver for (_, receiver), number in timeline.work.links.items()}
    for number, operation in enumerate(timeline.operations):
        device, end = timeline.device_of(operation), timeline.end[number]
        exposed = timeline.costs.exposed_of(operation.kind, operation.stage)
        add(device, "compute", str(operation), timeline.start[number], end, exposed)
        _, after, link = timeline.work.steps[number]
        if after and link >= 0:
            sent = timeline.arrival[number] if timeline.costs.overlap else end + after
            add(device, f"send to device {receiver_of[link]}", f"send {operation}", sent - after, sent)
    for sync in timeline.syncs:
        for device in sync.started if sync.end > sync.begin else ():
            add(device, f"sync of stage {sync.stage}", f"sync of stage {sync.stage}", sync.begin, sync.end)
    ranks = f" ({timeline.costs.tp} tensor-parallel ranks)" if timeline.costs.tp > 1 else ""
    for device, numbers in enumerate(tracks):
        events.append({"name": "process_name", "ph": "M", "pid": device, "args": {"name": f"device {device}{ranks}"}})
        for track, number in numbers.items():
            events.append({"name": "thread_name", "ph": "M", "pid": device, "tid": number, "args": {"name": track}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": timeline.schedule.name}}
