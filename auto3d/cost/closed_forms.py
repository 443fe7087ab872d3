"""The papers' closed forms for the time of an iteration, on the simulator's costs, for comparison with it."""

from collections.abc import Sequence
from statistics import median

from auto3d.plan import PlanError
from auto3d.schedule import SCHEDULES
from auto3d.schedule.operation import Kind
from auto3d.schedule.shape import Shape
from auto3d.simulate.costs import Costs, MessageCost
from auto3d.simulate.critical_path import critical_path
from auto3d.simulate.simulate import Timeline, simulate

_SENDING = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)


def amp_s(shape: Shape, costs: Costs) -> float:
    """Seconds of an iteration by AMP, section 4.3, equations 2 to 4.

    The slowest stage counts M - 1 times, each stage and each message once, and one gradient sync. The time of a stage
    includes forward and backward, the time of a message both directions; the paper specifies neither. Stages on the
    same device add up, also the stages of several pipes. The slowest update is our addition. A cost model whose method
    is ``amp`` also takes messages and collectives from section 4.2 (``AmpTraffic``).
    """
    once = _stage_times(shape, costs)
    pipes = len(shape.device_of) // shape.stages
    device_time = [0.0] * shape.devices
    for (stage, _), device in shape.device_of.items():
        device_time[device] += once[stage] / pipes
    messages = sum(2 * link.latency + link.forward + link.backward for link in costs.messages)
    pipeline = (shape.micro_batches - 1) * max(device_time) + sum(once) + messages
    return pipeline + max(costs.sync) + max(costs.update)


def chimera_s(shape: Shape, costs: Costs) -> float:
    """Seconds of an iteration by Chimera, section 3.4, equation 1.

    The forwards and backwards on the critical path count with one message each, and the gradient syncs as far as
    ``unoverlapped_syncs`` finds no room for them. F_t, "the forward pass on a single pipeline stage", is here the
    median stage's forward: the paper does not say which stage it measures, and its errors within 10 % exclude the stage
    with the head. B_t is 2 F_t plus the recomputation: 3 F_t if the stage keeps nothing. A pass of k micro-batches
    counts k times. The slowest update is our addition. Raises PlanError for an asynchronous schedule, which the
    equation does not describe.
    """
    if SCHEDULES[shape.name].asynchronous:
        raise PlanError(f"Chimera's equation 1 describes synchronous schedules; {shape.name} is asynchronous")
    schedule = shape.schedule()
    stages = shape.stages
    forward = (median(costs.forward),) * stages
    equal = Costs(
        forward=forward,
        backward=tuple(2 * time for time in forward),
        backward_input=forward,
        backward_weight=forward,
        recompute=(median([costs.recompute[stage] for stage in shape.recompute] or [0.0]),) * stages,
        sync=(0.0,) * stages,
        update=(0.0,) * stages,
        messages=(MessageCost(),) * (stages - 1),
        speed=(1.0,) * shape.devices,
    )
    timeline = simulate(schedule, equal)
    path = critical_path(timeline)
    passes = sum(len(operation.micro_batches) for operation in path if operation.kind in _SENDING) / shape.parts
    message = max((link.latency + max(link.forward, link.backward) for link in costs.messages), default=0.0)
    return timeline.makespan + message * passes + max(unoverlapped_syncs(timeline, costs.sync)) + max(costs.update)


def unoverlapped_syncs(timeline: Timeline, sync: Sequence[float]) -> list[float]:
    """Comm_unoverlapped of Chimera, section 3.4: per device, the seconds of its gradient syncs that no free region
    hides.

    ``timeline`` has no messages and no syncs; ``sync`` has the seconds of each stage's all-reduce. The free regions of
    a sync are the idle times of the device from the operation S that starts it to the end of the iteration (figure 6).
    The syncs of a device use them one after the other, and take nothing from its compute.
    """
    unoverlapped = []
    for device in range(timeline.schedule.devices):
        numbers = timeline.numbers(device)
        # A device with a stage on several pipes reduces its gradients once, when the last pipe is done.
        starts = {timeline.operations[n].stage: n for n in numbers if timeline.operations[n].kind is Kind.SYNC}
        pending = free = 0.0
        for number in numbers:
            pending = max(0.0, pending - (timeline.start[number] - free))
            free = timeline.end[number]
            stage = timeline.operations[number].stage
            if starts.get(stage) == number:
                pending += sync[stage]
        unoverlapped.append(max(0.0, pending - (timeline.makespan - free)))
    return unoverlapped


def _stage_times(shape: Shape, costs: Costs) -> list[float]:
    """Seconds of each stage for one micro-batch: forward, backward and recomputation."""
    recompute = [time if stage in shape.recompute else 0.0 for stage, time in enumerate(costs.recompute)]
    return [sum(times) for times in zip(costs.forward, costs.backward, recompute, strict=True)]
