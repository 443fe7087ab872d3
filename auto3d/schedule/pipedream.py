"""PipeDream and PipeDream-2BW: 1F1B without a flush, on stashed weights (Narayanan et al., SOSP 2019 and ICML 2021)."""

from collections.abc import Callable

from auto3d.errors import InputError
from auto3d.schedule.alternation import alternate, of_stage
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.options import check_least, recomputing
from auto3d.schedule.sync import place_updates


def pipedream(
    *, devices: int, micro_batches: int, iterations: int = 4, recompute: str = "none", sync: str = "lazy"
) -> Schedule:
    """``iterations`` iterations of ``micro_batches`` without a flush; no bubbles but in the first fill and last drain.

    A micro-batch runs its backward with the weights of its forward, so stage s keeps up to D - s versions. Later stages
    see a micro-batch with more updates: vertical sync, which would prevent that, is off in the paper's default too.
    """

    def version(stage: int, micro_batch: int) -> int:
        return max(0, micro_batch - (devices - 1 - stage))

    schedule = _without_flush("pipedream", devices, micro_batches, iterations, recompute, version)
    return place_updates(schedule, sync, every=1)


def pipedream_2bw(
    *, devices: int, micro_batches: int, iterations: int = 4, recompute: str = "none", sync: str = "lazy"
) -> Schedule:
    """An update per iteration, delayed by one: W(t + 1) = W(t) - v * gradient at W(t - 1), the same at all stages.

    Two versions are enough where no stage begins an iteration before it has updated for the last but one. The paper
    asks for N >= D; D - 1 are enough, since the first stage is never more than D - 1 forwards ahead of its backwards.
    """
    if micro_batches < devices - 1:
        raise InputError(
            f"schedule pipedream-2bw: {micro_batches} micro-batches on {devices} devices would need more than two "
            f"weight versions; {devices - 1} micro-batches or more would do"
        )

    def version(stage: int, micro_batch: int) -> int:
        return max(0, micro_batch // micro_batches - 1)

    schedule = _without_flush("pipedream-2bw", devices, micro_batches, iterations, recompute, version)
    return place_updates(schedule, sync, every=micro_batches)


def _without_flush(
    name: str,
    devices: int,
    micro_batches: int,
    iterations: int,
    recompute: str,
    version: Callable[[int, int], int],  # of (stage, micro-batch)
) -> Schedule:
    check_least(name, "iterations", iterations, 1)
    numbers = micro_batches * iterations

    def device(stage: int) -> tuple[Operation, ...]:
        forwards = of_stage(Kind.FORWARD, stage, numbers)
        backwards = [(backward,) for backward in of_stage(Kind.BACKWARD, stage, numbers)]
        return alternate(forwards, backwards, ahead=devices - 1 - stage)

    return Schedule(
        name=name,
        stages=devices,
        micro_batches=micro_batches,
        device_of={(stage, 0): stage for stage in range(devices)},
        operations=tuple(device(stage) for stage in range(devices)),
        recompute=recomputing(name, devices, recompute),
        iterations=iterations,
        weight_version={(stage, m): version(stage, m) for stage in range(devices) for m in range(numbers)},
    )


FAMILIES = (
    Family(
        name="pipedream",
        summary="asynchronous 1F1B, an update after every backward, stashed weights (Narayanan et al. 2019)",
        build=pipedream,
    ),
    Family(
        name="pipedream-2bw",
        summary="asynchronous 1F1B, an update per iteration, two weight versions (Narayanan et al. 2021)",
        build=pipedream_2bw,
    ),
)
