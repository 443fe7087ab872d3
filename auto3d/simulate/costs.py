"""How long operations, messages and gradient syncs take: what the simulator is given."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from auto3d.errors import InputError
from auto3d.schedule.operation import Kind, Schedule


@dataclass(frozen=True, kw_only=True)
class MessageCost:
    """What the boundary between a stage and the next one costs: ``latency`` per message, and per micro-batch in it the
    time of its activations (``forward``) or of their gradient (``backward``), that is bytes over bandwidth."""

    latency: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SharedMachine:
    """One machine whose processes slow each other down: ``slowdown[n - 1]`` times while n of them compute.

    ``processes`` says how many compute there for each pipeline device: its replicas do what it does, at the same time.
    """

    slowdown: tuple[float, ...]
    processes: tuple[int, ...]

    def slowdown_of(self, computing: int) -> float:
        """While so many compute; beyond those that are known, they take turns."""
        known = len(self.slowdown)
        return self.slowdown[min(max(computing, 1), known) - 1] * max(1.0, computing / known)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times in seconds, or in any other unit: everything that is made of them is in the same.

    Per stage, for one whole micro-batch on a device of speed 1. An operation over k micro-batches takes k times as
    long, one over a part of a micro-batch that part of the time, and on a device of speed 2 it takes half.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]  # of B: both halves
    backward_input: tuple[float, ...]  # of I
    backward_weight: tuple[float, ...]  # of W
    recompute: tuple[float, ...]  # of R, and of a B or I that recomputes inside itself
    sync: tuple[float, ...]  # all-reduce of a stage's gradients, from when all replicas have started it
    update: tuple[float, ...]
    messages: tuple[MessageCost, ...]  # messages[s]: between stages s and s + 1
    speed: tuple[float, ...]  # per device
    overlap: bool = True  # messages travel beside compute; if not, they occupy their sender and their receiver
    shared_machines: tuple[SharedMachine, ...] = ()  # machines on which devices slow each other down

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "backward_input", "backward_weight", "recompute", "sync", "update"):
            _check_times(name, getattr(self, name))
        for name in ("latency", "forward", "backward"):
            _check_times(f"messages {name}", (getattr(message, name) for message in self.messages))
        for device, speed in enumerate(self.speed):
            if not (isfinite(speed) and speed > 0):
                raise InputError(f"costs: speed of device {device} is {speed}; it must be more than 0")

    def times_of(self, kind: Kind) -> tuple[float, ...]:
        """The times of one kind of operation, per stage; S itself takes none, its all-reduce runs beside compute."""
        return {
            Kind.FORWARD: self.forward,
            Kind.RECOMPUTE: self.recompute,
            Kind.BACKWARD: self.backward,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
            Kind.SYNC: (0.0,) * len(self.sync),
            Kind.UPDATE: self.update,
        }[kind]

    def check_fit(self, schedule: Schedule) -> None:
        """Raise InputError unless there are times for each stage, boundary and device of ``schedule``."""
        wanted = dict.fromkeys(
            ("forward", "backward", "backward_input", "backward_weight", "recompute", "sync", "update"), schedule.stages
        ) | {"messages": schedule.stages - 1, "speed": schedule.devices}
        for name, length in wanted.items():
            if len(getattr(self, name)) != length:
                found = len(getattr(self, name))
                raise InputError(f"costs: {name} has {found} values; schedule {schedule.name} needs {length}")


def uniform(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    backward: float | None = None,
    backward_input: float | None = None,
    backward_weight: float | None = None,
    recompute: float | None = None,
    kept: Sequence[float] | None = None,
    sync: float = 0.0,
    update: float = 0.0,
    p2p: float = 0.0,
    overlap: bool = True,
) -> Costs:
    """Equal stages on equal devices, from the times of one device's whole share of the model.

    Where v stages share a device (the chunks of an interleaved schedule), each takes 1/v of these times, except for
    ``p2p``: the message of one micro-batch is as long between any two stages. ``backward`` is twice ``forward`` unless
    it or both its halves are given; a half not given is the rest of ``backward``, and both are half of it where neither
    is. ``recompute`` is ``forward`` unless given; ``kept`` is the share of each stage that is not recomputed.
    """
    if backward is None:
        both = backward_input is not None and backward_weight is not None
        backward = backward_input + backward_weight if both else 2 * forward
    if backward_input is None:
        backward_input = backward / 2 if backward_weight is None else backward - backward_weight
    if backward_weight is None:
        backward_weight = backward - backward_input
    if min(backward_input, backward_weight) < 0 <= backward:
        raise InputError(f"costs: one half of the backward is longer than the whole, {backward:g}; give both halves")
    share = schedule.devices / schedule.stages

    def each(time: float) -> tuple[float, ...]:
        return (time * share,) * schedule.stages

    again = each(forward if recompute is None else recompute)
    return Costs(
        forward=each(forward),
        backward=each(backward),
        backward_input=each(backward_input),
        backward_weight=each(backward_weight),
        recompute=tuple(time * (1 - own) for time, own in zip(again, kept or [0.0] * len(again), strict=True)),
        sync=each(sync),
        update=each(update),
        messages=(MessageCost(forward=p2p, backward=p2p),) * (schedule.stages - 1),
        speed=(1.0,) * schedule.devices,
        overlap=overlap,
    )


def _check_times(name: str, times: Iterable[float]) -> None:
    for place, time in enumerate(times):
        if not (isfinite(time) and time >= 0):
            raise InputError(f"costs: {name} of stage {place} is {time:g}; a time must be 0 or more")
