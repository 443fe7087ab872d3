"""The papers' closed forms for the time of an iteration, on the simulator's costs, for comparison with it."""

from dataclasses import replace

from auto3d.schedule.shape import Shape
from auto3d.simulate.costs import Costs, MessageCost, uniform
from auto3d.simulate.critical_path import count, critical_path
from auto3d.simulate.simulate import simulate


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

    The forwards and backwards on the critical path count with one message each, and the gradient syncs as far as idle
    time does not hide them. F and B are those of the slowest stage. The critical path is computed for a backward twice
    as long as the forward, or three times with recomputation (the section's own model). The slowest update is our
    addition.
    """
    schedule = shape.schedule()
    recomputes = bool(schedule.recompute)
    forwards, backwards = count(critical_path(simulate(schedule, uniform(schedule, backward=3 if recomputes else 2))))
    message = max((link.latency + max(link.forward, link.backward) for link in costs.messages), default=0.0)
    stages = zip(_stage_times(shape, costs), costs.forward, strict=True)
    forward, backward = max(costs.forward), max(whole - forward for whole, forward in stages)
    silent = replace(costs, messages=(MessageCost(),) * len(costs.messages), update=(0.0,) * schedule.stages)
    without_sync = simulate(schedule, replace(silent, sync=(0.0,) * schedule.stages)).makespan
    exposed = simulate(schedule, silent).makespan - without_sync
    return (forward + message) * forwards + (backward + message) * backwards + exposed + max(costs.update)


def _stage_times(shape: Shape, costs: Costs) -> list[float]:
    """Seconds of each stage for one micro-batch: forward, backward and recomputation."""
    recompute = [time if stage in shape.recompute else 0.0 for stage, time in enumerate(costs.recompute)]
    return [sum(times) for times in zip(costs.forward, costs.backward, recompute, strict=True)]
