"""Point-to-point exchange between stages: receives posted ahead, sends that never block.

One process group carries the messages to higher ranks and another those to lower ones, and each pair of ranks uses them
in the sender's order. So nothing depends on tags, which NCCL lacks, and opposite directions never queue behind each
other. When a receive is posted is the program's business (``common_order``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.partition.stage import Transfer
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.resplit import pieces
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.waiting import wait, waiting_for
from auto3d.runtime.world import new_group
from auto3d.schedule.operation import Kind
from auto3d.schedule.program import Message, Program


@dataclass(frozen=True, slots=True)
class _Load:
    """What one tensor of a message has for one peer: some of its samples or, where ``dimension`` is None, all of it."""

    number: int  # of the tensor in the message
    shape: tuple[int, ...]
    dtype: torch.dtype
    dimension: int | None
    start: int  # in this rank's own tensor

    def taken_from(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.dimension is None:
            return tensor
        return tensor.narrow(self.dimension, self.start, self.shape[self.dimension]).contiguous()


@dataclass(frozen=True)
class _OnItsWay:
    """What of a message goes to, or comes from, one peer."""

    peer: int
    tensors: list[torch.Tensor]
    works: list[dist.Work]


class Exchange:
    """Sends and receives the messages of one rank's Programs, all between the same peers as those of ``program``.

    ``ranks_of`` maps pipeline devices to their ranks in this replica of the pipeline: several where their stages have
    replicas, which share each micro-batch's samples in order. ``device_of`` maps (stage, pipe) to devices. A message is
    the tensors, in the order of ``transfers``, that its two stages exchange for one micro-batch, as this rank has them;
    where the two have other numbers of replicas, each pair of ranks exchanges the samples that both have, which are in
    the dimension that ``sample_dimensions`` tells, or values without samples, of which one copy is enough.
    """

    def __init__(
        self,
        program: Program,
        transfers: Sequence[Transfer],
        *,
        ranks_of: Sequence[Sequence[int]],
        device_of: Mapping[tuple[int, int], int],
        sample_dimensions: Mapping[str, int],
        device: torch.device,
        run_ahead: RunAhead,
        timeout_s: float,
    ) -> None:
        ranks = list(range(dist.get_world_size()))
        self._upward, self._downward = (new_group(ranks, timeout_s, device=device, messages=True) for _ in range(2))
        self._ranks_of = ranks_of
        self._device_of = device_of
        self._sample_dimensions = sample_dimensions
        self._device = device
        self._run_ahead = run_ahead
        self._timeout_s = timeout_s
        self._transfers: dict[tuple[int, int], list[Transfer]] = {}
        for transfer in transfers:
            self._transfers.setdefault((transfer.source, transfer.target), []).append(transfer)
        self._routes: dict[tuple[Kind, int, int, int], dict[int, list[_Load]]] = {}
        self._names: dict[tuple[Message, int], str] = {}
        self._local: dict[Message, list[torch.Tensor]] = {}
        self._sent: dict[Message, list[_OnItsWay]] = {}
        self._posted: dict[Message, list[_OnItsWay]] = {}
        self._connect(program)

    def values(self, message: Message) -> list[str]:
        """Names of the values that ``message`` carries, activations or gradients of them, in order."""
        return [transfer.value.name for transfer in self._carried(message)]

    def start(self) -> None:
        """Begin a program; the one before has used all messages that came."""
        assert not self._posted
        assert not self._local

    def post(self, message: Message) -> None:
        """Let ``message`` come, into memory that is taken for it."""
        self._posted[message] = []
        for peer, loads in self._route(message).items():
            group = self._group(peer, dist.get_rank())
            tensors = [torch.empty(load.shape, dtype=load.dtype, device=self._device) for load in loads]
            with waiting_for(self._name(message, peer), self._timeout_s):
                works = [dist.irecv(tensor, peer, group=group) for tensor in tensors]
            self._posted[message].append(_OnItsWay(peer, tensors, works))

    def send(self, message: Message, tensors: list[torch.Tensor]) -> None:
        if self._is_local(message):
            self._local[message] = tensors
            return
        self._sent[message] = []
        for peer, loads in self._route(message).items():
            group = self._group(dist.get_rank(), peer)
            taken = [load.taken_from(tensors[load.number]) for load in loads]
            with waiting_for(f"the receiver of {self._name(message, peer)}", self._timeout_s):
                works = [dist.isend(tensor, peer, group=group) for tensor in taken]
            self._sent[message].append(_OnItsWay(peer, taken, works))

    def receive(self, message: Message) -> dict[str, torch.Tensor]:
        """The tensors of ``message`` by value, which was posted; what is computed with them waits for them.

        A gradient is missing where no peer had this rank's copy of the value.
        """
        names = self.values(message)
        if self._is_local(message):
            return dict(zip(names, self._local.pop(message), strict=True))
        arrived: dict[str, list[tuple[_Load, torch.Tensor]]] = {}
        for part in self._posted.pop(message):
            for work in part.works:
                self._run_ahead.wait(work, self._name(message, part.peer))
            for load, tensor in zip(self._route(message)[part.peer], part.tensors, strict=True):
                arrived.setdefault(names[load.number], []).append((load, tensor))
        return {name: _joined(own) for name, own in arrived.items()}

    def release(self, message: Message) -> None:
        """Forget a sent message; its receivers have it, or are about to."""
        for part in self._sent.pop(message):
            for work in part.works:
                self._run_ahead.wait(work, f"the receiver of {self._name(message, part.peer)}")

    def end(self) -> None:
        """End the program: forget what was sent."""
        for message in list(self._sent):
            self.release(message)

    def _connect(self, program: Program) -> None:
        """Send one element to, and receive one from, each rank that this one exchanges with.

        NCCL makes a connection at the first use of a pair, and blocks until the other side does too: so all ranks go
        through their pairs in one order, before any receive is posted ahead of its send.
        """
        own = dist.get_rank()
        sends = {m for step in program.steps for m in step.sends if not self._is_local(m)}
        pairs = {(own, peer) for message in sends for peer in self._route(message)}
        pairs |= {(peer, own) for step in program.steps for message in step.posts for peer in self._route(message)}
        for source, target in sorted(pairs, key=lambda pair: (min(pair), max(pair), pair)):
            element = torch.zeros(1, device=self._device)
            group = self._group(source, target)
            what = f"a connection from {THIS_RANK.name(source)} to {THIS_RANK.name(target)}"
            with waiting_for(what, self._timeout_s):
                work = (
                    dist.isend(element, target, group=group)
                    if source == own
                    else dist.irecv(element, source, group=group)
                )
            wait(work, timeout_s=self._timeout_s, what=what)

    def _name(self, message: Message, peer: int) -> str:
        key = message, peer
        if key not in self._names:  # every wait tells it, and every iteration has the same messages
            self._names[key] = f"{message} ({THIS_RANK.name(peer)})"
        return self._names[key]

    def _is_local(self, message: Message) -> bool:
        return self._device_of[message.source, message.pipe] == self._device_of[message.target, message.pipe]

    def _route(self, message: Message) -> dict[int, list[_Load]]:
        """Peer -> what of ``message`` this rank sends it, or receives from it; the same for every micro-batch.

        Peers are in the order of their ranks. Where several ranks send one message to several, all then do so in one
        common order: that of the senders, and for each that of its receivers.
        """
        key = (message.kind, message.source, message.target, message.pipe)
        if key not in self._routes:
            route: dict[int, list[_Load]] = {}
            for peer, load in self._loads(message):
                route.setdefault(peer, []).append(load)
            self._routes[key] = dict(sorted(route.items()))
        return self._routes[key]

    def _loads(self, message: Message) -> Iterator[tuple[int, _Load]]:
        sources = self._ranks_of[self._device_of[message.source, message.pipe]]
        targets = self._ranks_of[self._device_of[message.target, message.pipe]]
        sends, forward = dist.get_rank() in sources, message.kind is Kind.FORWARD
        own, peers = (sources, targets) if sends else (targets, sources)
        for number, transfer in enumerate(self._carried(message)):
            shape = list(transfer.value.shape)
            dimension = None if len(own) == len(peers) else self._sample_dimensions.get(transfer.value.name)
            length = None if dimension is None else shape[dimension] * len(own)
            # A gradient goes the way back of its value.
            makers, users = (sources, targets) if forward else (targets, sources)
            for piece in pieces(length, sources=len(makers), targets=len(users)):
                if not forward:
                    piece = piece.back()
                here, there, start = (
                    (piece.source, piece.target, piece.start) if sends else (piece.target, piece.source, piece.into)
                )
                if own[here] != dist.get_rank():
                    continue
                if dimension is not None:
                    shape[dimension] = piece.length
                dtype = getattr(torch, transfer.value.dtype)
                yield peers[there], _Load(number, tuple(shape), dtype, dimension, start)

    def _carried(self, message: Message) -> list[Transfer]:
        if message.kind is Kind.FORWARD:
            return self._transfers[message.source, message.target]
        return [
            transfer for transfer in self._transfers[message.target, message.source] if transfer.value.differentiable
        ]

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._upward if source < target else self._downward


def _joined(arrived: Sequence[tuple[_Load, torch.Tensor]]) -> torch.Tensor:
    """One tensor of what peers sent: samples one after the other; several gradients of one copy, which add up."""
    tensors = [tensor for _, tensor in sorted(arrived, key=lambda pair: pair[0].start)]
    if len(tensors) == 1:
        return tensors[0]
    dimension = arrived[0][0].dimension
    return sum(tensors[1:], start=tensors[0]) if dimension is None else torch.cat(tensors, dimension)
