"""Gradients of one rank: their memory, their sums over all ranks that hold the same parameters, and their norm."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from auto3d.partition.stage import Stage
from auto3d.plan import Plan
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.waiting import waiting_for
from auto3d.runtime.world import connect, new_group
from auto3d.schedule.operation import Schedule

ROW = 4096  # number of elements whose squares are summed in the buffer's own precision, for the norm


@dataclass(frozen=True, order=True, slots=True)
class Holders:
    """All ranks over which a parameter's gradient is summed, and the ``stages`` that use it: several if it is tied."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]

    def __str__(self) -> str:
        return f"ranks {', '.join(map(str, self.ranks))}"


def holders(
    plan: Plan,
    schedule: Schedule,
    stages: Sequence[Stage],
    parameters: Collection[str],
    *,
    shard: int = 0,
    of_all_shards: Collection[str] = (),
) -> dict[str, Holders]:
    """The holders of each of ``parameters``, in the same order on every rank: those that hold the same ``shard``.

    For the parameters in ``of_all_shards``, they are the holders of every shard.
    """
    ranks: dict[str, set[int]] = {}
    users: dict[str, set[int]] = {}
    for (stage, _), device in schedule.device_of.items():
        for name in stages[stage].state:
            if name in parameters:
                step = slice(None) if name in of_all_shards else slice(shard, None, plan.tp)
                ranks.setdefault(name, set()).update(plan.placement[device][step])
                users.setdefault(name, set()).add(stage)
    return {name: Holders(tuple(sorted(ranks[name])), tuple(sorted(users[name]))) for name in ranks}


Bucket = tuple[Holders, str]  # holders and type of the parameters whose gradients are in one flat buffer


class GradientSync:
    """Sums gradients over their holders.

    Parameters of one type with the same holders form a bucket: one flat buffer, of which their ``.grad`` are views, so
    that one all-reduce sums them without a copy. Parameters named in ``private``, which one stage of this rank uses and
    no other rank holds, have an ordinary ``.grad`` instead, which is None until autograd makes it: that memory is free
    during the forwards, and the first backward has nothing to add to.

    ``holders`` are those of this rank's parameters, ``all_holders`` those of every rank's, by default the same ones.
    Every rank must construct it with the same ``all_holders``, because it makes process groups: one for each set of
    holders, since two stages on the same ranks may be ready in a different order on each of them. Parameters named in
    ``uncounted`` are left out of the norm: a rank with another shard counts them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        holders: Mapping[str, Holders],
        *,
        all_holders: Collection[Holders] | None = None,
        private: Collection[str] = (),
        uncounted: Collection[str] = (),
        device: torch.device,
        run_ahead: RunAhead,
        timeout_s: float,
    ) -> None:
        self._run_ahead = run_ahead
        self._timeout_s = timeout_s
        everyones = holders.values() if all_holders is None else all_holders
        several = [each for each in sorted(set(everyones)) if len(each.ranks) > 1]
        self._groups = {each: new_group(each.ranks, timeout_s, device=device) for each in several}
        self._names: dict[Bucket, list[str]] = {}
        self._private = [(parameters[name], holders[name], name not in uncounted) for name in private]
        # All ranks have this order in common; the order in which stages use parameters differs.
        for name in sorted(holders, key=lambda name: name in uncounted):
            if name in parameters and name not in private:
                self._names.setdefault((holders[name], str(parameters[name].dtype)), []).append(name)
        self._buffers = {
            bucket: _flat_gradients([parameters[name] for name in names]) for bucket, names in self._names.items()
        }
        self._counted = {  # elements at the beginning of each buffer that belong to the norm
            bucket: sum(parameters[name].numel() for name in names if name not in uncounted)
            for bucket, names in self._names.items()
        }
        self._works: list[tuple[dist.Work, Holders]] = []
        for each, group in self._groups.items():  # now, because connecting blocks: not between messages
            if dist.get_rank() in each.ranks:
                connect(group, device=device, what=str(each), timeout_s=timeout_s)

    def zero(self, stages: Collection[int]) -> None:
        """Reset the gradients of ``stages`` to zero."""
        for parameter, holders, _ in self._private:
            if _concerns(holders, stages):
                parameter.grad = None
        for bucket in self._names:
            if _concerns(bucket[0], stages):
                self._buffers[bucket].zero_()

    def begin(self, stages: Sequence[int]) -> None:
        """Begin the sums of the gradients of those parameters that exactly these ``stages`` use."""
        for bucket in sorted(bucket for bucket in self._buffers if bucket[0].stages == tuple(stages)):
            holders, _ = bucket
            if len(holders.ranks) == 1:
                continue
            with waiting_for(f"the gradient all-reduce of {holders}", self._timeout_s):
                for piece in self._pieces(bucket):
                    work = dist.all_reduce(piece, group=self._groups[holders], async_op=True)
                    assert work is not None  # because it is asynchronous
                    self._works.append((work, holders))

    def _pieces(self, bucket: Bucket) -> list[torch.Tensor]:
        """The tensors that make up the gradients of ``bucket``; each is summed by one all-reduce."""
        return [self._buffers[bucket]]

    def wait(self, stages: Collection[int]) -> None:
        """Wait for the sums of the gradients of ``stages``."""
        for work, holders in self._works:
            if _concerns(holders, stages):
                self._run_ahead.wait(work, f"the gradient all-reduce of {holders}")
        self._works = [(work, holders) for work, holders in self._works if not _concerns(holders, stages)]

    def squared_norm(self) -> torch.Tensor | float:
        """What this rank adds to the squared norm of all gradients: the first holder of a parameter counts it."""
        counted = [
            buffer[: self._counted[bucket]]
            for bucket, buffer in self._buffers.items()
            if bucket[0].ranks[0] == dist.get_rank()
        ]
        counted += [parameter.grad for parameter, _, counts in self._private if counts and parameter.grad is not None]
        norms = [norm for gradient in counted for norm in _norms(gradient)]
        return torch.cat(norms).double().square().sum() if norms else 0.0

    def scale(self, factor: float) -> None:
        private = [parameter.grad for parameter, _, _ in self._private if parameter.grad is not None]
        for gradient in [*self._buffers.values(), *private]:
            gradient.mul_(factor)


def _concerns(holders: Holders, stages: Collection[int]) -> bool:
    return any(stage in holders.stages for stage in stages)


def _norms(gradient: torch.Tensor) -> Iterator[torch.Tensor]:
    """Norms of rows that are short enough for float32.

    The caller adds their squares in float64; summing all elements in float64 would take twenty times as long on a CPU.
    """
    values = gradient.flatten()
    dtype = torch.promote_types(values.dtype, torch.float32)
    whole = values.numel() // ROW * ROW
    if whole:
        yield torch.linalg.vector_norm(values[:whole].view(-1, ROW), dim=1, dtype=dtype)
    if whole < values.numel():
        yield torch.linalg.vector_norm(values[whole:], dtype=dtype).view(1)


def _flat_gradients(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """One zeroed buffer; the ``.grad`` of each of ``parameters`` becomes a view of its range."""
    first = parameters[0]
    buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    start = 0
    for parameter in parameters:
        parameter.grad = buffer[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return buffer
