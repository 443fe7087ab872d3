"""Which threads of ranks on CPUs displace others from their cores."""

import os
from contextlib import suppress


def wake_without_preemption() -> None:
    """Have a thread of this process that a message wakes wait for a free core, or the end of a time slice.

    A rank has a thread of gloo's for each process group beside the thread that computes. By default Linux lets a thread
    that wakes displace the one that runs. This is often the sender of the message, in the middle of a write, with the
    lock of the connection; and its own thread of gloo's then polls for that lock, on another core, until the sender
    runs again. SCHED_BATCH (sched(7)) is for threads that compute: they displace nobody. It applies to the calling
    thread, and to those that it starts from now on. A policy that the user has chosen stays.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with suppress(OSError):  # a container may forbid it
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
