"""DualPipeV: DeepSeek's DualPipe cut in half, on two stages per device in a V.

DualPipe: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.2.1, table 2. The half: "DualPipe could be better
without the Dual" (Sea AI Lab, 2025), and deepseek-ai/DualPipe, dualpipev.py.
"""

from collections import deque

from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.sync import place_syncs
from auto3d.schedule.v_pipeline import Step, numbered_in_order, v_pipeline

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


def dualpipe_v(*, devices: int, micro_batches: int, sync: str = "lazy") -> Schedule:
    """DualPipeV: device s holds the stages s (down the V) and 2D - 1 - s (up), and pairs forwards with backwards.

    DualPipe overlaps the forward and the backward of a pair. Here they are two operations, one after the other. Only
    some backwards are split: as many as fill the waits at the start and at the end.

    The paper requires 2D micro-batches or more. With fewer, the order of 2D applies, without the surplus. On
    every device up to D + 1/2 micro-batches are in flight; DualPipe's table counts chunks, 2D + 1 on D devices. If
    F = I = W and N >= 2D, each device idles (D - 1)/2 forwards.
    """
    unfolded = max(micro_batches, 2 * devices)
    orders = [numbered_in_order(_steps(devices, unfolded, home), micro_batches) for home in range(devices)]
    return place_syncs(v_pipeline("dualpipe-v", orders, micro_batches), sync)


def _steps(devices: int, micro_batches: int, home: int) -> list[Step]:
    """The operations of device ``home``, in the eight phases of DualPipe."""
    down, up = home, 2 * devices - 1 - home
    to_last, from_first = devices - 1 - home, home + 1
    pending: deque[int] = deque()  # stages of input halves without their weight half
    steps: list[Step] = []

    def input_half(stage: int) -> None:
        steps.append((I, stage))
        pending.append(stage)

    def weight_half() -> None:
        if pending:
            steps.append((W, pending.popleft()))

    steps += [(F, down)] * (2 * to_last)
    steps += [(F, down), (F, up)] * from_first
    for _ in range(to_last):
        input_half(up)
        weight_half()
        steps.append((F, up))
    steps += [(F, down), (B, up), (F, up), (B, down)] * (micro_batches - 2 * devices + from_first)
    steps += [(B, up), (F, up), (B, down)] * to_last
    whole = from_first  # the last backwards, on both stages in turn, of which the first half run in one piece
    for number in range(2 * from_first):
        stage = down if number % 2 else up
        if number < whole:
            steps.append((B, stage))
        else:
            input_half(stage)
    for _ in range(to_last):
        weight_half()
        input_half(down)
    while pending:
        weight_half()
    return steps


FAMILY = Family(
    name="dualpipe-v",
    summary="two chunks per device in a V, each forward paired with a backward",
    source="DeepSeek and Sea AI Lab, 2025",
    ships_in=("DualPipe", "torch.distributed.pipelining"),
    build=dualpipe_v,
)
