"""A timeline as a trace in the Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from typing import Any

from auto3d.simulate.cells import exposed_collectives
from auto3d.simulate.simulate import Timeline
from auto3d.simulate.work import recomputed_inside


def trace(timeline: Timeline, *, seconds_per_unit: float = 1.0, tp: int = 1) -> dict[str, Any]:
    """The trace: one process per rank, with one track for its operations; each device is a group of ``tp`` ranks.

    If they take time, exposed tensor-parallel collectives, the messages to each other device and the gradient sync of
    each stage have tracks of their own.
    """
    microseconds = 1e6 * seconds_per_unit  # per unit of time; the format counts in microseconds
    events: list[dict[str, Any]] = []
    tracks: list[dict[str, int]] = [{} for _ in range(timeline.schedule.devices)]  # per device: track -> number

    def add(device: int, track: str, name: str, start: float, end: float) -> None:
        events.extend(
            {
                "name": name,
                "cat": track.split()[0],
                "ph": "X",
                "pid": device * tp + shard,
                "tid": tracks[device].setdefault(track, len(tracks[device])),
                "ts": start * microseconds,
                "dur": (end - start) * microseconds,
            }
            for shard in range(tp)
        )

    inside = recomputed_inside(timeline.schedule)
    receiver_of = {number: receiver for (_, receiver), number in timeline.work.links.items()}
    for number, operation in enumerate(timeline.operations):
        device, end = timeline.device_of(operation), timeline.end[number]
        add(device, "compute", str(operation), timeline.start[number], end)
        if exposed := exposed_collectives(timeline, number, recomputes=number in inside):
            add(device, "collectives of the tensor-parallel group", f"collectives of {operation}", end - exposed, end)
        _, after, link, _ = timeline.work.steps[number]
        if after and link >= 0:
            sent = timeline.arrival[number] if timeline.costs.overlap else end + after
            add(device, f"send to device {receiver_of[link]}", f"send {operation}", sent - after, sent)
        for message in timeline.work.inputs.get(number, ()):
            sent = timeline.arrival[message.number] + (0.0 if timeline.costs.overlap else message.time)
            name = f"send inputs of stage {message.target} for {operation}"
            add(device, f"send to device {receiver_of[message.link]}", name, sent - message.time, sent)
    for sync in timeline.syncs:
        for device in sync.started if sync.end > sync.begin else ():
            add(device, f"sync of stage {sync.stage}", f"sync of stage {sync.stage}", sync.begin, sync.end)
    for rank in range(tp * len(tracks)):
        device, shard = divmod(rank, tp)
        name = f"device {device}, shard {shard} of {tp}" if tp > 1 else f"device {device}"
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": name}})
        for track, number in tracks[device].items():
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": track}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": timeline.schedule.name}}
