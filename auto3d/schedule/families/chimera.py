"""Chimera: pipes in both directions through the same devices (Li and Hoefler, SC 2021, sections 3.1, 3.5, 3.6).

Every operation has a slot: a unit of time in an ideal pipeline in which forwards and backwards take equally long. In a
scheduling unit that starts at slot 0, the m-th forward of a pipe on stage s has slot s + 2m, and its backward has slot
2D - 1 - s + 2m. Two pipes never use the same slot of a device, since D is even. A device runs its operations in the
order of their slots.
"""

from operator import itemgetter

from auto3d.errors import InputError
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule, singles
from auto3d.schedule.options import check_choice, recomputing
from auto3d.schedule.sync import place_syncs

SCALES = ("direct", "doubling", "halving")


def chimera(
    *,
    devices: int,
    micro_batches: int,
    pipes: int = 2,
    scale: str = "direct",
    recompute: str = "none",
    sync: str = "lazy",
) -> Schedule:
    """Chimera with ``pipes`` = 2f pipes: f go down and f go up, and each device has one stage of each pipe.

    Pipe 2i starts at device i D/f and goes down; pipe 2i + 1 is its mirror image. ``scale`` selects how scheduling
    units are joined if N is more than D:

    - ``direct``: units of D micro-batches, each of which begins in the drain of the previous unit. With two pipes and
      N = KD, each device idles (D - 2)(F + K(B - F)).
    - ``doubling``: units of 2D micro-batches. A forward takes two micro-batches and a backward takes one: first the
      backwards of the first micro-batch of every pair, then the backwards of the second, as in figure 7(c). If D or
      fewer micro-batches remain at the end, they form a direct unit. With two pipes, N = 2kD and 2F <= B <= 3F, each
      device idles (D - 2)(F + B)/2 + (k - 1)(D - 2)(B - 2F).
    - ``halving``: the order of doubling, with each micro-batch in two parts: a forward takes both parts, a backward
      takes one part.

    Figure 7(d) removes half of the bubbles at the start, but the paper does not say how to do so for any D. Here the
    first pairs of each pipe run as single forwards, so that the first micro-batch arrives early; see ``_single_pairs``.
    """
    _check_sizes(devices, pipes)
    check_choice("chimera", "scale", scale, SCALES)
    parts = 2 if scale == "halving" else 1
    numbers = micro_batches * parts

    slots: list[list[tuple[int, Operation]]] = [[] for _ in range(devices)]
    device_of = _placement(devices, pipes)
    start = first = 0
    while first < numbers:
        remaining = numbers - first
        doubled = scale == "halving" or (scale == "doubling" and remaining > devices)
        taken = min(remaining, 2 * devices if doubled else devices)
        groups = _groups(range(first, first + taken), pipes, doubled=doubled, parts=parts)
        single = _single_pairs(devices, pipes) if doubled and first == 0 else 0
        for (stage, pipe), device in device_of.items():
            slots[device] += _unit(start, devices, stage, pipe, groups[pipe], single)
        first += taken
        start += 3 * devices if doubled else 2 * devices

    schedule = Schedule(
        name="chimera",
        stages=devices,
        micro_batches=micro_batches,
        device_of=device_of,
        operations=tuple(tuple(o for _, o in sorted(pairs, key=itemgetter(0))) for pairs in slots),
        recompute=recomputing("chimera", devices, recompute),
        parts=parts,
    )
    return place_syncs(schedule, sync)


def _check_sizes(devices: int, pipes: int) -> None:
    if devices % 2:
        raise InputError(
            f"schedule chimera: {devices} devices; it needs an even number, {devices - 1 or 2} or {devices + 1}"
            if devices > 1
            else "schedule chimera: 1 device; it needs an even number, 2 or more"
        )
    possible = [2 * f for f in range(1, devices // 2 + 1) if devices // 2 % f == 0]
    if pipes not in possible:
        raise InputError(
            f"schedule chimera: {pipes} pipes on {devices} devices; it must be 2f with f a divisor of D/2 = "
            f"{devices // 2}: {', '.join(map(str, possible))}"
        )


def _placement(devices: int, pipes: int) -> dict[tuple[int, int], int]:
    distance = 2 * devices // pipes  # between the first stages of neighbouring pipes that go down
    placement = {}
    for pipe in range(pipes):
        for stage in range(devices):
            down = (pipe // 2 * distance + stage) % devices
            placement[stage, pipe] = devices - 1 - down if pipe % 2 else down
    return placement


def _groups(numbers: range, pipes: int, *, doubled: bool, parts: int) -> list[list[tuple[int, ...]]]:
    """Per pipe, the micro-batches of each forward; micro-batches are divided among the pipes as evenly as possible."""
    per_pipe, remainder = divmod(len(numbers) // parts, pipes)
    groups: list[list[tuple[int, ...]]] = []
    taken = 0
    for pipe in range(pipes):
        of_pipe = numbers[taken : taken + (per_pipe + (pipe < remainder)) * parts]
        taken += len(of_pipe)
        size = 2 if doubled else 1
        groups.append([tuple(of_pipe[i : i + size]) for i in range(0, len(of_pipe), size)])
    return groups


def _single_pairs(devices: int, pipes: int) -> int:
    """The number of pairs of each pipe that run as single forwards in the first doubled unit: all but the last pair.

    The middle device is D/(2f) - 1 hops from the first device. For each hop it starts two forwards later if forwards
    are doubled, and one forward later if they are single. Half as many single pairs reach the closed form if B = 2F.
    This number reaches it up to B = 3F, that is with recomputation too.
    """
    return devices // pipes - 1


def _unit(
    start: int, devices: int, stage: int, pipe: int, groups: list[tuple[int, ...]], single: int
) -> list[tuple[int, Operation]]:
    """(slot, operation) of each operation of one scheduling unit on one stage of one pipe.

    ``start`` is the first slot of the unit. The first ``single`` of ``groups`` run as single forwards.
    """
    placed = []
    numbers = 1 + max((group[-1] for group in groups), default=-1)
    forwards, backwards = (singles(kind, stage, numbers, pipe) for kind in (Kind.FORWARD, Kind.BACKWARD))
    for position, group in enumerate(groups):
        slot = start + 2 * position
        if len(group) == 1 or position < single:
            placed += [(slot + stage, forwards[m]) for m in group]
        else:
            placed.append((slot + stage, Operation(Kind.FORWARD, stage, group, pipe)))
        backward = slot + 2 * devices - 1 - stage
        for m in group:
            placed.append((backward, backwards[m]))
            backward += devices
    return placed


FAMILY = Family(
    name="chimera",
    summary="pipes in both directions, two or more copies of the model",
    source="Li and Hoefler, SC 2021, section 3",
    ships_in=("Chimera",),
    build=chimera,
)
