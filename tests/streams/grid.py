"""The cases of the simulator of streams: every schedule with its options, in all circumstances."""

from collections.abc import Iterator
from itertools import product
from random import Random

from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.operation import Schedule
from tests.schedule.samples import SYNC, least_micro_batches, options_of
from tests.streams.simulation import SYNCHRONISE, Case

DEVICES = (2, 3, 4)
QUEUES = (1, 2, 8, 32)
MODELS = ("chain", "skips", "tied", "skips and tied")
RANKS = 8  # at most


def skips(stages: int) -> tuple[tuple[int, int], ...]:
    """Over one stage, over all, and two into one."""
    pairs = {(0, stages - 1), (0, 2), (1, 3), (1, stages - 1)}
    return tuple(sorted((a, b) for a, b in pairs if b - a > 1 and b < stages))


def cases(seed: int) -> Iterator[Case]:
    """All circumstances of all schedules; a draw for each of sizes, syncs, recomputation, clipping and delays."""
    draw = Random(seed)
    for name, devices in product(SCHEDULES, DEVICES):
        for options in options_of(name, devices):
            for model, dp, queues, synchronise in product(MODELS, (1, 2), QUEUES, SYNCHRONISE):
                schedule = _drawn(name, devices, options, draw)
                if devices * dp > RANKS or ("tied" in model and name == "pipedream"):  # whose versions would differ
                    continue
                yield Case(
                    schedule=schedule,
                    skips=skips(schedule.stages) if "skips" in model else (),
                    dp=dp,
                    tied="tied" in model and schedule.stages > 1,
                    queues=queues,
                    synchronise=synchronise,
                    seed=draw.randrange(2**32),
                    clip=not schedule.weight_version and draw.random() < 0.5,
                )


def _drawn(name: str, devices: int, options: dict[str, int | str], draw: Random) -> Schedule:
    micro_batches = draw.choice((devices, 2 * devices, devices + 1))
    others: dict[str, int | str] = {"sync": draw.choice(SYNC)}
    if "recompute" in SCHEDULES[name].options:
        others["recompute"] = draw.choice(("none", "full"))
    micro_batches = max(micro_batches, least_micro_batches(name, devices))
    return build_schedule(name, devices=devices, micro_batches=micro_batches, **options, **others)
