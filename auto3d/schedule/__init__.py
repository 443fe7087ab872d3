"""Plan -> operations. Each family is one file; ``SCHEDULES`` is the only place that knows them by name."""

from difflib import get_close_matches
from functools import lru_cache

from auto3d.errors import InputError
from auto3d.schedule import (
    chimera,
    early_recompute,
    gems,
    gpipe,
    interleaved,
    one_forward_one_backward,
    pipedream,
    shifted_critical_path,
    zb_v,
    zero_bubble,
)
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Schedule

SCHEDULES: dict[str, Family] = {
    family.name: family
    for family in (
        gpipe.FAMILY,
        one_forward_one_backward.FAMILY,
        interleaved.FAMILY,
        gems.FAMILY,
        *pipedream.FAMILIES,
        early_recompute.FAMILY,
        shifted_critical_path.FAMILY,
        chimera.FAMILY,
        *zero_bubble.FAMILIES,
        zb_v.FAMILY,
    )
}


@lru_cache(maxsize=16)  # it lists every micro-batch, and is asked for more than once by whoever makes or runs a plan
def build_schedule(name: str, *, devices: int, micro_batches: int, **options: int | str) -> Schedule:
    """The operations of schedule ``name``; raises InputError where the name, a size or an option is not possible."""
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"schedule: {name!r} is not known; there are {', '.join(SCHEDULES)}{hint}")
    if devices < 1 or micro_batches < 1:
        raise InputError(f"schedule {name}: {devices} devices, {micro_batches} micro-batches; both must be 1 or more")
    family = SCHEDULES[name]
    for option in options:
        if option not in family.options:
            takes = ", ".join(family.options) or "none"
            raise InputError(f"schedule {name}: option {option!r} is not one of its own; it takes {takes}")
    return family.build(devices=devices, micro_batches=micro_batches, **options)
