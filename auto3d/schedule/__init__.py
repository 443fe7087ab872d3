"""Plan -> operations. Each family is one file; ``SCHEDULES`` is the only place that knows them by name."""

from collections.abc import Callable
from difflib import get_close_matches

from auto3d.errors import InputError
from auto3d.schedule.gpipe import gpipe
from auto3d.schedule.one_forward_one_backward import one_forward_one_backward
from auto3d.schedule.operation import Schedule

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}


def build_schedule(name: str, *, stages: int, micro_batches: int) -> Schedule:
    """The operations of schedule ``name``; raises InputError where the name or the sizes are not possible."""
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"schedule: {name!r} is not known; there are {', '.join(SCHEDULES)}{hint}")
    if stages < 1 or micro_batches < 1:
        raise InputError(f"schedule {name}: {stages} stages, {micro_batches} micro-batches; both must be 1 or more")
    return SCHEDULES[name](stages=stages, micro_batches=micro_batches)
