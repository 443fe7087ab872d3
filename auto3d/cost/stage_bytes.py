"""The bytes of one stage as the cost model counts them, and the bytes of a device's messages."""

from collections.abc import Sequence
from dataclasses import dataclass

from auto3d.schedule.in_flight import Load
from auto3d.schedule.shape import Shape

# The number of messages to and from one peer at a device's peak memory; cost/device_memory.py counts them step by step.
# Messages that a forward sends are counted as activations, unless the stage recomputes and so drops its activations.
MESSAGES_PER_PEER = 2
MESSAGES_DROPPED = 2  # additional messages per peer that a recomputing stage sends


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Bytes that one replica of a stage holds; those that depend on the batch are for one micro-batch."""

    in_flight: float  # activations held from the forward until the backward
    recomputed: float  # activations that a recomputation adds
    deferred: float  # activations held from the input half of a backward until the weight half
    fixed: float  # state that is not trained
    working: float  # inputs and results of the largest single operation
    received: float  # one message from the previous stage
    sent: float  # one message to the next stage

    def of(self, load: Load) -> float:
        """Bytes of the activations of all micro-batches in ``load``."""
        return load.in_flight * self.in_flight + load.recomputed * self.recomputed + load.deferred * self.deferred


NO_BYTES = StageBytes(in_flight=0, recomputed=0, deferred=0, fixed=0, working=0, received=0, sent=0)


def message_bytes(shape: Shape, stages: Sequence[StageBytes], device: int) -> float:
    """Bytes of the messages that ``device`` holds at its peak: for each peer, several of the largest size."""
    largest: dict[int, float] = {}
    dropped: dict[int, float] = {}
    for (stage, pipe), home in shape.device_of.items():
        if home == device:
            for other, size in ((stage - 1, stages[stage].received), (stage + 1, stages[stage].sent)):
                peer = shape.device_of.get((other, pipe), device)
                if peer != device:
                    largest[peer] = max(largest.get(peer, 0.0), size)
                    if other > stage and stage in shape.recompute:
                        dropped[peer] = max(dropped.get(peer, 0.0), size)
    return MESSAGES_PER_PEER * sum(largest.values()) + MESSAGES_DROPPED * sum(dropped.values())
