"""PipeDream-2BW: 1F1B without a flush, on two versions of the weights (Narayanan et al., ICML 2021)."""

from auto3d.errors import InputError
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Schedule
from auto3d.schedule.options import check_least, recomputing
from auto3d.schedule.straight_pipeline import alternating_orders, straight_pipeline
from auto3d.schedule.sync import place_updates


def pipedream_2bw(
    *, devices: int, micro_batches: int, iterations: int = 4, recompute: str = "none", sync: str = "lazy"
) -> Schedule:
    """PipeDream-2BW: one update per iteration, delayed by one: W(t + 1) = W(t) - v * gradient at W(t - 1), on all
    stages.

    Two versions are enough if no stage begins an iteration before its update for the iteration before the previous
    iteration. The paper requires N >= D. N = D - 1 is enough, since the first stage is never more than D - 1 forwards
    ahead of its backwards.
    """
    if micro_batches < devices - 1:
        raise InputError(
            f"schedule pipedream-2bw: {micro_batches} micro-batches on {devices} devices would need more than two "
            f"weight versions; use {devices - 1} micro-batches or more"
        )

    check_least("pipedream-2bw", "iterations", iterations, 1)
    numbers = micro_batches * iterations
    schedule = straight_pipeline(
        "pipedream-2bw",
        alternating_orders(devices, numbers),
        micro_batches=micro_batches,
        recompute=recomputing("pipedream-2bw", devices, recompute),
        iterations=iterations,
        weight_version={(stage, m): max(0, m // micro_batches - 1) for stage in range(devices) for m in range(numbers)},
    )
    return place_updates(schedule, sync, every=micro_batches)


FAMILY = Family(
    name="pipedream-2bw",
    summary="asynchronous 1F1B, an update per iteration, two weight versions",
    source="Narayanan et al., ICML 2021, section 3.1",
    ships_in=("PipeDream",),
    build=pipedream_2bw,
)
