"""The input of the simulator: how long operations, messages and gradient syncs take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isclose, isfinite

from auto3d.errors import InputError
from auto3d.schedule.operation import Kind, Schedule
from auto3d.words import counted

_ROUNDING = 1e-6  # times of slices may differ from the whole by this fraction
_SLICED = ("forward", "backward", "recompute")  # times that slices may have of their own


@dataclass(frozen=True, kw_only=True)
class MessageCost:
    """The cost of messages between a stage and the next stage.

    The message of a micro-batch takes ``latency`` and the time of its activations (``forward``) or of their gradient
    (``backward``): bytes over bandwidth.
    """

    latency: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SharedMachine:
    """One machine whose processes slow each other down: an operation takes ``slowdown[n - 1]`` times as long while n
    of them compute.

    ``processes`` has the number of processes on this machine for each pipeline device. Replicas of a stage run the same
    operation at the same time, so a device may have several.
    """

    slowdown: tuple[float, ...]
    processes: tuple[int, ...]

    def slowdown_of(self, computing: int) -> float:
        """The slowdown while ``computing`` processes compute; more than ``slowdown`` lists take turns."""
        known = len(self.slowdown)
        return self.slowdown[min(max(computing, 1), known) - 1] * max(1.0, computing / known)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times in seconds or in any other unit; results have the same unit.

    Times of operations are per stage, for one whole micro-batch on a device of speed 1. An operation on k micro-batches
    takes k times as long, an operation on half a micro-batch half as long, and a device of speed 2 halves its time.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]  # time of B, both halves
    backward_input: tuple[float, ...]  # time of I
    backward_weight: tuple[float, ...]  # time of W
    recompute: tuple[float, ...]  # time of R; also added to a B or I that recomputes inside itself
    sync: tuple[float, ...]  # time of the all-reduce of a stage's gradients, once all its holders have started it
    update: tuple[float, ...]
    messages: tuple[MessageCost, ...]  # messages[s] is for messages between the stages s and s + 1
    speed: tuple[float, ...]  # per device
    # Per stage, the time of the message with the inputs that stage 0 has read for it; 0: it gets none; empty: no stage
    # does. Stage 1 gets its inputs with its activations.
    inputs: tuple[float, ...] = ()
    overlap: bool = True  # messages overlap compute; if False, they occupy their sender and their receiver
    shared_machines: tuple[SharedMachine, ...] = ()  # machines on which devices slow each other down
    # Per device, what all-reduces cost the compute beside them; empty: nothing.
    sync_start: tuple[float, ...] = ()  # time of an S, whatever the speed
    sync_slowdown: tuple[float, ...] = ()  # operations take 1 + this times as long while an all-reduce runs
    # Tensor-parallel collectives that no compute hides, as parts of the times above; empty: none.
    exposed_forward: tuple[float, ...] = ()
    exposed_backward: tuple[float, ...] = ()  # also part of ``backward_input``
    exposed_recompute: tuple[float, ...] = ()
    # [stage][slice]: the times of the slices of a micro-batch, which add up to the times above; empty: equal parts of
    # them, which halves of the backward always are.
    forward_of_slice: tuple[tuple[float, ...], ...] = ()
    backward_of_slice: tuple[tuple[float, ...], ...] = ()
    recompute_of_slice: tuple[tuple[float, ...], ...] = ()
    # Measured times of single operations, by their number (auto3d.schedule.dependencies): the time of the operation,
    # and the time of the message or all-reduce which follows it. They replace all the times above; empty: none.
    by_operation: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "backward_input", "backward_weight", "recompute", "sync", "update"):
            _check_times(name, getattr(self, name))
        _check_times("inputs", self.inputs)
        if self.by_operation and any(self.inputs):
            raise InputError("costs: by_operation has no times for messages of inputs; leave these out")
        for name in ("exposed_forward", "exposed_backward", "exposed_recompute"):
            _check_times(name, getattr(self, name))
        for name in ("sync_start", "sync_slowdown"):
            for device, value in enumerate(getattr(self, name)):
                if not (isfinite(value) and value >= 0):
                    raise InputError(f"costs: {name} of device {device} is {value:g}; it must be 0 or more")
            if self.by_operation and any(getattr(self, name)):
                raise InputError(f"costs: by_operation has measured times, which have {name} in them; leave it out")
        for name in _SLICED:
            _check_slices(name, getattr(self, name), getattr(self, f"{name}_of_slice"))
        for name in ("latency", "forward", "backward"):
            _check_times(f"messages {name}", (getattr(message, name) for message in self.messages))
        for number, times in enumerate(self.by_operation):
            if not all(isfinite(time) and time >= 0 for time in times):
                raise InputError(f"costs: operation {number} has the times {times}; a time must be 0 or more")
        for device, speed in enumerate(self.speed):
            if not (isfinite(speed) and speed > 0):
                raise InputError(f"costs: speed of device {device} is {speed}; it must be more than 0")

    def times_of(self, kind: Kind) -> tuple[float, ...]:
        """The times of one kind of operation, per stage. The time of S depends on the device alone: see
        ``sync_start``."""
        return {
            Kind.FORWARD: self.forward,
            Kind.RECOMPUTE: self.recompute,
            Kind.BACKWARD: self.backward,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
            Kind.SYNC: (0.0,) * len(self.sync),
            Kind.UPDATE: self.update,
        }[kind]

    def exposed_of(self, kind: Kind) -> tuple[float, ...]:
        """Per stage, the part of the time of one kind of operation in which collectives are exposed."""
        exposed = {
            Kind.FORWARD: self.exposed_forward,
            Kind.RECOMPUTE: self.exposed_recompute,
            Kind.BACKWARD: self.exposed_backward,
            Kind.BACKWARD_INPUT: self.exposed_backward,
        }
        return exposed.get(kind) or (0.0,) * len(self.sync)

    def check_fit(self, schedule: Schedule) -> None:
        """Raise InputError unless there are values for each stage, boundary and device of ``schedule``."""
        lengths = dict.fromkeys(
            ("forward", "backward", "backward_input", "backward_weight", "recompute", "sync", "update"), schedule.stages
        ) | {"messages": schedule.stages - 1, "speed": schedule.devices}
        lengths |= {"inputs": schedule.stages} if self.inputs else {}
        lengths |= {name: schedule.devices for name in ("sync_start", "sync_slowdown") if getattr(self, name)}
        for name, length in lengths.items():
            count = len(getattr(self, name))
            if count != length:
                raise InputError(
                    f"costs: {name} has {counted(count, 'value')}; schedule {schedule.name} needs {length}"
                )
        for name in _SLICED:
            for times in getattr(self, f"{name}_of_slice")[:1]:
                if len(times) != schedule.slices:
                    raise InputError(
                        f"costs: {name}_of_slice has {counted(len(times), 'slice')}; schedule {schedule.name} runs "
                        f"{counted(schedule.slices, 'slice')} per micro-batch"
                    )
        operations = sum(map(len, schedule.operations))
        if self.by_operation and len(self.by_operation) != operations:
            raise InputError(
                f"costs: by_operation has {len(self.by_operation)} values; schedule {schedule.name} needs {operations}"
            )


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
    collectives: float = 0.0,
    overlap: bool = True,
) -> Costs:
    """The costs of equal stages on equal devices, from the times of all stages of one device together.

    If v stages are on one device (the chunks of an interleaved schedule), each takes 1/v of these times. Only ``p2p``,
    the time of the message of one micro-batch, is the same between any two stages.

    Defaults: ``backward`` is the sum of its halves if both are set, otherwise twice ``forward``. A half is the other
    half subtracted from ``backward``; if neither is set, both are half of ``backward``. ``recompute`` is ``forward``.
    ``kept`` is the fraction of each stage that is not recomputed, 0 by default. ``collectives`` is the time of exposed
    tensor-parallel collectives, which each forward, backward and recomputation takes in addition. Raises InputError if
    a half is longer than ``backward`` or if a time is negative.
    """
    if backward is None and backward_input is not None and backward_weight is not None:
        backward = backward_input + backward_weight
    elif backward is None:
        backward = 2 * forward
    if backward_input is None:
        backward_input = backward / 2 if backward_weight is None else backward - backward_weight
    if backward_weight is None:
        backward_weight = backward - backward_input
    if min(backward_input, backward_weight) < 0 <= backward:
        raise InputError(f"costs: one half of the backward is longer than the whole, {backward:g}; give both halves")
    fraction = schedule.devices / schedule.stages  # fraction of a device's time that one stage takes

    def of_stages(time: float) -> tuple[float, ...]:
        return (time * fraction,) * schedule.stages

    whole_recompute = of_stages((forward if recompute is None else recompute) + collectives)
    exposed = of_stages(collectives) if collectives else ()
    return Costs(
        forward=of_stages(forward + collectives),
        backward=of_stages(backward + collectives),
        backward_input=of_stages(backward_input + collectives),
        backward_weight=of_stages(backward_weight),
        recompute=tuple(
            time * (1 - fraction_kept)
            for time, fraction_kept in zip(whole_recompute, kept or [0.0] * schedule.stages, strict=True)
        ),
        sync=of_stages(sync),
        update=of_stages(update),
        messages=(MessageCost(forward=p2p, backward=p2p),) * (schedule.stages - 1),
        speed=(1.0,) * schedule.devices,
        overlap=overlap,
        exposed_forward=exposed,
        exposed_backward=exposed,
        exposed_recompute=exposed,
    )


def _check_times(name: str, times: Iterable[float]) -> None:
    for stage, time in enumerate(times):
        if not (isfinite(time) and time >= 0):
            raise InputError(f"costs: {name} of stage {stage} is {time:g}; a time must be 0 or more")


def _check_slices(name: str, whole: Sequence[float], slices: Sequence[Sequence[float]]) -> None:
    """Check ``slices``, the times [stage][slice] that add up to the times ``whole``; empty: there are none."""
    if not slices:
        return
    if len(slices) != len(whole) or len({len(times) for times in slices}) > 1:
        counts = ", ".join(str(len(times)) for times in slices)
        raise InputError(
            f"costs: {name}_of_slice has {counts} slices; it must have equally many for each of "
            f"{counted(len(whole), 'stage')}"
        )
    for number, of_stages in enumerate(zip(*slices, strict=True)):
        _check_times(f"{name} of slice {number}", of_stages)
    for stage, (time, times) in enumerate(zip(whole, slices, strict=True)):
        if not isclose(sum(times), time, rel_tol=_ROUNDING):
            raise InputError(
                f"costs: the slices of stage {stage} add up to {sum(times):g}; {name} of stage {stage} is {time:g}"
            )
