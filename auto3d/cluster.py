"""The cluster: its devices, and where the ranks of a Plan are placed on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """``nodes`` equal nodes with ``devices_per_node`` devices each; a device is one process's processor."""

    nodes: int
    devices_per_node: int
    device: str  # "cpu" or "cuda"
    memory_bytes: float | None = None  # of each device, where it is known

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node


def place_ranks(*, dp: int, pp: int, replicas: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """A Plan's ``placement``: replicas of one stage get neighbouring ranks, stages follow each other.

    Ranks are numbered node by node, so the gradient all-reduce, the larger traffic, stays inside a node where it can
    (the order of Megatron-LM: data before pipeline). ``replicas`` are those of each device's stages; None: one.
    """
    ends = accumulate((dp * number for number in replicas or [1] * pp), initial=0)
    return tuple(tuple(range(first, end)) for first, end in pairwise(ends))
