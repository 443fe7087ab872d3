"""Looped breadth-first: every micro-batch on one chunk, then on the next (Lamy-Poirier, MLSys 2023)."""

from auto3d.schedule.alternation import of_stage
from auto3d.schedule.family import Family
from auto3d.schedule.interleaving import looped
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.options import check_least, recomputing
from auto3d.schedule.sync import place_syncs


def looped_bfs(
    *, devices: int, micro_batches: int, chunks: int = 2, recompute: str = "none", sync: str = "lazy"
) -> Schedule:
    """Breadth-first: stage s is on device s mod D, with v = ``chunks`` stages per device.

    A device runs all forwards of its first stage, then all of its second, and so on; then the backwards in the opposite
    order, as in torch. It idles (D - 1)(F + B)/v if N >= D, at the activations of GPipe, and the first device holds the
    messages of all micro-batches for its next stage. The gradients of a stage are complete early, so that
    ``sync="eager"`` hides all sums but the sums of the first stages.
    """
    check_least("looped-bfs", "chunks", chunks, 2)

    def device(home: int) -> tuple[Operation, ...]:
        stages = range(home, devices * chunks, devices)
        forwards = [operation for stage in stages for operation in of_stage(Kind.FORWARD, stage, micro_batches)]
        backwards = [operation for stage in stages for operation in of_stage(Kind.BACKWARD, stage, micro_batches)]
        return (*forwards, *reversed(backwards))

    schedule = looped(
        "looped-bfs",
        [device(home) for home in range(devices)],
        stages=devices * chunks,
        micro_batches=micro_batches,
        recompute=recomputing("looped-bfs", devices * chunks, recompute),
        held_ahead=micro_batches,
    )
    return place_syncs(schedule, sync)


FAMILY = Family(
    name="looped-bfs",
    summary="all forwards of one chunk after the other, then all backwards in the opposite order",
    source="Lamy-Poirier, MLSys 2023",
    ships_in=("torch.distributed.pipelining",),
    build=looped_bfs,
)
