"""What a Plan recomputes: nothing, everything, or everything but Merak's fraction of each stage."""

from collections.abc import Mapping

from auto3d.plan import PlanError
from auto3d.schedule import SCHEDULES
from auto3d.schedule.options import SYNC
from auto3d.schedule.shape import shape

NONE, FULL, AUTO = "none", "full", "auto"


def schedule_options(
    schedule: str,
    given: Mapping[str, int | str],
    recompute: str | float,
    sync: str,
    *,
    devices: int,
    micro_batches: int,
) -> dict[str, int | str]:
    """The options of ``schedule``: ``given``, the option that makes it recompute if it has to, and ``sync``.

    A ``sync`` in ``given`` has priority. Raises PlanError if the schedule does not recompute although it has to.
    """
    if "recompute" in given:
        raise PlanError(f"schedule_options: recompute is {given['recompute']!r}; set the key recompute instead")
    given = ({} if sync == SYNC[0] else {"sync": sync}) | dict(given)
    if recompute == NONE:
        return given
    if schedule in SCHEDULES and "recompute" in SCHEDULES[schedule].options:
        return {**given, "recompute": "full"}
    if not shape(schedule, devices=devices, micro_batches=micro_batches, options=given).recompute:
        raise PlanError(f"recompute: {recompute}; schedule {schedule} does not recompute: it takes none")
    return given
