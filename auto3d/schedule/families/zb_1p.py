"""ZB-1p: the zero-bubble schedule for given times, at 1F1B's activations (Qi et al., ICLR 2024, section 3.1)."""

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.operation_times import EQUAL, parse_times
from auto3d.schedule.options import check_percentage
from auto3d.schedule.straight_pipeline import alternating_orders, straight_pipeline
from auto3d.schedule.sync import place_syncs
from auto3d.schedule.weight_filling import fill_with_weights
from auto3d.schedule.zero_bubble import fit_to_times


def zb_1p(*, devices: int, micro_batches: int, times: str = EQUAL, deferred: int = 100, sync: str = "lazy") -> Schedule:
    """ZB-1p: the paper's heuristic for ``times``, within the activations of D micro-batches on every device.

    ``times`` has the times of F, I, W and a message, as in ``10-11-9-1``. ``deferred`` is the percentage of a
    micro-batch's activations that its input half leaves to the weight half; with less than 100, more than D
    micro-batches may wait for their weight halves. At these times, it is never longer than
    ZB-H1, neither by its makespan nor by its longest device.
    """
    check_percentage("zb-1p", "deferred", deferred)
    orders = alternating_orders(devices, micro_batches, backward=(Kind.BACKWARD_INPUT,))
    orders = fill_with_weights(orders, devices, limit=devices)
    handmade = straight_pipeline("zb-1p", orders, micro_batches=micro_batches)
    schedule = fit_to_times(handmade, times=parse_times("zb-1p", times), limit=devices, deferred=deferred)
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="zb-1p",
    summary="a zero-bubble order searched for given times, at 1F1B's activations",
    source="Qi et al., ICLR 2024, section 3",
    ships_in=("zero-bubble-pipeline-parallelism",),
    build=zb_1p,
    periodic=False,
)
