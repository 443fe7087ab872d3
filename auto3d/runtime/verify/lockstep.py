"""All ranks of a tensor-parallel group in one process: threads that compute one at a time.

They take turns where they wait for one another, so a process's random generator is never in use by two of them.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import torch

from auto3d.runtime.messages.tensor_group import Pending
from auto3d.runtime.process.background import start_thread

T = TypeVar("T")


class Lockstep(Generic[T]):
    """Runs a function once for each of ``shards`` shards; what they exchange stays in this process."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._turn = threading.Condition()  # the thread that holds its lock computes
        self._calls: list[_Call] = []
        self._ended = 0
        self._error: BaseException | None = None

    def run(self, function: Callable[["LockstepGroup"], T]) -> list[T]:
        """The results of all shards, in order. The first exception in a shard is raised here."""
        results: dict[int, T] = {}

        def run_shard(shard: int) -> None:
            with self._turn:
                try:
                    with torch.autograd.set_multithreading_enabled(False):
                        results[shard] = function(LockstepGroup(self, shard, self._shards))
                except BaseException as error:
                    self._error = self._error or error
                self._ended += 1
                self._turn.notify_all()

        for thread in [
            start_thread("shard", partial(run_shard, shard), end=self._end) for shard in range(self._shards)
        ]:
            thread.join()
        if self._error is not None:
            raise self._error
        return [results[shard] for shard in range(self._shards)]

    def _end(self) -> None:
        """Let all shards fail at their next collective."""
        with self._turn:
            self._error = self._error or RuntimeError("the process ends")
            self._turn.notify_all()

    def give(self, number: int, shard: int, tensor: torch.Tensor, what: str) -> "_Call":
        """Hand over what ``shard`` puts into collective number ``number``."""
        if number == len(self._calls):
            self._calls.append(_Call(what))
        call = self._calls[number]
        if call.what != what:
            raise RuntimeError(f"shard {shard} is at {what}, and another one at {call.what}")
        call.given[shard] = tensor
        if len(call.given) == self._shards:
            self._turn.notify_all()
        return call

    def take(self, call: "_Call") -> list[torch.Tensor]:
        """What all shards put into ``call``, in order."""
        self._turn.wait_for(lambda: len(call.given) == self._shards or self._ended or self._error)
        if len(call.given) < self._shards:
            raise RuntimeError(f"a shard ended without {call.what}")
        return [call.given[shard] for shard in range(self._shards)]


class _Call:
    def __init__(self, what: str) -> None:
        self.what = what
        self.given: dict[int, torch.Tensor] = {}


class LockstepGroup:
    """The TensorGroup of one shard of a Lockstep."""

    def __init__(self, lockstep: Lockstep, shard: int, shards: int) -> None:
        self.shard, self.shards = shard, shards
        self._lockstep = lockstep
        self._number = 0

    def all_reduce(self, tensor: torch.Tensor, what: str, *, maximum: bool = False) -> Pending:
        given = self._give(tensor.clone(), f"the all-reduce of {what}")

        def wait() -> torch.Tensor:
            stacked = torch.stack(given())
            return tensor.copy_(stacked.amax(0) if maximum else stacked.sum(0))

        return wait

    def all_gather(self, tensor: torch.Tensor, what: str) -> Pending:
        given = self._give(tensor.detach().clone(), f"the all-gather of {what}")
        return lambda: torch.stack(given())

    def reduce_scatter(self, stacked: torch.Tensor, what: str) -> Pending:
        given = self._give(stacked, f"the reduce-scatter of {what}")
        return lambda: torch.stack([tensor[self.shard] for tensor in given()]).sum(0)

    def _give(self, tensor: torch.Tensor, what: str) -> Callable[[], list[torch.Tensor]]:
        call = self._lockstep.give(self._number, self.shard, tensor, what)
        self._number += 1
        return lambda: self._lockstep.take(call)
