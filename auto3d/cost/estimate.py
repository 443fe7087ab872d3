"""The seconds of an iteration from the costs of its operations: by simulation or a closed form, and by component."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from auto3d.cost.closed_forms import amp_s, chimera_s
from auto3d.schedule import SCHEDULES
from auto3d.schedule.asynchronous import iterations_between_flushes
from auto3d.schedule.operation import Kind
from auto3d.schedule.shape import Shape
from auto3d.simulate.costs import Costs
from auto3d.simulate.idle import steady_state
from auto3d.simulate.simulate import simulate

SIMULATED_ITERATIONS = 8  # Once the pipeline is full, every further iteration of an asynchronous schedule takes as long

SecondsOf = Callable[[Shape, Costs], float]  # seconds of an iteration: the simulator or a closed form


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of an iteration, their components on the pipeline that decides, and bytes on each pipeline device."""

    seconds: float
    compute_s: float  # compute of the busiest device, including recomputation
    host_s: float = 0.0  # time by which its host makes these operations longer: launches, and the runtime's own
    tensor_s: float  # tensor-parallel collectives that compute does not hide
    message_s: float  # messages between stages that compute does not hide
    sync_s: float  # gradient syncs that compute does not hide, and what the others cost the compute beside them
    update_s: float
    bubble_s: float
    """Time in which the busiest device waits. The bubbles at the start and the end of an asynchronous schedule are
    divided by the iterations between two flushes."""
    memory: tuple[float, ...]


def busiest(shape: Shape, costs: Costs) -> tuple[float, float]:
    """(seconds of compute, seconds of updates) of an iteration on the device with the largest sum of both."""
    schedule = shape.schedule()
    timeline = simulate(schedule, costs)
    best = (0.0, 0.0)
    for device in range(shape.devices):
        compute = update = 0.0
        for number in timeline.numbers(device):
            seconds = timeline.end[number] - timeline.start[number]
            if timeline.operations[number].kind is Kind.UPDATE:
                update += seconds
            else:
                compute += seconds
        best = max(best, (compute / schedule.iterations, update / schedule.iterations), key=sum)
    return best


def _simulated(shape: Shape, costs: Costs) -> float:
    if not SCHEDULES[shape.name].asynchronous:
        return simulate(shape.schedule(), costs).makespan
    iterations = iterations_between_flushes(shape.micro_batches, shape.options)
    simulated = min(iterations, SIMULATED_ITERATIONS + ceil(2 * shape.devices / shape.micro_batches))
    timeline = simulate(replace(shape, options={**shape.options, "iterations": simulated}).schedule(), costs)
    steady = steady_state(timeline)
    further = 0.0 if steady is None else (iterations - simulated) * steady.iteration_time
    return (timeline.makespan + further) / iterations


METHODS: dict[str, SecondsOf] = {"simulated": _simulated, "amp": amp_s, "chimera": chimera_s}
