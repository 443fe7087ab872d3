"""Gradients of one rank: their memory, their sums over all ranks that hold the same parameters, and their norm.

Under ZeRO-1 also the weights, which each of these ranks updates a slice of, and then gathers.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import nn

from auto3d.conversions import CONVERSIONS, Collective, Conversion
from auto3d.partition.stage import Stage
from auto3d.plan import Plan
from auto3d.runtime.messages.slice_collectives import Begun, begin
from auto3d.runtime.optimizer.parameter_groups import UpdateRules
from auto3d.runtime.process.world import connect, new_group
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.waiting import waiting_for
from auto3d.runtime.weights.shard import WeightShard, aligned_starts
from auto3d.schedule.operation import Schedule

ROW = 4096  # number of elements whose squares are summed in the buffer's own precision, for the norm


@dataclass(frozen=True, order=True, slots=True)
class Holders:
    """All ranks over which a parameter's gradient is partial, and the ``stages`` that use it: several if it is tied.

    Its ``conversion`` sums the gradient.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    conversion: Conversion = field(default=CONVERSIONS["reduce"], compare=False)  # the same for all of a plan

    @property
    def is_split(self) -> bool:
        """Whether several ranks have a slice of the sum each (ZeRO-1)."""
        return self.conversion.splits and len(self.ranks) > 1

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
                mesh = plan.meshes[device]
                ranks.setdefault(name, set()).update(mesh.ranks if name in of_all_shards else mesh.at(tensor=shard))
                users.setdefault(name, set()).add(stage)
    how = plan.gradient_sum
    return {name: Holders(tuple(sorted(ranks[name])), tuple(sorted(users[name])), how) for name in ranks}


Bucket = tuple[Holders, str]  # holders and type of the parameters whose gradients are in one flat buffer


