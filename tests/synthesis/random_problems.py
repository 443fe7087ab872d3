"""Random small problems: unequal whole times, straight and V placement, one or two pipes, caps that bind."""

import random
from math import inf

from auto3d.simulate.costs import Costs, MessageCost
from auto3d.synthesis.problem import Problem


def random_problem(seed: int, *, stages: int = 4, micro_batches: int = 6) -> Problem:
    """A problem with at most this many stages and micro-batches, the same for the same arguments.

    One micro-batch at a time always fits, if the stages recompute that may.
    """
    chance = random.Random(seed)
    stages = chance.randint(2, stages)
    micro_batches = max(chance.randint(1, micro_batches), chance.randint(1, micro_batches))
    device_of = _placement(chance, stages)
    devices = 1 + max(device_of.values())
    micro_batches = max(micro_batches, 1 + max(pipe for _, pipe in device_of))  # an order has some on each pipe
    forward = _times(chance, stages, 1, 4)
    backward_input, backward_weight = _times(chance, stages, 1, 4), _times(chance, stages, 1, 3)
    joined = chance.choice([0, 0, 1])  # the time that a whole backward saves
    message = chance.choice([0, 0, 1, 2])
    costs = Costs(
        forward=forward,
        backward=tuple(max(1, i + w - joined) for i, w in zip(backward_input, backward_weight, strict=True)),
        backward_input=backward_input,
        backward_weight=backward_weight,
        recompute=tuple(chance.randint(1, int(time)) for time in forward),
        sync=_times(chance, stages, 0, 3) if chance.random() < 0.4 else (0,) * stages,
        update=_times(chance, stages, 0, 2) if chance.random() < 0.4 else (0,) * stages,
        messages=tuple(
            MessageCost(
                latency=chance.randint(0, message),
                forward=chance.randint(0, message),
                backward=chance.randint(0, message),
            )
            for _ in range(stages - 1)
        ),
        speed=tuple(chance.choice([1, 1, 1, 0.5]) for _ in range(devices)),
        overlap=chance.random() < 0.8,
    )
    activation = _times(chance, stages, 2, 5)
    kept = tuple(chance.randint(0, int(size) - 1) for size in activation)
    may_recompute = _some(chance, stages)
    held = [kept[stage] if stage in may_recompute else activation[stage] for stage in range(stages)]
    return Problem(
        micro_batches=micro_batches,
        costs=costs,
        device_of=device_of,
        activation=activation,
        kept=kept,
        deferred=tuple(chance.randint(0, int(size)) for size in activation),
        free=tuple(_cap(chance, device_of, device, activation, held, micro_batches) for device in range(devices)),
        may_split=_some(chance, stages),
        may_recompute=may_recompute,
    )


def _placement(chance: random.Random, stages: int) -> dict[tuple[int, int], int]:
    """One or two chunks on each device, straight or as a V; a second pipe runs the other way."""
    devices = stages // 2 if stages % 2 == 0 and chance.random() < 0.5 else stages
    shape = chance.choice(["straight", "V"])
    path = [
        2 * devices - 1 - stage if shape == "V" and stage >= devices else stage % devices for stage in range(stages)
    ]
    device_of = {(stage, 0): path[stage] for stage in range(stages)}
    if devices > 1 and chance.random() < 0.25:
        device_of |= {(stage, 1): devices - 1 - path[stage] for stage in range(stages)}
    return device_of


def _cap(
    chance: random.Random,
    device_of: dict[tuple[int, int], int],
    device: int,
    activation: tuple[float, ...],
    held: list[float],
    micro_batches: int,
) -> float:
    """Between what one micro-batch at a time needs and what all need at once, or no cap."""
    least = most = 0.0
    for pipe in {pipe for _, pipe in device_of}:
        below = 0.0
        for stage in range(len(activation)):
            if device_of[stage, pipe] == device:
                least = max(least, below + activation[stage])
                below += held[stage]
                most += activation[stage] * micro_batches
    kind = chance.random()
    if kind < 0.25:
        return inf
    return least + int((most - least) * chance.choice([0.1, 0.2, 0.4])) if kind < 0.9 else least


def _times(chance: random.Random, stages: int, least: int, most: int) -> tuple[float, ...]:
    return tuple(chance.randint(least, most) for _ in range(stages))


def _some(chance: random.Random, stages: int) -> frozenset[int]:
    """No stage, every stage or any set of stages."""
    kind = chance.random()
    if kind < 0.4:
        return frozenset()
    return frozenset(stage for stage in range(stages) if kind > 0.7 or chance.random() < 0.5)
