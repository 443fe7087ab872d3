"""The papers' closed forms for the time of an iteration, on the same costs that the simulator takes, for comparison."""

from dataclasses import replace

from auto3d.schedule.shape import Shape
from auto3d.simulate.costs import Costs, MessageCost, uniform
from auto3d.simulate.critical_path import count, critical_path
from auto3d.simulate.simulate import simulate


def amp_s(shape: Shape, costs: Costs) -> float:
    """AMP, section 4.3, equations 2 to 4: the slowest stage M - 1 times, each stage and each message once, and a sync.

    A stage's time holds its forward and its backward, a message's both ways; the paper says neither. Stages of one
    device, or of several pipes on it, count together. The slowest update is ours.
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
    """Chimera, section 3.4, equation 1: the forwards and backwards on the critical path, each with its message, and of
    the gradient syncs what the idle time does not hide.

    F and B are those of the slowest stage. The critical path is that of a backward twice as long as the forward, or
    three times where it recomputes (the section's own model). The slowest update is ours.
    """
    schedule = shape.schedule()
    recomputes = bool(schedule.recompute)
    forwards, backwards = count(critical_path(simulate(schedule, uniform(schedule, backward=3 if recomputes else 2))))
    message = max((link.latency + max(link.forward, link.backward) for link in costs.messages), default=0.0)
    once = zip(_stage_times(shape, costs), costs.forward, strict=True)
    forward, backward = max(costs.forward), max(whole - forward for whole, forward in once)
    silent = replace(costs, messages=(MessageCost(),) * len(costs.messages), update=(0.0,) * schedule.stages)
    alone = simulate(schedule, replace(silent, sync=(0.0,) * schedule.stages)).makespan
    exposed = simulate(schedule, silent).makespan - alone
    return (forward + message) * forwards + (backward + message) * backwards + exposed + max(costs.update)


def _stage_times(shape: Shape, costs: Costs) -> list[float]:
    recompute = [time if stage in shape.recompute else 0.0 for stage, time in enumerate(costs.recompute)]
    return [sum(parts) for parts in zip(costs.forward, costs.backward, recompute, strict=True)]
