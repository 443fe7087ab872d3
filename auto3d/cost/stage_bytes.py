"""The bytes of one stage as the cost model counts them, and those of a device's messages."""

from collections.abc import Sequence
from dataclasses import dataclass

from auto3d.schedule.in_flight import Load
from auto3d.schedule.shape import Shape

# Those to and from one peer when a device is at its fullest; cost/memory.py counts them step by step. What a forward
# sends is among its activations, unless its stage drops these.
MESSAGES_PER_PEER = 2
MESSAGES_DROPPED = 2  # more, that recomputing stages send


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Bytes that one replica of a stage holds, of one micro-batch where they depend on it."""

    in_flight: float  # from the forward until the backward
    recomputed: float  # bytes that a recomputation adds
    deferred: float  # from the input half of a backward until the weight half
    fixed: float  # state that does not train
    working: float  # bytes that the largest single operation reads and makes
    received: float  # a message from the stage before
    sent: float  # a message to the next stage

    def of(self, load: Load) -> float:
        """Bytes of the activations of all micro-batches of ``load``."""
        return load.in_flight * self.in_flight + load.recomputed * self.recomputed + load.deferred * self.deferred


NO_BYTES = StageBytes(in_flight=0, recomputed=0, deferred=0, fixed=0, working=0, received=0, sent=0)


def message_bytes(shape: Shape, stages: Sequence[StageBytes], device: int) -> float:
    """Bytes of the messages that ``device`` holds: for each peer, several of the largest."""
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
