"""The seconds of an iteration from the costs of its operations: by simulation or a closed form, and by component."""

from collections.abc import Callable
from dataclasses import dataclass

from auto3d.cost.closed_forms import amp_s, chimera_s
from auto3d.schedule.operation import Kind
from auto3d.schedule.shape import Shape
from auto3d.simulate.costs import Costs
from auto3d.simulate.simulate import simulate

SecondsOf = Callable[[Shape, Costs], float]  # seconds of an iteration: the simulator or a closed form


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of an iteration, their components on the pipeline that decides, and bytes on each pipeline device."""

    seconds: float
    compute_s: float  # compute of the busiest device, including recomputation
    tensor_s: float  # tensor-parallel collectives that compute does not hide
    message_s: float  # messages between stages that compute does not hide
    sync_s: float  # gradient syncs that compute does not hide
    update_s: float
    bubble_s: float
    """Time in which the busiest device waits. An asynchronous schedule is simulated from its first fill to its last
    drain, and their waits are divided by its number of iterations."""
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
    schedule = shape.schedule()
    return simulate(schedule, costs).makespan / schedule.iterations


METHODS: dict[str, SecondsOf] = {"simulated": _simulated, "amp": amp_s, "chimera": chimera_s}
