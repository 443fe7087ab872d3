"""PipeDream: 1F1B without a flush, on stashed weights (Narayanan et al., SOSP 2019)."""

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Schedule
from auto3d.schedule.options import check_least, recomputing
from auto3d.schedule.straight_pipeline import alternating_orders, straight_pipeline
from auto3d.schedule.sync import place_updates


def pipedream(
    *, devices: int, micro_batches: int, iterations: int = 4, recompute: str = "none", sync: str = "lazy"
) -> Schedule:
    """PipeDream, ``iterations`` iterations without a flush: bubbles are only in the first fill and the last drain.

    A micro-batch runs its backward with the weights of its forward, so stage s keeps up to D - s versions. Later stages
    run a micro-batch with weights that have had more updates. Vertical sync would prevent that; it is off here, as it
    is by default in the paper.
    """

    check_least("pipedream", "iterations", iterations, 1)
    numbers = micro_batches * iterations
    schedule = straight_pipeline(
        "pipedream",
        alternating_orders(devices, numbers),
        micro_batches=micro_batches,
        recompute=recomputing("pipedream", devices, recompute),
        iterations=iterations,
        weight_version={
            (stage, m): max(0, m - (devices - 1 - stage)) for stage in range(devices) for m in range(numbers)
        },
    )
    return place_updates(schedule, sync, every=1)


FAMILY = Family(
    name="pipedream",
    summary="asynchronous 1F1B, an update after every backward, stashed weights",
    source="Narayanan et al., SOSP 2019, section 3",
    ships_in=("PipeDream",),
    build=pipedream,
)
