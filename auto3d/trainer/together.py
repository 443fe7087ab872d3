"""Calls that all ranks must make together: a call of one rank alone is an error at once, not after a time-out."""

from datetime import timedelta
from time import monotonic

import torch.distributed as dist
from torch.distributed import distributed_c10d

from auto3d.errors import InputError
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.waiting import deadline, timed_out

ENDED = "has come to the end of its script"
_LOOK_S = 0.2  # how long a rank waits for the others before it looks where they are


class Together:
    """This rank's place in the sequence of calls that all ranks make together, told by the store where they met."""

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        self._calls = 0  # calls that this rank has made since the ranks met
        self._marks = 0  # places that it has passed since the last call

    def mark(self, what: str) -> None:
        """Tell the other ranks that this one ``what``, such as "goes on with step 3"; it waits for none."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            store = self._met()
            self._marks += 1
            store.set(_place(dist.get_rank()), f"{self._calls} {self._marks} {what}")

    def call(self, what: str, timeout_s: float) -> None:
        """Wait until all ranks call ``what``; waits that follow in it have its time-out, too.

        Raises InputError if another rank calls something else, or cannot come.
        """
        THIS_RANK.timeout_s = timeout_s
        if not dist.is_initialized():
            raise InputError(
                f"{what}: the connections between the ranks are closed, as Trainer.end() does; call it before that"
            )
        size, rank = dist.get_world_size(), dist.get_rank()
        if size == 1:
            return
        store = self._met()
        keys = [f"auto3d/call/{self._calls}/{other}" for other in range(size)]
        store.set(keys[rank], what)
        end = deadline()
        while not _are_there(store, keys):
            missing = [other for other in range(size) if not store.check([keys[other]])]
            for other in missing:
                if (passed := self._passed(store, other)) is not None:
                    raise _alone(what, other, passed)
            if missing and monotonic() > end:
                raise timed_out(f"rank {missing[0]} to call {what} too")
        for other, called in enumerate(store.multi_get(keys)):
            if called.decode() != what:
                raise _alone(what, other, f"calls {called.decode()}")
        if self._calls:
            store.delete_key(f"auto3d/call/{self._calls - 1}/{rank}")  # all ranks have read it
        self._calls, self._marks = self._calls + 1, 0

    def _met(self) -> dist.Store:
        """The store by which the ranks have met."""
        store = distributed_c10d._get_default_store()
        if store is not self._store:
            self._store, self._calls, self._marks = store, 0, 0
        return store

    def _passed(self, store: dist.Store, rank: int) -> str | None:
        """What ``rank`` does, if it is past the place where it could make this rank's call."""
        if not store.check([_place(rank)]):
            return None
        calls, marks, what = store.get(_place(rank)).decode().split(" ", 2)
        is_past = int(calls) == self._calls and (int(marks) > self._marks or what == ENDED)
        return what if is_past else None


def _alone(what: str, rank: int, other: str) -> InputError:
    return InputError(
        f"{what}: rank {dist.get_rank()} calls it, and rank {rank} {other}; all ranks must call it, because each has a "
        "part of the model: call it outside of `if trainer.is_world_process_zero()`; rank 0 alone writes"
    )


def _are_there(store: dist.Store, keys: list[str]) -> bool:
    """Whether all ``keys`` are set, after waiting a little."""
    try:
        store.wait(keys, timedelta(seconds=_LOOK_S))
    except RuntimeError:  # a time-out of the store; what else is wrong with it, the next call meets too
        return False
    return True


def _place(rank: int) -> str:
    return f"auto3d/place/{rank}"


TOGETHER = Together()
