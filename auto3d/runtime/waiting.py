"""Waits that end: each has a time-out, and says who waited, where in its training, and for what."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep

import torch.distributed as dist

from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.backend_errors import is_local_failure, is_nccl_timeout

_OF_CONNECTIONS = re.compile(r"\bgloo\b|Connection (closed|reset) by peer|\bNCCL\b")

_SHORTEST_S, _LONGEST_S, _GROWTH = 2e-5, 1e-3, 1.5  # seconds between two looks, and how fast they grow


class WaitTimeoutError(TimeoutError):
    """A message or collective that did not come in time."""


class PeerLostError(ConnectionError):
    """A rank that others were waiting for is gone."""


@contextmanager
def waiting_for(what: str, timeout_s: float) -> Iterator[None]:
    """Calls of torch.distributed inside raise WaitTimeoutError or PeerLostError, which say ``what`` was waited for.

    An error that is this rank's own (out of memory, of its device, of its use of NCCL) is raised as it is.
    """
    start = monotonic()
    THIS_RANK.set_waiting_for(what)
    try:
        yield
    except RuntimeError as error:
        if is_local_failure(error):
            raise
        if monotonic() - start >= timeout_s * 0.99:
            raise WaitTimeoutError(f"{THIS_RANK} waited {timeout_s:g} s for {what}") from error
        if is_nccl_timeout(error):
            raise WaitTimeoutError(f"{THIS_RANK} waited for {what} until NCCL's time-out ({_cause(error)})") from error
        raise PeerLostError(
            f"{THIS_RANK} was waiting for {what} when the connection broke ({_cause(error)})"
        ) from error
    THIS_RANK.set_computing()


@contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Raise PeerLostError where a connection breaks inside, also in calls that ``waiting_for`` does not surround."""
    try:
        yield
    except RuntimeError as error:
        of_connections = isinstance(error, dist.DistError) or _OF_CONNECTIONS.search(str(error))
        if is_local_failure(error) or not of_connections:
            raise
        raise PeerLostError(f"{THIS_RANK} lost its connection to another rank ({_cause(error)})") from error


def _cause(error: RuntimeError) -> str:
    """The first sentence, without gloo's file and line, or NCCL's own last warning."""
    text = str(error)
    told = text.rpartition("Last error:")[2].strip() or text
    return re.sub(r"^\[.*?\] ", "", told).splitlines()[0].split(". ")[0]


def wait(work: dist.Work, *, timeout_s: float, what: str) -> None:
    """Let this process wait until ``work`` is done, which is ``what`` in the error if it does not end.

    Its group must have ``timeout_s``, too, if it is one of gloo.
    """
    with waiting_for(what, timeout_s):
        work.wait()  # with gloo it is this that waits; with NCCL only the device's queue does
    poll(work.is_completed, timeout_s=timeout_s, what=what)


def poll(is_done: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    """Ask ``is_done``, more and more seldom, until it is so; raises WaitTimeoutError, which says ``what`` it is."""
    if is_done():
        return
    with waiting_for(what, timeout_s):
        deadline, pause_s = monotonic() + timeout_s, _SHORTEST_S
        while not is_done():
            if monotonic() > deadline:
                raise WaitTimeoutError(f"{THIS_RANK} waited {timeout_s:g} s for {what}")
            sleep(pause_s)
            pause_s = min(pause_s * _GROWTH, _LONGEST_S)
