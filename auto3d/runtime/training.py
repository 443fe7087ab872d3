"""Train a captured model by a Plan: the loop around a rank, and what it gave."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.capture.model import CapturedModel
from auto3d.plan import Plan, PlanError
from auto3d.runtime.data import DataSettings
from auto3d.runtime.executor import IterationResult
from auto3d.runtime.memory import PeakMemory
from auto3d.runtime.rank import build_rank
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.waiting import waiting_for
from auto3d.runtime.whereabouts import HERE
from auto3d.runtime.world import World, join, leave


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a run gave; the same on every rank. One entry per iteration, but ``peak_bytes`` has one per rank.

    Emulated devices compute nothing and hold nothing: of them there is ``iteration_s``, and the other lists are empty.
    """

    loss: list[float]
    grad_norm: list[float | None]  # None under an asynchronous schedule
    iteration_s: list[float]  # of the slowest rank
    peak_bytes: list[int]


def train(
    captured: CapturedModel,
    plan: Plan,
    settings: TrainingSettings,
    data: DataSettings,
    world: World,
    *,
    state: Mapping[str, torch.Tensor] | None = None,
    on_iteration: Callable[[int, IterationResult], None] = lambda iteration, result: None,
) -> TrainingResult:
    """Train for ``settings.iterations`` as rank ``world.rank``; calls ``on_iteration`` with each and its result."""
    if world.size != plan.ranks:
        raise PlanError(f"the plan needs {plan.ranks} ranks; there are {world.size}")
    torch.set_num_threads(settings.threads_per_rank)
    device = world.device(settings.device)
    join(world, device=device, timeout_s=settings.timeout_s)
    try:
        memory = PeakMemory(device)
        rank = build_rank(captured, plan, settings, data, world, state=state)
        results: list[IterationResult] = []
        for program in rank.programs:
            for result in rank.executor.run(program, len(results)):
                on_iteration(len(results), result)
                results.append(result)
        seconds = [result.seconds for result in results]
        iteration_s = _of_all_ranks(seconds, device, timeout_s=settings.timeout_s).max(dim=0).values.tolist()
        if settings.emulation is not None:
            return TrainingResult(loss=[], grad_norm=[], iteration_s=iteration_s, peak_bytes=[])
        return TrainingResult(
            loss=[result.loss for result in results],
            grad_norm=[result.grad_norm for result in results],
            iteration_s=iteration_s,
            peak_bytes=_of_all_ranks([memory.bytes()], device, timeout_s=settings.timeout_s).flatten().tolist(),
        )
    except Exception as error:
        error.add_note(f"{HERE} failed")
        raise
    finally:
        leave()


def _of_all_ranks(values: Sequence[float] | Sequence[int], device: torch.device, *, timeout_s: float) -> torch.Tensor:
    """[ranks, values]: what each rank gave, on every rank."""
    own = torch.tensor(values, device=device, dtype=torch.float64 if isinstance(values[0], float) else torch.int64)
    gathered = torch.zeros(dist.get_world_size(), len(values), device=device, dtype=own.dtype)
    gathered[dist.get_rank()] = own
    with waiting_for("the times and the memory of all ranks", timeout_s):
        dist.all_reduce(gathered)
    return gathered
