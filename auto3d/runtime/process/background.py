"""Threads that work beside the training, and end before Python's shutdown does.

The shutdown ends a thread in the middle of a call of torch, whose C++ then aborts the process: exit code 134 after a
training that went well.
"""

import atexit
from collections.abc import Callable
from threading import Thread
from weakref import WeakKeyDictionary

END_S = 10.0  # time that a thread may take to return when the process ends

_ends: WeakKeyDictionary[Thread, Callable[[], object] | None] = WeakKeyDictionary()


def start_thread(name: str, work: Callable[[], None], end: Callable[[], object] | None = None) -> Thread:
    """Start ``work`` in a thread, for which the process waits when it ends, after a call of ``end``.

    ``end`` lets ``work`` return soon; without it, ``work`` does so by itself.
    """
    thread = Thread(target=work, name=name, daemon=True)
    _ends[thread] = end
    thread.start()
    return thread


@atexit.register
def _end_all() -> None:
    running = list(_ends.items())
    for _, end in running:
        if end is not None:
            end()
    for thread, _ in running:
        thread.join(END_S)
