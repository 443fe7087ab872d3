"""The cluster: its devices, and where the ranks of a Plan are placed on them."""

from dataclasses import dataclass


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


def place_ranks(*, dp: int, pp: int) -> tuple[tuple[int, ...], ...]:
    """``placement[device][replica]``: replicas of one stage get neighbouring ranks, stages follow each other.

    Ranks are numbered node by node, so the gradient all-reduce, the larger traffic, stays inside a node where it can
    (the order of Megatron-LM: data before pipeline).
    """
    return tuple(tuple(range(device * dp, (device + 1) * dp)) for device in range(pp))
