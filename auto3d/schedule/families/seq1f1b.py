"""Seq1F1B: 1F1B whose unit is a slice of a micro-batch's sequence (Sun et al., NAACL 2025, section 3)."""

from auto3d.schedule.alternation import alternate, of_stage
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.options import check_least, recomputing
from auto3d.schedule.straight_pipeline import Order, straight_pipeline
from auto3d.schedule.sync import place_syncs


def seq1f1b(
    *, devices: int, micro_batches: int, slices: int = 2, recompute: str = "none", sync: str = "lazy"
) -> Schedule:
    """Seq1F1B with k = ``slices`` slices per micro-batch; one slice is 1F1B.

    Under causal attention a slice needs the keys and values of the slices before it, and their gradients come from the
    slices after it. So forwards run from the first slice of a micro-batch to the last, and backwards from the last to
    the first. The first backward of the last stage therefore needs k forwards, and every stage warms up with k - 1
    forwards more than in 1F1B.

    With equal slices, each device idles (D - 1)(F + B)/k, and stage s holds the activations of at most D - s + k - 1
    slices, (D - s + k - 1)/k micro-batches. Slices of equal length are not equal in time, since a later slice attends
    to more keys; devices then idle longer. A stage that recomputes holds, besides its inputs, the keys and values of
    the slices in flight.
    """
    check_least("seq1f1b", "slices", slices, 1)
    orders = [_order(stage, devices, micro_batches, slices) for stage in range(devices)]
    recomputed = recomputing("seq1f1b", devices, recompute)
    schedule = straight_pipeline("seq1f1b", orders, micro_batches=micro_batches, recompute=recomputed, slices=slices)
    return place_syncs(schedule, sync)


def _order(stage: int, devices: int, micro_batches: int, slices: int) -> Order:
    """The operations of ``stage``; slice i of micro-batch m has the number m ``slices`` + i.

    Counted from 0, backward j belongs to slice k - 1 - j mod k of its micro-batch, so its forward is among the first
    j + k. At least k - 1 forwards of the warm-up and j + 1 of the alternation precede it: these, or all there are.
    """
    forwards = of_stage(Kind.FORWARD, stage, micro_batches * slices)
    backwards = [
        (Operation(Kind.BACKWARD, stage, (m * slices + i,)),)
        for m in range(micro_batches)
        for i in reversed(range(slices))
    ]
    return alternate(forwards, backwards, ahead=devices - 1 - stage + slices - 1)


FAMILY = Family(
    name="seq1f1b",
    summary="1F1B over slices of the sequence, for models whose tokens see only earlier ones",
    source="Sun et al., NAACL 2025, section 3; slices: TeraPipe, Li et al., ICML 2021, section 3",
    build=seq1f1b,
)
