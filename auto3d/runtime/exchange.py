"""Point-to-point exchange between stages: receives are posted ahead, sends never block.

One process group carries the messages to higher ranks, another those to lower ranks. Each pair of ranks uses them in
the sender's order. So nothing depends on tags, which NCCL lacks, and opposite directions never queue behind each
other. The program decides when each receive is posted (``schedule/common_order.py``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.partition.stage import Transfer
from auto3d.resplit import pieces
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.waiting import wait, waiting_for
from auto3d.runtime.world import new_group
from auto3d.schedule.operation import Kind
from auto3d.schedule.program import Message, Program, Step

_SENT_AS_THEY_ARE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)
"""Types that NCCL and gloo both take; c10d's NCCL backend has these and a few more, and refuses int16, for one."""


@dataclass(frozen=True, slots=True)
class _Load:
    """The slice of one tensor of a message that one peer gets; the whole tensor if ``dimension`` is None."""

    index: int  # number of the tensor in the message
    shape: tuple[int, ...]
    dtype: torch.dtype
    dimension: int | None
    start: int  # position of the slice in this rank's tensor

    def slice_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.dimension is None:
            return tensor
        return tensor.narrow(self.dimension, self.start, self.shape[self.dimension]).contiguous()


@dataclass(frozen=True)
class _Transmission:
    """The tensors of a message that are on their way to or from one peer."""

    peer: int
    tensors: list[torch.Tensor]
    works: list[dist.Work]


_ByStages = dict[tuple[int, int], list[Transfer]]

MessageGroups = tuple[dist.ProcessGroup, dist.ProcessGroup]
"""The first takes messages to higher ranks, the other those to lower ranks."""


def message_groups(device: torch.device, timeout_s: float) -> MessageGroups:
    """The groups of an Exchange; every rank of the world must call it."""
    ranks = list(range(dist.get_world_size()))
    upward, downward = (new_group(ranks, timeout_s, device=device, messages=True) for _ in range(2))
    return upward, downward


