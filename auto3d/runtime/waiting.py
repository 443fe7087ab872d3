"""Waits with the time-out of THIS_RANK; their errors say which rank waited, in which phase of training, for what."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep

import torch.distributed as dist

from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.backend_errors import is_local_failure, is_nccl_timeout

_CONNECTION_ERROR = re.compile(r"\bgloo\b|Connection (closed|reset) by peer|\bNCCL\b")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _BACKOFF = 2e-5, 1e-3, 1.5  # pauses of a poll: each pause is 1.5 times the last


class WaitTimeoutError(TimeoutError):
    """A message or a collective did not arrive in time."""


class PeerLostError(ConnectionError):
    """A rank that another rank was waiting for is gone, or has failed where it was to answer."""


class Waiting:
    """A wait for ``what``; ``waiting_for`` makes it. A class, since a generator's context takes twice the calls."""

    __slots__ = ("_start", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._start = monotonic()
        THIS_RANK.set_waiting_for(self._what)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            THIS_RANK.set_computing()
        if not isinstance(error, RuntimeError) or is_local_failure(error):
            return
        if monotonic() - self._start >= THIS_RANK.timeout_s * 0.99:
            raise timed_out(self._what) from error
        if is_nccl_timeout(error):
            raise WaitTimeoutError(
                f"{THIS_RANK} waited for {self._what} until NCCL's time-out ({_cause(error)})"
            ) from error
        raise PeerLostError(
            f"{THIS_RANK} was waiting for {self._what} when the connection broke ({_cause(error)})"
        ) from error


def waiting_for(what: str) -> Waiting:
    """Turn errors of torch.distributed inside into WaitTimeoutError or PeerLostError, which say ``what`` was awaited.

    A failure of this rank (out of memory, of its device, of its use of NCCL) is raised unchanged. What it returns can
    be entered again and again.
    """
    return Waiting(what)


@contextmanager
def waiting_up_to(seconds: float) -> Iterator[None]:
    """Inside, waits of this rank and process groups that it makes have a time-out of ``seconds``."""
    usual_s, THIS_RANK.timeout_s = THIS_RANK.timeout_s, seconds
    try:
        yield
    finally:
        THIS_RANK.timeout_s = usual_s


def deadline() -> float:
    """When a wait that begins now times out, as a time.monotonic()."""
    return monotonic() + THIS_RANK.timeout_s


def timed_out(what: str) -> WaitTimeoutError:
    """The error of a wait for ``what`` that took as long as it may."""
    return WaitTimeoutError(f"{THIS_RANK} waited {THIS_RANK.timeout_s:g} s for {what}")


@contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Raise PeerLostError if a connection breaks inside, even in a call that is not inside ``waiting_for``."""
    try:
        yield
    except RuntimeError as error:
        of_connection = isinstance(error, dist.DistError) or _CONNECTION_ERROR.search(str(error))
        if is_local_failure(error) or not of_connection:
            raise
        raise PeerLostError(f"{THIS_RANK} lost its connection to another rank ({_cause(error)})") from error


def _cause(error: RuntimeError) -> str:
    """NCCL's last warning, or else the first sentence of ``error`` without gloo's file and line."""
    text = str(error)
    cause = text.rpartition("Last error:")[2].strip() or text
    return re.sub(r"^\[.*?\] ", "", cause).splitlines()[0].split(". ")[0]


def wait(work: dist.Work, *, what: str) -> None:
    """Block this process until ``work`` is done. An error if it does not end calls it ``what``.

    If its group uses gloo, the group must have the same time-out.
    """
    with Waiting(what):
        work.wait()  # with gloo this call blocks; with NCCL only the device's queue waits
    if not work.is_completed():
        poll(work.is_completed, what=what)


def poll(is_done: Callable[[], bool], *, what: str) -> None:
    """Poll ``is_done`` with growing pauses until it returns True. Raises WaitTimeoutError, which names ``what``."""
    if is_done():
        return
    with waiting_for(what):
        end, pause_s = deadline(), _FIRST_PAUSE_S
        while not is_done():
            if monotonic() > end:
                raise timed_out(what)
            sleep(pause_s)
            pause_s = min(pause_s * _BACKOFF, _LONGEST_PAUSE_S)
