"""Point-to-point exchange between stages: receives posted ahead, sends that never block.

One process group carries the messages to higher ranks and another those to lower ones, and each pair of ranks uses them
in the sender's order. So nothing depends on tags, which NCCL lacks, and opposite directions never queue behind each
other.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from auto3d.partition.stage import Transfer
from auto3d.runtime.lowering import Message, Program
from auto3d.runtime.waiting import wait, waiting_for
from auto3d.runtime.whereabouts import HERE
from auto3d.runtime.world import new_group
from auto3d.schedule.operation import Kind

POSTED_AHEAD = 2  # receives that wait for each peer: one being filled while the one before is used


@dataclass
class _Posted:
    message: Message
    tensors: list[torch.Tensor]
    works: list[dist.Work]


class Exchange:
    """Sends and receives the messages of one rank's Program.

    ``rank_of`` maps pipeline devices to ranks of this replica, ``device_of`` (stage, pipe) to devices. A message is
    the list of tensors, in the order of ``transfers``, that its two stages exchange for one micro-batch.
    """

    def __init__(
        self,
        program: Program,
        transfers: Sequence[Transfer],
        *,
        rank_of: Sequence[int],
        device_of: Mapping[tuple[int, int], int],
        device: torch.device,
        timeout_s: float,
    ) -> None:
        ranks = list(range(dist.get_world_size()))
        self._upward, self._downward = new_group(ranks, timeout_s), new_group(ranks, timeout_s)
        self._program = program
        self._rank_of = rank_of
        self._device_of = device_of
        self._device = device
        self._timeout_s = timeout_s
        self._transfers: dict[tuple[int, int], list[Transfer]] = {}
        for transfer in transfers:
            self._transfers.setdefault((transfer.source, transfer.target), []).append(transfer)
        self._local: dict[Message, list[torch.Tensor]] = {}
        self._sent: dict[Message, _Posted] = {}
        self._posted: dict[int, deque[_Posted]] = {}
        self._to_post: dict[int, deque[Message]] = {}
        self._connect()

    def values(self, message: Message) -> list[str]:
        """Names of the values that ``message`` carries, activations or gradients of them, in order."""
        return [transfer.value.name for transfer in self._carried(message)]

    def start_iteration(self) -> None:
        """Post the first receives from every peer."""
        self._to_post = {peer: deque(messages) for peer, messages in self._program.arrivals.items()}
        self._posted = {peer: deque() for peer in self._to_post}
        for peer in self._to_post:
            self._post(peer)

    def send(self, message: Message, tensors: list[torch.Tensor]) -> None:
        peer = self._rank_of[self._device_of[message.target, message.pipe]]
        if peer == dist.get_rank():
            self._local[message] = tensors
            return
        group = self._group(dist.get_rank(), peer)
        with waiting_for(f"the receiver of {message} ({HERE.name(peer)})", self._timeout_s):
            works = [dist.isend(tensor, peer, group=group) for tensor in tensors]
        self._sent[message] = _Posted(message, tensors, works)

    def receive(self, message: Message) -> list[torch.Tensor]:
        """The tensors of ``message``; waits for them."""
        peer = self._device_of[message.source, message.pipe]
        if self._rank_of[peer] == dist.get_rank():
            return self._local.pop(message)
        posted = self._posted[peer]
        while all(entry.message != message for entry in posted):  # a schedule may consume out of the sender's order
            self._post_next(peer)
        entry = next(entry for entry in posted if entry.message == message)
        for work in entry.works:
            wait(work, timeout_s=self._timeout_s, what=f"{message} ({HERE.name(self._rank_of[peer])})")
        posted.remove(entry)
        self._post(peer)
        return entry.tensors

    def release(self, message: Message) -> None:
        """Forget a sent message; its receiver has it, or is about to."""
        entry = self._sent.pop(message)
        peer = self._rank_of[self._device_of[message.target, message.pipe]]
        for work in entry.works:
            wait(work, timeout_s=self._timeout_s, what=f"the receiver of {message} ({HERE.name(peer)})")

    def end_iteration(self) -> None:
        for message in list(self._sent):
            self.release(message)

    def _connect(self) -> None:
        """Send one element to, and receive one from, each rank that this one exchanges with.

        NCCL makes a connection at the first use of a pair, and blocks until the other side does too: so all ranks go
        through their pairs in one order, before any receive is posted ahead of its send.
        """
        own = dist.get_rank()
        sends = {self._rank_of[self._device_of[m.target, m.pipe]] for step in self._program.steps for m in step.sends}
        pairs = {(own, peer) for peer in sends} | {(self._rank_of[peer], own) for peer in self._program.arrivals}
        for source, target in sorted(pairs, key=lambda pair: (min(pair), max(pair), pair)):
            if source == target:
                continue
            element = torch.zeros(1, device=self._device)
            group = self._group(source, target)
            what = f"a connection from {HERE.name(source)} to {HERE.name(target)}"
            with waiting_for(what, self._timeout_s):
                work = (
                    dist.isend(element, target, group=group)
                    if source == own
                    else dist.irecv(element, source, group=group)
                )
            wait(work, timeout_s=self._timeout_s, what=what)

    def _post(self, peer: int) -> None:
        while len(self._posted[peer]) < POSTED_AHEAD and self._to_post[peer]:
            self._post_next(peer)

    def _post_next(self, peer: int) -> None:
        message = self._to_post[peer].popleft()
        rank = self._rank_of[peer]
        group = self._group(rank, dist.get_rank())
        tensors = [
            torch.empty(transfer.value.shape, dtype=getattr(torch, transfer.value.dtype), device=self._device)
            for transfer in self._carried(message)
        ]
        with waiting_for(f"{message} ({HERE.name(rank)})", self._timeout_s):
            works = [dist.irecv(tensor, rank, group=group) for tensor in tensors]
        self._posted[peer].append(_Posted(message, tensors, works))

    def _carried(self, message: Message) -> list[Transfer]:
        if message.kind is Kind.FORWARD:
            return self._transfers[message.source, message.target]
        return [
            transfer for transfer in self._transfers[message.target, message.source] if transfer.value.differentiable
        ]

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._upward if source < target else self._downward