class Exchange:
    """Sends and receives the messages of one rank's programs, all between the same peers as those of ``program``.

    ``ranks_of`` has, for each pipeline device, its ranks in this rank's pipeline: several if its stages have replicas,
    which split each micro-batch's samples in order. ``device_of`` maps (stage, pipe) to pipeline devices. A message
    consists of the tensors, in the order of ``transfers``, that its two stages exchange for one micro-batch, in the
    shapes that this rank has. If the two stages have different numbers of replicas, each pair of ranks exchanges the
    samples that both have, along the dimension in ``sample_dimensions``; a value without samples is sent only once.
    Exchanges of which only one has messages at a time may share their ``groups``.
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
        groups: MessageGroups | None = None,
    ) -> None:
        self.groups = groups or message_groups(device, timeout_s)
        self._upward, self._downward = self.groups
        self._ranks_of = ranks_of
        self._device_of = device_of
        self._sample_dimensions = sample_dimensions
        self._device = device
        self._run_ahead = run_ahead
        self._timeout_s = timeout_s
        self._transfers = _by_stages(transfers)
        self._sizes: dict[int, int] = {}  # micro-batch of another size -> number of that
        self._of_sizes: list[tuple[Sequence[Transfer], _ByStages]] = []
        self._routes: dict[tuple[Kind, int, int, int, int | None], dict[int, list[_Load]]] = {}
        self._names: dict[tuple[Message, int], str] = {}
        self._local: dict[Message, list[torch.Tensor]] = {}
        self._sent: dict[Message, list[_Transmission]] = {}
        self._posted: dict[Message, list[_Transmission]] = {}
        self._connect(program)

    def set_sizes(self, sizes: Mapping[int, Sequence[Transfer]]) -> None:
        """From now on the messages of these micro-batches have the shapes of these transfers; the others the usual
        ones."""
        self._sizes = {micro_batch: self._number_of(transfers) for micro_batch, transfers in sizes.items()}

    def _number_of(self, transfers: Sequence[Transfer]) -> int:
        for number, (known, _) in enumerate(self._of_sizes):
            if known is transfers:
                return number
        self._of_sizes.append((transfers, _by_stages(transfers)))
        return len(self._of_sizes) - 1

    def values(self, message: Message) -> list[str]:
        """Names of the values whose activations or gradients ``message`` carries, in order."""
        return [transfer.value.name for transfer in self._carried(message)]

    def start(self) -> None:
        """Begin a program; the previous one has used all messages that it received."""
        assert not self._posted
        assert not self._local

    def post(self, message: Message) -> None:
        """Post the receive of ``message``, for which this allocates memory."""
        self._posted[message] = []
        for peer, loads in self._route(message).items():
            group = self._group(peer, dist.get_rank())
            tensors = [torch.empty(load.shape, dtype=load.dtype, device=self._device) for load in loads]
            with waiting_for(self._name(message, peer), self._timeout_s):
                works = [_started(dist.irecv(_as_sent(tensor), peer, group=group)) for tensor in tensors]
            self._posted[message].append(_Transmission(peer, tensors, works))

    def send(self, message: Message, tensors: list[torch.Tensor]) -> None:
        if self._is_local(message):
            self._local[message] = tensors
            return
        self._sent[message] = []
        for peer, loads in self._route(message).items():
            group = self._group(dist.get_rank(), peer)
            slices = [load.slice_of(tensors[load.index]) for load in loads]
            with waiting_for(f"the receiver of {self._name(message, peer)}", self._timeout_s):
                works = [_started(dist.isend(_as_sent(tensor), peer, group=group)) for tensor in slices]
            self._sent[message].append(_Transmission(peer, slices, works))

    def receive(self, message: Message) -> dict[str, torch.Tensor]:
        """The tensors of the posted ``message`` by value; computations with them wait until they have arrived.

        A gradient is missing if no peer used this rank's copy of the value.
        """
        names = self.values(message)
        if self._is_local(message):
            return dict(zip(names, self._local.pop(message), strict=True))
        arrived: dict[str, list[tuple[_Load, torch.Tensor]]] = {}
        for transmission in self._posted.pop(message):
            for work in transmission.works:
                self._run_ahead.wait(work, self._name(message, transmission.peer))
            for load, tensor in zip(self._route(message)[transmission.peer], transmission.tensors, strict=True):
                arrived.setdefault(names[load.index], []).append((load, tensor))
        return {name: _joined(slices) for name, slices in arrived.items()}

    def release(self, message: Message) -> None:
        """Free a sent message, which its receivers have or are about to have."""
        for transmission in self._sent.pop(message):
            for work in transmission.works:
                self._run_ahead.wait(work, f"the receiver of {self._name(message, transmission.peer)}")

    def end(self) -> None:
        """End the program: free all sent messages."""
        for message in list(self._sent):
            self.release(message)

    def receive_for(self, step: Step) -> dict[int, dict[str, list[torch.Tensor]]]:
        """Micro-batch -> value -> its activations, or its gradients from every stage that used it; releases others."""
        arrived: dict[int, dict[str, list[torch.Tensor]]] = {}
        for message in step.receives:
            values = arrived.setdefault(message.micro_batch, {})
            for name, tensor in self.receive(message).items():
                values.setdefault(name, []).append(tensor)
        for message in step.releases:
            self.release(message)
        return arrived

    def send_from(self, step: Step, micro_batch: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send the messages of ``step`` for one of its micro-batches, from ``tensors`` by value."""
        for message in step.sends:
            if message.micro_batch == micro_batch:
                self.send(message, [tensors[name] for name in self.values(message)])

    def _connect(self, program: Program) -> None:
        """Send one element to, and receive one from, each rank that this one exchanges messages with.

        NCCL connects a pair of ranks at its first use and blocks until both sides have called. So all ranks go through
        their pairs in the same order, before any receive is posted ahead of its send: first the pairs whose lower
        pipeline device is even, then the others, so that a pipeline does not connect one pair after the other.
        """
        this = dist.get_rank()
        sends = {m for step in program.steps for m in step.sends if not self._is_local(m)}
        pairs = {(this, peer) for message in sends for peer in self._route(message)}
        pairs |= {(peer, this) for step in program.steps for message in step.posts for peer in self._route(message)}
        device_of_rank = {rank: device for device, ranks in enumerate(self._ranks_of) for rank in ranks}

        def order(pair: tuple[int, int]) -> tuple:
            return min(device_of_rank[rank] for rank in pair) % 2, min(pair), max(pair), pair

        for source, target in sorted(pairs, key=order):
            element = torch.zeros(1, device=self._device)
            group = self._group(source, target)
            what = f"a connection from {THIS_RANK.name(source)} to {THIS_RANK.name(target)}"
            with waiting_for(what, self._timeout_s):
                work = (
                    dist.isend(element, target, group=group)
                    if source == this
                    else dist.irecv(element, source, group=group)
                )
            wait(_started(work), timeout_s=self._timeout_s, what=what)

    def _name(self, message: Message, peer: int) -> str:
        key = message, peer
        if key not in self._names:  # cached: every wait reports it, and every iteration has the same messages
            self._names[key] = f"{message} ({THIS_RANK.name(peer)})"
        return self._names[key]

    def _is_local(self, message: Message) -> bool:
        return self._device_of[message.source, message.pipe] == self._device_of[message.target, message.pipe]

    def _route(self, message: Message) -> dict[int, list[_Load]]:
        """Peer -> the slices of ``message`` that this rank sends to it or receives from it, for any micro-batch of its
        size.

        Peers are in the order of their ranks. So where several ranks send one message to several others, all of them
        follow one common order: by sender, and for each sender by receiver.
        """
        key = (message.kind, message.source, message.target, message.pipe, self._sizes.get(message.micro_batch))
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
        these, peers = (sources, targets) if sends else (targets, sources)
        for index, transfer in enumerate(self._carried(message)):
            shape = list(transfer.value.shape)
            dimension = None if len(these) == len(peers) else self._sample_dimensions.get(transfer.value.name)
            length = None if dimension is None else shape[dimension] * len(these)
            # A gradient goes back the way that its value came.
            makers, users = (sources, targets) if forward else (targets, sources)
            for piece in pieces(length, sources=len(makers), targets=len(users)):
                if not forward:
                    piece = piece.back()
                here, there, start = (
                    (piece.source, piece.target, piece.start) if sends else (piece.target, piece.source, piece.into)
                )
                if these[here] != dist.get_rank():
                    continue
                if dimension is not None and piece.length is not None:
                    shape[dimension] = piece.length
                dtype = getattr(torch, transfer.value.dtype)
                yield peers[there], _Load(index, tuple(shape), dtype, dimension, start)

    def _carried(self, message: Message) -> Sequence[Transfer]:
        number = self._sizes.get(message.micro_batch)
        transfers = self._transfers if number is None else self._of_sizes[number][1]
        if message.kind is Kind.FORWARD:
            return transfers[message.source, message.target]
        return [transfer for transfer in transfers[message.target, message.source] if transfer.value.differentiable]

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._upward if source < target else self._downward


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous ``tensor`` in a type that can be sent: bytes, if its own cannot."""
    return tensor if tensor.dtype in _SENT_AS_THEY_ARE else tensor.view(-1).view(torch.uint8)


def _by_stages(transfers: Sequence[Transfer]) -> _ByStages:
    found: _ByStages = {}
    for transfer in transfers:
        found.setdefault((transfer.source, transfer.target), []).append(transfer)
    return found


def _joined(arrived: Sequence[tuple[_Load, torch.Tensor]]) -> torch.Tensor:
    """One tensor from what peers sent: samples are concatenated; several gradients of one copy are added."""
    tensors = [tensor for _, tensor in sorted(arrived, key=lambda pair: pair[0].start)]
    if len(tensors) == 1:
        return tensors[0]
    dimension = arrived[0][0].dimension
    return sum(tensors[1:], start=tensors[0]) if dimension is None else torch.cat(tensors, dimension)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # torch returns None only to ranks outside of the group
    return work
