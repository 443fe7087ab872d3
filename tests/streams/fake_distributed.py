"""torch.distributed that behaves like NCCL, on simulated devices.

A group has one communicator for each pair of ranks that exchange messages and one for its collectives. Each
communicator has its own stream on each of its devices. A call enqueues a kernel and returns at once; so does
``Work.wait``, which makes the current stream wait. The first use of a communicator blocks the host until all its ranks
use it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from tests.streams.machine import Kernel, Machine, Meeting, Record, Stream, current


@dataclass(frozen=True)
class FakeGroup:
    number: int
    ranks: tuple[int, ...]

    def size(self) -> int:
        return len(self.ranks)


class _Communicator:
    """Some ranks of a group. The n-th call of each rank belongs to the n-th call of every other."""

    def __init__(self, machine: Machine, name: str, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.streams: dict[int, Stream] = {}
        self._machine = machine
        self._name = name
        self._meetings: list[tuple[Meeting, dict[int, tuple[str, torch.Tensor]]]] = []
        self._calls: dict[int, int] = defaultdict(int)

    def connect(self, blocks: int) -> None:
        """Block the host until all ranks are here.

        A device has enough blocks for one kernel of each of its communicators: ``blocks`` for each.
        """
        host = current()
        if host.rank not in self.streams:
            host.device.free_blocks += blocks
            self.streams[host.rank] = host.device.new_stream(self._name)
            host.doing, before = f"the connection of {self._name}", host.doing
            host.block(lambda: len(self.streams) == len(self.ranks))
            host.doing = before

    def enqueue(self, role: str, tensor: torch.Tensor, *, stream: Stream, label: str, blocks: int) -> None:
        rank = current().rank
        number = self._calls[rank]
        self._calls[rank] += 1
        if number == len(self._meetings):
            calls: dict[int, tuple[str, torch.Tensor]] = {}
            self._meetings.append((Meeting(self._machine, self.ranks, partial(_transfer, self._name, calls)), calls))
        meeting, calls = self._meetings[number]
        calls[rank] = (role, tensor.detach())
        kernel = Kernel(
            stream,
            label,
            reads=() if role == "receives" else (tensor,),
            writes=() if role == "sends" else (tensor,),
            blocks=blocks,
            seconds=self._machine.delay(),
            meeting=meeting,
        )
        meeting.kernels[rank] = kernel
        stream.enqueue(kernel)


def _transfer(name: str, calls: dict[int, tuple[str, torch.Tensor]], kernels: dict[int, Kernel]) -> None:
    """Copy a message to its receiver, or do a collective. Slices belong to the ranks in their order."""
    roles, tensors = sorted(role for role, _ in calls.values()), [tensor for _, tensor in calls.values()]
    labels = " and ".join(kernel.label for kernel in kernels.values())
    assert roles == ["receives", "sends"] or set(roles) in ({"reduces"}, {"scatters"}, {"gathers"}), (
        f"{name}: {labels} do not match"
    )
    assert len({(tensor.numel(), tensor.dtype) for tensor in tensors}) == 1, f"{name}: {labels} differ in size or type"
    if roles[0] == "reduces":
        total = torch.stack(tensors).sum(0)
        for tensor in tensors:
            tensor.copy_(total)
    elif roles[0] in ("scatters", "gathers"):
        of_ranks = [calls[rank][1].view(len(calls), -1) for rank in sorted(calls)]
        if roles[0] == "scatters":
            sums = torch.stack(of_ranks).sum(0)
            for number, tensor in enumerate(of_ranks):
                tensor[number].copy_(sums[number])
        else:
            whole = torch.stack([tensor[number] for number, tensor in enumerate(of_ranks)])
            for tensor in of_ranks:
                tensor.copy_(whole)
    else:
        by_role = dict(calls.values())
        by_role["receives"].copy_(by_role["sends"].reshape(by_role["receives"].shape))
    calls.clear()


class FakeWork:
    """Holds its tensor until ``wait`` or completion, as ProcessGroupNCCL does, which does not use record_stream."""

    def __init__(self, end: Record, tensor: torch.Tensor) -> None:
        self._end = end
        self.tensor: torch.Tensor | None = tensor

    def wait(self, timeout: object = None) -> bool:
        current().spend()
        self.tensor = None
        current().device.current.wait_for(self._end)
        return True

    def is_completed(self) -> bool:
        host = current()
        host.spend()
        if self._end.done:
            self.tensor = None
            host.device.known |= self._end.past
        return self._end.done

    is_success = is_completed

    def exception(self) -> None:
        return None


class FakeDistributed:
    """Stands in for the module torch.distributed, for the hosts of ``machine``.

    A communication kernel takes ``blocks`` blocks; ``before_call`` is called before one is enqueued. ``held_bytes``
    has, for each rank, the peak bytes of its messages.
    """

    def __init__(self, machine: Machine, *, blocks: int, before_call: Callable[[], None]) -> None:
        self._machine = machine
        self._blocks = blocks
        self._before_call = before_call
        size = len(machine.devices)
        self._groups = [FakeGroup(0, tuple(range(size)))]
        self._made = [1] * size  # number of groups that each rank has made
        self._communicators: dict[tuple[int, tuple[int, ...], bool], _Communicator] = {}
        self._held: list[list[ref[torch.Tensor]]] = [[] for _ in range(size)]
        self.held_bytes: list[int] = [0] * size
        self.connected = [False] * size  # ranks that may no longer connect

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_rank(self, group: FakeGroup | None = None) -> int:
        return current().rank

    def get_world_size(self, group: FakeGroup | None = None) -> int:
        return len(self._machine.devices) if group is None else len(group.ranks)

    def get_backend(self, group: FakeGroup | None = None) -> str:
        return "nccl"

    def is_initialized(self) -> bool:
        return True

    def new_group(self, ranks: Sequence[int], *args: Any, **kwargs: Any) -> FakeGroup:
        """Every rank must call this, in the same order."""
        rank = current().rank
        if self._made[rank] == len(self._groups):
            self._groups.append(FakeGroup(len(self._groups), tuple(sorted(ranks))))
        group = self._groups[self._made[rank]]
        assert group.ranks == tuple(sorted(ranks)), f"rank {rank} makes group {group.number} of other ranks"
        self._made[rank] += 1
        return group

    def isend(self, tensor: torch.Tensor, dst: int, group: FakeGroup | None = None) -> FakeWork:
        return self._message("sends", tensor, dst, group)

    def irecv(self, tensor: torch.Tensor, src: int, group: FakeGroup | None = None) -> FakeWork:
        return self._message("receives", tensor, src, group)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = None, group: FakeGroup | None = None, async_op: bool = False
    ) -> FakeWork | None:
        group = group or self._groups[0]
        if async_op:
            return self._call("reduces", tensor, group.ranks, group)
        # NCCL runs a synchronous collective on the current stream.
        self._call("reduces", tensor, group.ranks, group, stream=current().device.current)
        return None

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, group: FakeGroup, async_op: bool
    ) -> FakeWork:
        return self._on_slices("scatters", output, whole, group)

    def all_gather_single(self, whole: torch.Tensor, mine: torch.Tensor, group: FakeGroup, async_op: bool) -> FakeWork:
        return self._on_slices("gathers", mine, whole, group)

    def _on_slices(self, role: str, mine: torch.Tensor, whole: torch.Tensor, group: FakeGroup) -> FakeWork:
        number = group.ranks.index(current().rank)
        assert mine.data_ptr() == whole.view(len(group.ranks), -1)[number].data_ptr(), "not in place"
        return self._call(role, whole, group.ranks, group)

    def _message(self, role: str, tensor: torch.Tensor, peer: int, group: FakeGroup | None) -> FakeWork:
        assert tensor.is_contiguous()
        rank = current().rank
        work = self._call(role, tensor, tuple(sorted((rank, peer))), group or self._groups[0], peer=peer)
        self._hold(rank, tensor)
        return work

    def _call(
        self,
        role: str,
        tensor: torch.Tensor,
        ranks: tuple[int, ...],
        group: FakeGroup,
        *,
        peer: int | None = None,
        stream: Stream | None = None,
    ) -> FakeWork:
        host = current()
        host.spend()
        self._before_call()
        key = (group.number, ranks, peer is not None)
        if key not in self._communicators:
            self._communicators[key] = _Communicator(self._machine, f"group {group.number} of ranks {ranks}", ranks)
        communicator = self._communicators[key]
        assert host.rank in communicator.streams or not self.connected[host.rank], f"{key}: connected too late"
        communicator.connect(self._blocks)
        other = "" if peer is None else f" {'to' if role == 'sends' else 'from'} rank {peer}"
        label = f"{host.waiting_for} (rank {host.rank} {role}{other})"
        if stream is None:
            stream = communicator.streams[host.rank]
            stream.wait_for(host.device.current.record(f"all before {label}"))
        communicator.enqueue(role, tensor, stream=stream, label=label, blocks=self._blocks)
        return FakeWork(stream.record(f"the end of {label}"), tensor)

    def _hold(self, rank: int, tensor: torch.Tensor) -> None:
        """Update the peak with the bytes of all messages that the host still refers to.

        Memory that the host no longer refers to may be reused at once: later kernels come later on the same stream.
        """
        known = [tensor, *(other for other in (one() for one in self._held[rank]) if other is not None)]
        self._held[rank] = [ref(other) for other in known]
        sizes = {other.untyped_storage()._cdata: other.untyped_storage().nbytes() for other in known}
        self.held_bytes[rank] = max(self.held_bytes[rank], sum(sizes.values()))
