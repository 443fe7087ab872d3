"""The cluster: its devices, nodes and links, and where the ranks of a Plan are placed on them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import isfinite

from auto3d.errors import InputError


class ClusterError(InputError):
    """A cluster that cannot be: the message names the part and what it takes."""


def _check(what: str, value: float, *, above_zero: bool) -> None:
    if not isfinite(value) or value < 0 or (above_zero and value == 0):
        raise ClusterError(f"{what} is {value:g}; it must be {'more than 0' if above_zero else '0 or more'}")


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A kind of device, in the precision that training uses. The defaults are round figures of a data-centre GPU.

    A matrix product of f FLOPs takes (f + half_flops) / (matrix_efficiency × peak_flops): small ones reach less of the
    peak. What else an operation does takes its bytes / (memory_efficiency × memory_bandwidth). The device cannot start
    operations faster than they are launched.
    """

    name: str = "device"
    peak_flops: float = 20e12  # per second
    memory_bandwidth: float = 700e9  # bytes per second
    memory_bytes: float | None = None  # that a process may fill, where it is known
    matrix_efficiency: float = 0.6
    half_flops: float = 1e9  # a product as small as this takes twice its time at full efficiency
    memory_efficiency: float = 0.75
    launch_s: float = 10e-6  # from the launch of one operation to that of the next
    collective_launch_s: float = 10e-6  # of a collective in a stage, for each other rank that it waits for
    micro_batch_s: float = 0.0  # of the host for each micro-batch of a stage, beside its operations
    iteration_s: float = 0.0  # of each iteration, whatever its size: loss scale, norm, data
    update_s: float | None = None  # of the optimizer's update of one parameter; None: what its traffic takes

    def __post_init__(self) -> None:
        for name in ("peak_flops", "memory_bandwidth", "matrix_efficiency", "memory_efficiency"):
            _check(f"accelerator {self.name}: {name}", getattr(self, name), above_zero=True)
        for name in ("half_flops", "launch_s", "collective_launch_s", "micro_batch_s", "iteration_s"):
            _check(f"accelerator {self.name}: {name}", getattr(self, name), above_zero=False)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects the devices of a node, or a node to the others. One direction does not slow the other."""

    latency_s: float  # of a message
    bandwidth: float  # bytes per second, of one lane; a device uses one at a time
    lanes: int | None = None  # of all devices of the node together; None: one for each device

    def __post_init__(self) -> None:
        _check("link: latency_s", self.latency_s, above_zero=False)
        _check("link: bandwidth", self.bandwidth, above_zero=True)
        if self.lanes is not None and self.lanes < 1:
            raise ClusterError(f"link: lanes is {self.lanes}; it must be 1 or more")

    def bandwidth_per_device(self, devices: int) -> float:
        """Bytes per second that each of so many devices gets which use the link at a time."""
        return self.bandwidth * min(1.0, (self.lanes or devices) / devices)


@dataclass(frozen=True, kw_only=True)
class AllReduceTimes:
    """Measured all-reduces inside a node: ``seconds[i][j]`` among ranks[i] devices, of sizes[j] bytes each."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def interpolate(self, ranks: int, size: float) -> float:
        """Linear between what was measured, and in proportion to the size beyond the largest."""
        from numpy import interp  # slow to import, and needed only where a profile is

        largest = self.sizes[-1]
        beyond = max(1.0, size / largest)
        each = [interp(min(size, largest), self.sizes, row) for row in self.seconds]
        return beyond * float(interp(ranks, self.ranks, each))


INSIDE, OUTSIDE = Link(latency_s=10e-6, bandwidth=20e9), Link(latency_s=20e-6, bandwidth=10e9, lanes=1)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine. ``inside`` connects its devices; ``outside`` connects it to other nodes, None: to none.

    ``slowdown[n - 1]`` is how much longer a device takes while n of the node's compute: processes on a CPU share its
    cores and its memory's bandwidth. Nothing: they share nothing. ``handling`` is what a message inside the node takes
    of the compute of its sender, and of its receiver: seconds, and seconds for each byte.
    """

    devices: int
    accelerator: Accelerator = field(default_factory=Accelerator)
    inside: Link = INSIDE
    outside: Link | None = OUTSIDE
    slowdown: tuple[float, ...] = ()
    handling: tuple[float, float] = (0.0, 0.0)
    all_reduce: AllReduceTimes | None = None  # inside the node, where it was measured; None: what its links take

    def __post_init__(self) -> None:
        for number, factor in enumerate(self.slowdown, 1):
            _check(f"node: slowdown of {number} devices", factor, above_zero=True)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes in the order in which ranks fill them; a device is one process's processor."""

    nodes: tuple[Node, ...]
    device: str  # "cpu" or "cuda"
    devices: int = field(init=False)
    node_of: tuple[int, ...] = field(init=False, repr=False)  # of each device

    def __post_init__(self) -> None:
        if len(self.nodes) > 1:
            for number, node in enumerate(self.nodes):
                if node.outside is None:
                    raise ClusterError(f"cluster: node {number} has no link to the other nodes; give it one")
        homes = tuple(number for number, node in enumerate(self.nodes) for _ in range(node.devices))
        object.__setattr__(self, "node_of", homes)
        object.__setattr__(self, "devices", len(homes))

    @property
    def memory_bytes(self) -> float | None:
        """Of the smallest device, as far as it is known."""
        return self.memory_of(range(self.devices))

    def memory_of(self, devices: Iterable[int]) -> float | None:
        """Bytes that a process may fill on each of ``devices``: those of the smallest; None where none is known."""
        kinds = {self.accelerator(device) for device in devices}
        return min((kind.memory_bytes for kind in kinds if kind.memory_bytes is not None), default=None)

    @property
    def devices_per_node(self) -> int:
        """Of the smallest node."""
        return min(node.devices for node in self.nodes)

    def accelerator(self, device: int) -> Accelerator:
        return self.nodes[self.node_of[device]].accelerator

    def slowest(self, devices: Iterable[int]) -> Accelerator:
        """The kind among those of ``devices`` that computes the least per second."""
        kinds = dict.fromkeys(self.accelerator(device) for device in devices)
        return min(kinds, key=lambda kind: kind.peak_flops * kind.matrix_efficiency)


def place_ranks(*, dp: int, pp: int, tp: int = 1, replicas: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """A Plan's ``placement``: ranks of one tensor-parallel group are neighbours, then replicas of one stage, then
    stages.

    Ranks are numbered node by node, so the largest traffic stays inside a node where it can (the order of Megatron-LM:
    tensor before data before pipeline). ``replicas`` are those of each device's stages; None: one.
    """
    ends = accumulate((tp * dp * number for number in replicas or [1] * pp), initial=0)
    return tuple(tuple(range(first, end)) for first, end in pairwise(ends))
