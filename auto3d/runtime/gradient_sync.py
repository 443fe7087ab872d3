"""Gradients of one rank: flat buffers, summed over the ranks that hold the same parameters, and their global norm."""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from auto3d.partition.stage import Stage
from auto3d.plan import Plan
from auto3d.runtime.waiting import wait, waiting_for
from auto3d.runtime.world import new_group
from auto3d.schedule.operation import Schedule


def holders(
    plan: Plan, schedule: Schedule, stages: Sequence[Stage], parameters: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Parameter -> all ranks that hold a copy: replicas of its stage or, if tied, of every stage that uses it.

    In the same order on every rank.
    """
    ranks: dict[str, set[int]] = {}
    for (stage, _), device in schedule.device_of.items():
        for name in stages[stage].state:
            if name in parameters:
                ranks.setdefault(name, set()).update(plan.placement[device])
    return {name: tuple(sorted(members)) for name, members in ranks.items()}


_Share = tuple[tuple[int, ...], str]  # holders and type of the parameters that share a buffer


class GradientSync:
    """Sums gradients over their holders.

    Parameters of one type with the same holders share one flat buffer, of which their ``.grad`` are views: one
    all-reduce, and no copy. Every rank must construct it with the same ``holders``, for process groups are made here.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], holders: Mapping[str, tuple[int, ...]], *, timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        self._groups = {ranks: new_group(ranks, timeout_s) for ranks in sorted(set(holders.values())) if len(ranks) > 1}
        self._names: dict[_Share, list[str]] = {}
        for name in holders:  # whose order all ranks share; the order in which stages use parameters they do not
            if name in parameters:
                self._names.setdefault((holders[name], str(parameters[name].dtype)), []).append(name)
        self._buffers = {
            share: _flat_gradients([parameters[name] for name in names]) for share, names in self._names.items()
        }
        self._works: list[tuple[dist.Work, tuple[int, ...]]] = []
        self._unsynced: dict[_Share, set[str]] = {}
        self._connect()

    def _connect(self) -> None:
        """Use each own group once: NCCL connects at a group's first use, which must not be between messages."""
        for ranks, group in self._groups.items():
            if dist.get_rank() in ranks:
                device = next(iter(self._buffers.values())).device
                with waiting_for(f"a connection between ranks {', '.join(map(str, ranks))}", self._timeout_s):
                    dist.all_reduce(torch.zeros(1, device=device), group=group)

    def start_iteration(self) -> None:
        for buffer in self._buffers.values():
            buffer.zero_()
        self._unsynced = {share: set(names) for share, names in self._names.items() if share[0] in self._groups}

    def start(self, stage: Stage, still_used: set[str]) -> None:
        """Begin the sums that ``stage`` completes; ``still_used`` is the state of this rank's stages not yet synced."""
        for share in sorted(self._unsynced):
            if self._unsynced[share].isdisjoint(stage.state) or not self._unsynced[share].isdisjoint(still_used):
                continue
            del self._unsynced[share]
            ranks, _ = share
            with waiting_for(_all_reduce_of(ranks), self._timeout_s):
                work = dist.all_reduce(self._buffers[share], group=self._groups[ranks], async_op=True)
            self._works.append((work, ranks))

    def wait(self) -> None:
        for work, ranks in self._works:
            wait(work, timeout_s=self._timeout_s, what=_all_reduce_of(ranks))
        self._works = []

    def squared_norm(self) -> torch.Tensor | float:
        """This rank's share of the squared norm of all gradients: a parameter is counted by its first holder alone."""
        own = [buffer for (ranks, _), buffer in self._buffers.items() if ranks[0] == dist.get_rank()]
        return sum(torch.linalg.vector_norm(buffer, dtype=torch.float64).square() for buffer in own)

    def scale(self, factor: float) -> None:
        for buffer in self._buffers.values():
            buffer.mul_(factor)


def _all_reduce_of(ranks: tuple[int, ...]) -> str:
    return f"the gradient all-reduce of ranks {', '.join(map(str, ranks))}"


def _flat_gradients(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """One zeroed buffer whose pieces are the gradients of ``parameters``."""
    first = parameters[0]
    buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    start = 0
    for parameter in parameters:
        parameter.grad = buffer[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return buffer
