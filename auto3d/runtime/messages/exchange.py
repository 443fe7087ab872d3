"""Point-to-point exchange between stages: receives are posted ahead, sends never block.

One process group carries the messages to higher ranks, another those to lower ranks. Each pair of ranks uses them in
the sender's order. So nothing depends on tags, which NCCL lacks, and opposite directions never queue behind each
other. The program decides when each receive is posted (``schedule/common_order.py``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist

from auto3d.partition.stage import Transfer
from auto3d.resplit import pieces
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.process.world import new_group, without_pair_warning
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.waiting import wait, waiting_for
from auto3d.schedule.operation import Kind
from auto3d.schedule.program import Message, Program, Step

_SENT_AS_THEY_ARE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)
"""Types that NCCL and gloo both take; c10d's NCCL backend has these and a few more, and refuses int16, for one.

Tensors of other types are sent as bytes.
"""


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


class _Leg:
    """What of a message goes to or comes from one ``peer``, through ``group``."""

    def __init__(self, peer: int, group: dist.ProcessGroup, loads: list[_Load], name: str) -> None:
        self.peer, self.group, self.loads = peer, group, loads
        self.name = f"{name} ({THIS_RANK.name(peer)})"  # names are made here, once: every wait reports its message
        self.receiver = f"the receiver of {self.name}"
        self.receiving = waiting_for(self.name)
        self.sending = waiting_for(self.receiver)

    def begin(self, call: Callable[..., dist.Work | None], tensors: list[torch.Tensor]) -> "_Transmission":
        """Send or receive ``tensors`` by ``call``."""
        works = []
        for tensor in tensors:
            sent = tensor if tensor.dtype in _SENT_AS_THEY_ARE else tensor.view(-1).view(torch.uint8)
            work = call(sent, self.peer, group=self.group)
            assert work is not None  # torch returns None only to ranks outside of the group
            works.append(work)
        return self, tensors, works


_Transmission = tuple[_Leg, list[torch.Tensor], list[dist.Work]]
"""The tensors of a leg that are on their way."""


@dataclass(frozen=True, slots=True)
class _Route:
    """How the tensors of a message, which have these ``names``, travel."""

    names: list[str]
    is_local: bool  # both stages are on this device
    legs: list[_Leg]  # in the order of the peers' ranks
    is_direct: bool  # a single peer has all tensors, or gets them, as they are


_ByStages = dict[tuple[int, int], list[Transfer]]

MessageGroups = tuple[dist.ProcessGroup, dist.ProcessGroup]
"""The first takes messages to higher ranks, the other those to lower ranks."""


def message_groups(device: torch.device) -> MessageGroups:
    """The groups of an Exchange; every rank of the world must call it."""
    ranks = list(range(dist.get_world_size()))
    upward, downward = (new_group(ranks, device=device, messages=True) for _ in range(2))
    return upward, downward


class Exchange:
    """Sends and receives the messages of one rank's programs, all between the peers of ``program``'s messages.

    ``ranks_of`` has, for each pipeline device, its ranks in this rank's pipeline: several if its stages have replicas,
    which split each micro-batch's samples in order. ``device_of`` maps (stage, pipe) to pipeline devices. A message
    consists of the tensors, in the order of ``transfers``, that its two stages exchange for one micro-batch, in the
    shapes that this rank has. If the two stages have different numbers of replicas, each pair of ranks exchanges the
    samples that both have, along the dimension in ``sample_dimensions``; a value without samples is sent only once.
    ``half_of`` belongs to a program in halves: the halves of a value are exchanged together.
    Exchanges that never have messages at the same time may share their ``groups``.
    """

    def __init__(
        self,
        program: Program,
        transfers: Sequence[Transfer],
        *,
        ranks_of: Sequence[Sequence[int]],
        device_of: Mapping[tuple[int, int], int],
        sample_dimensions: Mapping[str, int],
        half_of: Mapping[str, int] | None = None,
        device: torch.device,
        run_ahead: RunAhead,
        groups: MessageGroups | None = None,
    ) -> None:
        self.groups = groups or message_groups(device)
        self._upward, self._downward = self.groups
        self._ranks_of = ranks_of
        self._device_of = device_of
        self._sample_dimensions = sample_dimensions
        self._half_of = half_of or {}
        self._device = device
        self._run_ahead = run_ahead
        self._transfers = _by_stages(transfers)
        self._sizes: dict[int, int] = {}  # micro-batch of another size -> number of that
        self._of_sizes: list[tuple[Sequence[Transfer], _ByStages]] = []
        self._route = cache(self._new_route)
        self._local: dict[Message, list[torch.Tensor]] = {}
        self._sent: dict[Message, list[_Transmission]] = {}
        self._posted: dict[Message, list[_Transmission]] = {}
        self._connect(program)

    def set_sizes(self, sizes: Mapping[int, Sequence[Transfer]]) -> None:
        """From now on the messages of these micro-batches have the shapes of these transfers; the others the usual
        ones."""
        before, self._sizes = self._sizes, {m: self._number_of(transfers) for m, transfers in sizes.items()}
        if self._sizes != before:
            self._route.cache_clear()

    def _number_of(self, transfers: Sequence[Transfer]) -> int:
        for number, (known, _) in enumerate(self._of_sizes):
            if known is transfers:
                return number
        self._of_sizes.append((transfers, _by_stages(transfers)))
        return len(self._of_sizes) - 1

    def start(self) -> None:
        """Begin a program; the previous program has used all messages that it received."""
        assert not self._posted
        assert not self._local

    def post(self, message: Message) -> None:
        """Post the receive of ``message``, for which this allocates memory."""
        self._posted[message] = posted = []
        for leg in self._route(message).legs:
            tensors = [torch.empty(load.shape, dtype=load.dtype, device=self._device) for load in leg.loads]
            with leg.receiving:
                posted.append(leg.begin(dist.irecv, tensors))

    def send(self, message: Message, tensors: list[torch.Tensor]) -> None:
        route = self._route(message)
        if route.is_local:
            self._local[message] = tensors
            return
        self._sent[message] = sent = []
        for leg in route.legs:
            slices = tensors if route.is_direct else [load.slice_of(tensors[load.index]) for load in leg.loads]
            with leg.sending:
                sent.append(leg.begin(dist.isend, slices))

    def receive(self, message: Message) -> dict[str, torch.Tensor]:
        """The tensors of the posted ``message`` by value; computations with them wait until they have arrived.

        A gradient is missing if no peer used this rank's copy of the value.
        """
        route = self._route(message)
        if route.is_local:
            return dict(zip(route.names, self._local.pop(message), strict=True))
        arrived: dict[str, list[tuple[_Load, torch.Tensor]]] = {}
        for leg, tensors, works in self._posted.pop(message):
            for work in works:
                self._run_ahead.wait(work, leg.name)
            if route.is_direct:
                return dict(zip(route.names, tensors, strict=True))
            for load, tensor in zip(leg.loads, tensors, strict=True):
                arrived.setdefault(route.names[load.index], []).append((load, tensor))
        return {name: _joined(slices) for name, slices in arrived.items()}

    def release(self, message: Message) -> None:
        """Free a sent message, which its receivers have or are about to have."""
        for leg, _, works in self._sent.pop(message):
            for work in works:
                self._run_ahead.wait(work, leg.receiver)

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
                self.send(message, [*map(tensors.__getitem__, self._route(message).names)])

    def _connect(self, program: Program) -> None:
        """Exchange one element with each rank with which this rank exchanges messages.

        NCCL connects a pair of ranks at its first use and blocks until both sides have called. So all ranks go through
        their pairs in the same order, before any receive is posted ahead of its send: first the pairs whose lower
        pipeline device is even, then the others, so that a pipeline does not connect one pair after the other.
        """
        this = dist.get_rank()
        sends = {m for step in program.steps for m in step.sends if not self._is_local(m)}
        pairs = {(this, leg.peer) for message in sends for leg in self._route(message).legs}
        pairs |= {(leg.peer, this) for step in program.steps for m in step.posts for leg in self._route(m).legs}
        device_of_rank = {rank: device for device, ranks in enumerate(self._ranks_of) for rank in ranks}

        def order(pair: tuple[int, int]) -> tuple:
            return min(device_of_rank[rank] for rank in pair) % 2, min(pair), max(pair), pair

        for source, target in sorted(pairs, key=order):
            element = torch.zeros(1, device=self._device)
            group = self._group(source, target)
            what = f"a connection from {THIS_RANK.name(source)} to {THIS_RANK.name(target)}"
            to_peer = partial(dist.isend, element, target) if source == this else partial(dist.irecv, element, source)
            with waiting_for(what):
                work = without_pair_warning(partial(to_peer, group=group))
            assert work is not None
            wait(work, what=what)

    def _is_local(self, message: Message) -> bool:
        return self._device_of[message.source, message.pipe] == self._device_of[message.target, message.pipe]

    def _new_route(self, message: Message) -> _Route:
        """The slices of ``message`` that this rank sends or receives, by peer.

        Peers are in the order of their ranks. So where several ranks send one message to several others, all of them
        follow one common order: by sender, and for each sender by receiver.
        """
        names = [transfer.value.name for transfer in self._carried(message)]
        if self._is_local(message):
            return _Route(names, is_local=True, legs=[], is_direct=False)
        loads: dict[int, list[_Load]] = {}
        for peer, load in self._loads(message):
            loads.setdefault(peer, []).append(load)
        this = dist.get_rank()
        sends = this in self._ranks_of[self._device_of[message.source, message.pipe]]
        legs = [
            _Leg(
                peer,
                self._group(this, peer) if sends else self._group(peer, this),
                loads[peer],
                str(message),
            )
            for peer in sorted(loads)
        ]
        whole = [load.index for peer_loads in loads.values() for load in peer_loads if load.dimension is None]
        return _Route(names, is_local=False, legs=legs, is_direct=len(legs) == 1 and whole == list(range(len(names))))

    def _loads(self, message: Message) -> Iterator[tuple[int, _Load]]:
        sources = self._ranks_of[self._device_of[message.source, message.pipe]]
        targets = self._ranks_of[self._device_of[message.target, message.pipe]]
        sends, forward = dist.get_rank() in sources, message.kind is Kind.FORWARD
        these, peers = (sources, targets) if sends else (targets, sources)
        carried = self._carried(message)
        even = len(these) == len(peers)
        for parts in [[index] for index in range(len(carried))] if even else self._parts(carried):
            transfer = carried[parts[0]]
            shape = list(transfer.value.shape)
            dimension = None if even else self._sample_dimensions.get(transfer.value.name)
            length = None if dimension is None else shape[dimension] * len(these) * len(parts)
            # A gradient goes back the way that its value came.
            makers, users = (sources, targets) if forward else (targets, sources)
            for piece in pieces(length, sources=len(makers), targets=len(users), parts=len(parts)):
                if not forward:
                    piece = piece.back()
                here, there, start, part = (
                    (piece.source, piece.target, piece.start, piece.source_part)
                    if sends
                    else (piece.target, piece.source, piece.into, piece.target_part)
                )
                if these[here] != dist.get_rank():
                    continue
                if dimension is not None and piece.length is not None:
                    shape[dimension] = piece.length
                dtype = getattr(torch, transfer.value.dtype)
                yield peers[there], _Load(parts[part], tuple(shape), dtype, dimension, start)

    def _parts(self, carried: Sequence[Transfer]) -> list[list[int]]:
        """The numbers in ``carried`` of each value: its own, or its halves' in order."""
        numbers: dict[tuple[str, bool], list[int]] = {}
        for index, name in enumerate(transfer.value.name for transfer in carried):
            half = self._half_of.get(name)
            numbers.setdefault((name.removesuffix(f"_half{half}"), half is not None), []).append(index)
        return list(numbers.values())

    def _carried(self, message: Message) -> Sequence[Transfer]:
        number = self._sizes.get(message.micro_batch)
        transfers = self._transfers if number is None else self._of_sizes[number][1]
        if message.kind is Kind.FORWARD:
            return transfers[message.source, message.target]
        return [transfer for transfer in transfers[message.target, message.source] if transfer.value.differentiable]

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._upward if source < target else self._downward


def _by_stages(transfers: Sequence[Transfer]) -> _ByStages:
    by_stages: _ByStages = {}
    for transfer in transfers:
        by_stages.setdefault((transfer.source, transfer.target), []).append(transfer)
    return by_stages


def _joined(arrived: Sequence[tuple[_Load, torch.Tensor]]) -> torch.Tensor:
    """One tensor from what peers sent: samples are concatenated; several gradients of one copy are added."""
    tensors = [tensor for _, tensor in sorted(arrived, key=lambda pair: pair[0].start)]
    if len(tensors) == 1:
        return tensors[0]
    dimension = arrived[0][0].dimension
    return sum(tensors[1:], start=tensors[0]) if dimension is None else torch.cat(tensors, dimension)
