"""The stages of a problem on each pipe, with the times of their operations on their device."""

from dataclasses import dataclass

from auto3d.errors import InputError
from auto3d.synthesis.problem import Problem


@dataclass(frozen=True, kw_only=True)
class PipeStage:
    """A stage on one pipe. Times are of one micro-batch on its device."""

    stage: int
    pipe: int
    device: int
    micro_batches: int  # micro-batches of its pipe
    first: int  # number of the first of them
    forward: float
    backward: float
    backward_input: float
    backward_weight: float
    recompute: float
    receive_forward: float  # time of the message from the stage before; 0 on the same device
    send_forward: float  # time of the message to the stage after
    receive_gradient: float
    send_gradient: float


def pipe_stages(problem: Problem) -> list[PipeStage]:
    """All stages on all pipes, by pipe and then by stage. The micro-batches of a pipe have consecutive numbers.

    Devices that share a machine only slow each other down, so times without that are a lower bound. Raises InputError
    if the costs do not say how long an operation of any order takes.
    """
    costs = problem.costs
    if costs.by_operation:
        raise InputError("problem: costs has times by operation, which fit one order only; give times per stage")
    if any(slowdown < 1 for machine in costs.shared_machines for slowdown in machine.slowdown):
        raise InputError("problem: devices that share a machine have a slowdown below 1; it must be 1 or more")
    made, first = [], 0
    for pipe, micro_batches in enumerate(problem.per_pipe):
        path = [problem.device_of[stage, pipe] for stage in range(problem.stages)]
        for stage, device in enumerate(path):
            before = costs.messages[stage - 1] if stage > 0 and path[stage - 1] != device else None
            after = costs.messages[stage] if stage + 1 < len(path) and path[stage + 1] != device else None
            speed = costs.speed[device]
            made.append(
                PipeStage(
                    stage=stage,
                    pipe=pipe,
                    device=device,
                    micro_batches=micro_batches,
                    first=first,
                    forward=costs.forward[stage] / speed,
                    backward=costs.backward[stage] / speed,
                    backward_input=costs.backward_input[stage] / speed,
                    backward_weight=costs.backward_weight[stage] / speed,
                    recompute=costs.recompute[stage] / speed,
                    receive_forward=before.latency + before.forward if before else 0.0,
                    send_forward=after.latency + after.forward if after else 0.0,
                    receive_gradient=after.latency + after.backward if after else 0.0,
                    send_gradient=before.latency + before.backward if before else 0.0,
                )
            )
        first += micro_batches
    return made