class GradientSync:
    """Sums gradients over their holders.

    Parameters of one type with the same holders form a bucket: one flat buffer, of which their ``.grad`` are views, so
    that one all-reduce sums them without a copy. Parameters named in ``private``, which one stage of this rank uses and
    no other rank holds, have an ordinary ``.grad`` instead, which is None until autograd makes it: that memory is free
    during the forwards, and the first backward has nothing to add to.

    Where the sum of a bucket ``is_split`` (ZeRO-1), its weights are in a flat buffer too. Its gradients are
    reduce-scattered, so that each holder has the sum of its slice; ``shards`` has these slices for the optimizer.
    Gathers send the updated slices to all holders.
    Parameters of which ``rules`` say the same are updated together; they are needed where sums are split.

    ``holders`` has the holders of this rank's parameters, ``all_holders`` of every rank's, by default the same.
    Every rank must construct it with the same ``all_holders``, because it makes process groups: a group for each set of
    holders, since two stages on the same ranks may be ready in a different order on each rank. Parameters named in
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
        rules: UpdateRules | None = None,
        device: torch.device,
        run_ahead: RunAhead,
    ) -> None:
        self._run_ahead = run_ahead
        everyones = holders.values() if all_holders is None else all_holders
        several = [holding for holding in sorted(set(everyones)) if len(holding.ranks) > 1]
        self._groups = {holding: new_group(holding.ranks, device=device) for holding in several}
        self._names: dict[Bucket, list[str]] = {}
        self._private = [(parameters[name], holders[name], name not in uncounted) for name in private]
        # All ranks have this order in common; the order in which stages use parameters differs.
        rules = rules or {}
        distinct = list(dict.fromkeys(rules.values()))
        number_of = {name: distinct.index(rule) for name, rule in rules.items()}
        for name in sorted(holders, key=lambda name: (name in uncounted, number_of.get(name, 0))):
            if name in parameters and name not in private:
                self._names.setdefault((holders[name], str(parameters[name].dtype)), []).append(name)
        self._buffers: dict[Bucket, torch.Tensor] = {}
        self._counted: dict[Bucket, torch.Tensor] = {}  # elements that this rank adds to the norm
        self._scaled: dict[Bucket, torch.Tensor] = {}  # elements that this rank's optimizer reads
        self.shards: dict[Bucket, WeightShard] = {}
        for bucket, names in self._names.items():
            self._make(bucket, {name: parameters[name] for name in names}, uncounted, rules)
        self._sums: list[tuple[Begun, Holders]] = []
        self._gathers: list[tuple[Begun, Holders]] = []
        for holding, group in self._groups.items():  # now, because connecting blocks: not between messages
            if dist.get_rank() in holding.ranks:
                connect(group, device=device, what=str(holding))

    def _make(
        self,
        bucket: Bucket,
        parameters: Mapping[str, nn.Parameter],
        uncounted: Collection[str],
        rules: UpdateRules,
    ) -> None:
        """Make the flat buffers of ``bucket``."""
        ranks, rank = bucket[0].ranks, dist.get_rank()
        starts, size = aligned_starts(parameters) if bucket[0].is_split else packed_starts(parameters)
        counted = max((starts[n] + p.numel() for n, p in parameters.items() if n not in uncounted), default=0)
        if not bucket[0].is_split:
            self._buffers[bucket] = buffer = _flat_gradients(parameters, starts, size)
            self._scaled[bucket] = buffer
            self._counted[bucket] = buffer[: counted if ranks[0] == rank else 0]
            return
        size = -(-size // len(ranks)) * len(ranks)
        self._buffers[bucket] = buffer = _flat_gradients(parameters, starts, size)
        shard = WeightShard(parameters, starts, buffer, number=ranks.index(rank), ranks=len(ranks), rules=rules)
        self.shards[bucket] = shard
        self._scaled[bucket] = buffer[shard.first : shard.last]
        self._counted[bucket] = buffer[shard.first : max(shard.first, min(shard.last, counted))]

    def zero(self, stages: Set[int]) -> None:
        """Reset the gradients of ``stages`` to zero."""
        for parameter, holders, _ in self._private:
            if not stages.isdisjoint(holders.stages):
                parameter.grad = None
        for bucket in self._names:
            if not stages.isdisjoint(bucket[0].stages):
                self._buffers[bucket].zero_()

    def begin(self, stages: Sequence[int]) -> None:
        """Begin the sums of the gradients of those parameters that exactly these ``stages`` use."""
        for bucket in sorted(bucket for bucket in self._buffers if bucket[0].stages == tuple(stages)):
            holders, _ = bucket
            if len(holders.ranks) > 1:
                self._sums += self._begun(holders.conversion.forward, holders, self._pieces(bucket), sum_of(holders))

    def _begun(
        self, collective: Collective | None, holders: Holders, pieces: Sequence[torch.Tensor], what: str
    ) -> list[tuple[Begun, Holders]]:
        """Begin ``collective`` on each of ``pieces`` among ``holders``."""
        with waiting_for(what):
            return [(begin(collective, piece, self._groups[holders], holders.ranks), holders) for piece in pieces]

    def _pieces(self, bucket: Bucket) -> list[torch.Tensor]:
        """The tensors that make up the gradients of ``bucket``; a collective sums each tensor."""
        return [self._buffers[bucket]]

    def wait(self, stages: Set[int]) -> None:
        """Wait for the sums of the gradients of ``stages``."""
        sums, self._sums = self._sums, []
        for begun, holders in sums:
            if stages.isdisjoint(holders.stages):
                self._sums.append((begun, holders))
            else:
                self._wait(begun, sum_of(holders))

    def _wait(self, begun: Begun, what: str) -> None:
        for work in begun.works:
            self._run_ahead.wait(work, what)
        begun.finish()

    def begin_gathers(self, stages: Set[int]) -> None:
        """Begin to gather the weights of ``stages`` that their holders have updated slices of.

        The ranks call it in one order: once all stages of an iteration are updated, or at once where every rank has
        one stage. So no two ranks wait for each other in different gathers.
        """
        for bucket in sorted(bucket for bucket in self._names if not stages.isdisjoint(bucket[0].stages)):
            holders, _ = bucket
            if holders.is_split:
                pieces = self._weight_pieces(bucket)
                self._gathers += self._begun(holders.conversion.backward, holders, pieces, _gather_of(holders))

    def follow_weights(self) -> None:
        """Let the slices that this rank updates be slices of the buffers that have the parameters now."""
        for shard in self.shards.values():
            shard.follow()

    def _weight_pieces(self, bucket: Bucket) -> list[torch.Tensor]:
        """The tensors that make up the weights of ``bucket``; a collective gathers each tensor."""
        return [self.shards[bucket].weights()]

    def wait_for_weights(self) -> None:
        """Wait until the slices of the weights that other ranks update have arrived."""
        gathers, self._gathers = self._gathers, []
        for begun, holders in gathers:
            self._wait(begun, _gather_of(holders))

    def squared_norm(self) -> torch.Tensor | float:
        """What this rank adds to the squared norm of all gradients: holders count slices, or the first holder all."""
        counted = [gradient for gradient in self._counted.values() if len(gradient)]
        counted += [parameter.grad for parameter, _, counts in self._private if counts and parameter.grad is not None]
        norms = list(chain.from_iterable(map(_norms, counted)))
        return torch.cat(norms).double().square().sum() if norms else 0.0

    def scale(self, factor: float) -> None:
        """Multiply the gradients that this rank's optimizers read by ``factor``."""
        private = [parameter.grad for parameter, _, _ in self._private if parameter.grad is not None]
        for gradient in [*self._scaled.values(), *private]:
            gradient.mul_(factor)


def sum_of(holders: Holders) -> str:
    return f"the gradient {holders.conversion.forward} of {holders}"


def _gather_of(holders: Holders) -> str:
    return f"the weights that other ranks of {holders} update"


def _norms(gradient: torch.Tensor) -> list[torch.Tensor]:
    """Norms of rows that are short enough for float32.

    The caller adds their squares in float64; summing all elements in float64 would take twenty times as long on a CPU.
    """
    values = gradient.flatten()
    dtype = torch.promote_types(values.dtype, torch.float32)
    whole = values.numel() // ROW * ROW
    norms = []
    if whole:
        norms.append(torch.linalg.vector_norm(values[:whole].view(-1, ROW), dim=1, dtype=dtype))
    if whole < values.numel():
        norms.append(torch.linalg.vector_norm(values[whole:], dtype=dtype).view(1))
    return norms


def packed_starts(parameters: Mapping[str, nn.Parameter]) -> tuple[dict[str, int], int]:
    """The first element of every parameter in a buffer without gaps, and the elements of the buffer."""
    ends = list(accumulate((parameter.numel() for parameter in parameters.values()), initial=0))
    return dict(zip(parameters, ends, strict=False)), ends[-1]


def _flat_gradients(parameters: Mapping[str, nn.Parameter], starts: Mapping[str, int], size: int) -> torch.Tensor:
    """One zeroed buffer; every parameter's ``.grad`` becomes a view of its range."""
    first = next(iter(parameters.values()))
    buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
    for name, parameter in parameters.items():
        parameter.grad = buffer[starts[name] : starts[name] + parameter.numel()].view_as(parameter)
    return buffer
