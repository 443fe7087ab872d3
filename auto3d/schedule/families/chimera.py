"""Chimera: pipelines in both directions through the same devices (Li and Hoefler, SC 2021, sections 3.1, 3.5, 3.6).

Every operation has a slot, a unit of time in an ideal pipeline in which a forward slot and a backward slot last equally
long. In a unit that starts at slot 0, the m-th forward of a pipe on its stage s has slot s + 2m and its backward slot
2D - 1 - s + 2m; pipes never meet in a slot, since D is even. A device runs its operations in the order of their slots.
"""

from auto3d.errors import InputError
from auto3d.schedule.family import Family
from auto3d.schedule.operation import Kind, Operation, Schedule
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
    """``pipes`` = 2f: f pipes down and f up, each device a stage of each. Pipe 2i starts at device i D/f and goes down;
    pipe 2i + 1 is its mirror.

    ``scale`` says how units are put together where N is more than D:

    - ``direct``: units of D micro-batches, each in the drain of the one before. Idle (D - 2)(F + K(B - F)) per device
      for N = KD and two pipes.
    - ``doubling``: units of 2D, in which a forward takes two micro-batches and backwards one, first all backwards of
      first ones, then all of second ones, as in figure 7(c); what is left at the end, if D or less, is a direct unit.
      Idle (D - 2)(F + B)/2 + (k - 1)(D - 2)(B - 2F) for N = 2kD, two pipes and 2F <= B <= 3F.
    - ``halving``: the order of doubling with each micro-batch in two parts: forwards of both, backwards of one.

    Figure 7(d) takes out half of the bubbles at the start: the paper does not say how for any D. Here the first pairs
    of each pipe go forward one micro-batch by one, so that the first arrives early; see ``_single_pairs``.
    """
    _check_sizes(devices, pipes)
    check_choice("chimera", "scale", scale, SCALES)
    parts = 2 if scale == "halving" else 1
    numbers = micro_batches * parts

    slots: list[list[tuple[int, Operation]]] = [[] for _ in range(devices)]
    device_of = _placement(devices, pipes)
    start = first = 0
    while first < numbers:
        left = numbers - first
        doubled = scale == "halving" or (scale == "doubling" and left > devices)
        taken = min(left, 2 * devices if doubled else devices)
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
        operations=tuple(tuple(o for _, o in sorted(own, key=lambda pair: pair[0])) for own in slots),
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
    apart = 2 * devices // pipes
    placement = {}
    for pipe in range(pipes):
        for stage in range(devices):
            down = (pipe // 2 * apart + stage) % devices
            placement[stage, pipe] = devices - 1 - down if pipe % 2 else down
    return placement


def _groups(numbers: range, pipes: int, *, doubled: bool, parts: int) -> list[list[tuple[int, ...]]]:
    """What each pipe's forwards take together; micro-batches are shared among the pipes as evenly as can be."""
    whole, more = divmod(len(numbers) // parts, pipes)
    groups = []
    taken = 0
    for pipe in range(pipes):
        own = numbers[taken : taken + (whole + (pipe < more)) * parts]
        taken += len(own)
        groups.append([tuple(own[i : i + 2]) for i in range(0, len(own), 2)] if doubled else [(m,) for m in own])
    return groups


def _single_pairs(devices: int, pipes: int) -> int:
    """How many pairs of each pipe run one by one in the first doubled unit: all but the last.

    The middle device is D/(2f) - 1 hops from the first, and starts two forwards per hop late if those are doubled, one
    if they are single. Half as many single pairs reach the closed form where B = 2F; these do where B is up to 3F, that
    is with recomputation too.
    """
    return devices // pipes - 1


def _unit(
    start: int, devices: int, stage: int, pipe: int, groups: list[tuple[int, ...]], single: int
) -> list[tuple[int, Operation]]:
    """Slots of one unit's operations on one stage of one pipe."""
    placed = []
    for position, group in enumerate(groups):
        slot = start + 2 * position
        together = [(m,) for m in group] if position < single else [group]
        placed += [(slot + stage, Operation(Kind.FORWARD, stage, ms, pipe)) for ms in together]
        for chunk, m in enumerate(group):
            backward = slot + (chunk + 2) * devices - 1 - stage
            placed.append((backward, Operation(Kind.BACKWARD, stage, (m,), pipe)))
    return placed


FAMILY = Family(
    name="chimera",
    summary="pipelines in both directions, two or more replicas of the model (Li and Hoefler 2021)",
    build=chimera,
)
