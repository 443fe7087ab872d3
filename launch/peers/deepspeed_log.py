"""DeepSpeed's communication log (deepspeed.comm), as the calls of one rank per iteration.

Its own summary cannot be used as it is. DeepSpeed 0.19.8 never resets its timers, so the latency of a call includes
the times of all earlier calls of the same operation; and it waits for an asynchronous call by synchronising the device,
which on a CPU waits for nothing. Here each call has its own latency, until it has ended.
"""

from typing import Any

import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.utils.comms_logging import CommsLogger

from auto3d.runtime.measurement import CommunicationCalls

MS_PER_S = 1000.0


class CallLog(CommsLogger):
    """The log, with the latency of each call alone."""

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        super().append(raw_name, record_name, latency, msg_size)
        comm.timers(record_name).reset()


class BlockingBackend:
    """A backend of DeepSpeed whose asynchronous calls return when they have ended."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._backend, name)
        if not callable(attribute):
            return attribute

        def call(*arguments: Any, **named: Any) -> Any:
            handle = attribute(*arguments, **named)
            if isinstance(handle, dist.Work):
                handle.wait()
            return handle

        return call


def start_log() -> CommsLogger:
    """Log all communication of DeepSpeed in this process from now on; its calls block, so they are slower."""
    comm.comms_logger = CallLog()
    comm.cdb = BlockingBackend(comm.cdb)
    comm.configure(enabled=True, prof_all=True)
    return comm.comms_logger


def read_log(log: CommsLogger, iterations: int) -> list[CommunicationCalls]:
    """The calls that ``log`` has, per iteration of the ``iterations`` that it covers, by operation."""
    calls = []
    for operation, by_size in sorted(log.get_raw_data().items()):
        sizes = [(size, count, latencies) for size, (count, latencies, *_) in by_size.items()]
        calls.append(
            CommunicationCalls(
                operation=operation,
                calls=sum(count for _, count, _ in sizes) / iterations,
                message_bytes=sum(size * count for size, count, _ in sizes) / iterations,
                seconds=sum(sum(latencies) for _, _, latencies in sizes) / MS_PER_S / iterations,
            )
        )
    return calls
