"""The cases of the stream simulator: every schedule with its options, in all circumstances."""

from collections.abc import Iterator
from itertools import product
from random import Random

from auto3d.schedule import SCHEDULES, build_schedule
from auto3d.schedule.operation import Schedule
from tests.schedule.samples import BY_RULE, SYNC, least_micro_batches, options_of
from tests.streams.simulation import SYNCHRONISE, Case

DEVICES = (2, 3, 4)
QUEUES = (1, 2, 8, 32)
MODELS = ("chain", "skips", "tied", "skips and tied")
REPLICAS = ("1", "2", "stages")  # 1 or 2 pipelines, or replicas of some stages


def skips(stages: int) -> tuple[tuple[int, int], ...]:
    """Transfers that skip one, two or more stages."""
    pairs = {(0, stages - 1), (0, 2), (1, 3), (1, stages - 1)}
    return tuple(sorted((a, b) for a, b in pairs if b - a > 1 and b < stages))


def cases(seed: int) -> Iterator[Case]:
    """Every schedule with every model, kind of replicas and number of queues; the rest is drawn at random."""
    draw = Random(seed)
    for name, devices in product(BY_RULE, DEVICES):
        for options in options_of(name, devices):
            for model, replicas, queues in product(MODELS, REPLICAS, QUEUES):
                schedule = _drawn(name, devices, options, draw)
                if "tied" in model and name == "pipedream":  # its two stages would see different versions
                    continue
                pipes = len(schedule.device_of) // schedule.stages
                if replicas == "stages" and pipes > 1:  # all devices hold copies of one stage
                    continue
                yield Case(
                    schedule=schedule,
                    skips=skips(schedule.stages) if "skips" in model else (),
                    dp=2 if replicas == "2" else 1,
                    replicas=tuple(draw.choice((1, 2, 3)) for _ in range(devices)) if replicas == "stages" else (),
                    tied="tied" in model and schedule.stages > 1,
                    queues=queues,
                    synchronise=draw.choice(SYNCHRONISE),
                    sharded=replicas != "1" and draw.random() < 0.3,
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
