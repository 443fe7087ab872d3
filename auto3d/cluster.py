"""The cluster: its devices, nodes and links, and the placement of a Plan's ranks on them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import isfinite, prod

from auto3d.errors import InputError


class ClusterError(InputError):
    """A cluster description that makes no sense: the message names the value and what would be accepted."""


def _check(name: str, value: float, *, above_zero: bool) -> None:
    if not isfinite(value) or value < 0 or (above_zero and value == 0):
        raise ClusterError(f"{name} is {value:g}; it must be {'more than 0' if above_zero else '0 or more'}")


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A kind of device, in the precision of training. The defaults are round figures of a data-centre GPU.

    A matrix product of f FLOPs takes (f + half_flops) / (matrix_efficiency × peak_flops) seconds: small products reach
    less of the peak. Where rows of its matrices in 16 bits begin at no multiple of 16 bytes, slower kernels run. Other
    operations take their bytes / (memory_efficiency × memory_bandwidth) seconds. The device cannot start operations
    faster than the host launches them.
    """

    name: str = "device"
    peak_flops: float = 20e12  # per second
    float8_flops: float | None = None  # the same of products whose operands have 8 bits; None: there are none
    memory_bandwidth: float = 700e9  # bytes per second
    memory_bytes: float | None = None  # memory that a process may fill; None: unknown
    capability: float | None = None  # NVIDIA's compute capability; None: unknown, or no GPU of NVIDIA's
    matrix_efficiency: float = 0.6
    half_flops: float = 1e9  # a matrix product of this many FLOPs takes twice its time at full efficiency
    unaligned: tuple[tuple[int, float], ...] = ()
    """(bytes, FLOP/s of large products in 16 bits where rows begin at multiples of so many bytes, or more below 16)."""
    memory_efficiency: float = 0.75
    launch_s: float = 10e-6  # time between the launches of two operations
    collective_launch_s: float = 10e-6  # launch of a collective in a stage, for each other rank of the collective
    crossing_launch_s: float | None = None
    """``collective_launch_s`` where pipeline messages cross nodes, which takes time of the hosts; None: the same."""
    operation_s: float = 0.0  # host time for each operation of the schedule, in addition to the launches inside it
    micro_batch_s: float = 0.0  # host time for each micro-batch of a stage, in addition to its operations
    iteration_s: float = 0.0  # fixed time of each iteration: loss scale, gradient norm, data
    update_s: float | None = None  # optimizer's update of one parameter; None: computed from its memory traffic
    sync_start_s: float = 0.0  # time that the device does not compute, to start the sum of a stage's gradients
    sync_slowdown: float = 0.0  # fraction by which compute takes longer while such a sum is under way beside it

    def __post_init__(self) -> None:
        for name in ("peak_flops", "memory_bandwidth", "matrix_efficiency", "memory_efficiency"):
            _check(f"accelerator {self.name}: {name}", getattr(self, name), above_zero=True)
        not_negative = ("half_flops", "launch_s", "collective_launch_s", "operation_s", "micro_batch_s", "iteration_s")
        for name in (*not_negative, "sync_start_s", "sync_slowdown"):
            _check(f"accelerator {self.name}: {name}", getattr(self, name), above_zero=False)
        for _, rate in self.unaligned:
            _check(f"accelerator {self.name}: unaligned", rate, above_zero=True)

    def crossing(self) -> "Accelerator":
        """This accelerator in a pipeline whose messages cross nodes."""
        if self.crossing_launch_s is None:
            return self
        return replace(self, collective_launch_s=self.crossing_launch_s)

    def without_host(self) -> "Accelerator":
        """This accelerator with a host that takes no time for a pass."""
        return replace(
            self, launch_s=0.0, collective_launch_s=0.0, crossing_launch_s=None, operation_s=0.0, micro_batch_s=0.0
        )


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between the devices of a node, or of a node to the others. Its two directions are independent."""

    latency_s: float  # seconds that each message takes in addition to its transfer
    bandwidth: float  # bytes per second of one lane; a device uses one lane at a time
    lanes: int | None = None  # lanes that the devices of the node share; None: one for each device

    def __post_init__(self) -> None:
        _check("link: latency_s", self.latency_s, above_zero=False)
        _check("link: bandwidth", self.bandwidth, above_zero=True)
        if self.lanes is not None and self.lanes < 1:
            raise ClusterError(f"link: lanes is {self.lanes}; it must be 1 or more")

    def bandwidth_per_device(self, devices: int) -> float:
        """Bytes per second that each of ``devices`` devices gets while all of them use the link."""
        return self.bandwidth * min(1.0, (self.lanes or devices) / devices)


@dataclass(frozen=True, kw_only=True)
class CollectiveTimes:
    """A measured collective inside a node: ``seconds[i][j]`` is the time among ranks[i] devices, of sizes[j] bytes.

    Sizes are of the whole tensor: the sum, the gathered tensor, or the scattered tensor.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def interpolate(self, ranks: int, size: float) -> float:
        """Seconds for a tensor of ``size`` bytes: linear between measured sizes, and in proportion above them."""
        from numpy import interp  # imported here because it is slow and only needed with a profile

        largest = self.sizes[-1]
        beyond = max(1.0, size / largest)
        seconds = [interp(min(size, largest), self.sizes, row) for row in self.seconds]
        return beyond * float(interp(ranks, self.ranks, seconds))


@dataclass(frozen=True, kw_only=True)
class NodeCollectives:
    """The measured collectives of a node."""

    all_reduce: CollectiveTimes
    all_gather: CollectiveTimes
    reduce_scatter: CollectiveTimes


@dataclass(frozen=True, kw_only=True)
class BusBandwidths:
    """Measured bus bandwidths, in bytes per second, of collectives of ``size`` bytes among all devices of some nodes.

    A rank of n sends and receives (n - 1) / n of the tensor in an all-gather, and twice that in an all-reduce; the bus
    bandwidth is this divided by the time (NVIDIA's nccl-tests, PERFORMANCE.md).
    """

    size: float  # bytes of the whole tensor
    nodes: tuple[int, ...]  # rising numbers of nodes
    all_reduce: tuple[float, ...]
    all_gather: tuple[float, ...]  # also of a reduce-scatter

    def __post_init__(self) -> None:
        _check("collectives: size", self.size, above_zero=True)
        for name in ("all_reduce", "all_gather"):
            values = getattr(self, name)
            if len(values) != len(self.nodes):
                raise ClusterError(
                    f"collectives: {name} has {len(values)} values; it needs {len(self.nodes)}, one for each number of "
                    "nodes"
                )
            for value in values:
                _check(f"collectives: {name}", value, above_zero=True)
        if not self.nodes or self.nodes[0] < 1 or sorted(set(self.nodes)) != list(self.nodes):
            raise ClusterError(f"collectives: nodes is {list(self.nodes)}; it must be rising numbers from 1")

    def interpolate(self, measured: tuple[float, ...], nodes: float) -> float:
        """The value of ``measured`` at ``nodes``: a power law between two numbers of nodes, constant outside them."""
        return _power_law(self.nodes, measured, nodes)


@lru_cache(1024)  # a search asks for each of thousands of groups of ranks, most of which are alike
def _power_law(places: tuple[int, ...], values: tuple[float, ...], place: float) -> float:
    from numpy import exp, interp, log  # imported here because it is slow and only needed with measurements

    return float(exp(interp(log(place), log(places), log(values))))


INSIDE, OUTSIDE = Link(latency_s=10e-6, bandwidth=20e9), Link(latency_s=20e-6, bandwidth=10e9, lanes=1)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine. ``inside`` connects its devices to each other, and ``outside`` to other nodes (None: to none).

    ``slowdown[n - 1]`` is how many times longer a device takes while n devices of the node compute: processes on a CPU
    share its cores and memory bandwidth. Empty means that devices do not slow each other. ``handling`` is the compute
    time that a message inside the node costs its sender, and also its receiver: seconds, and seconds per byte.
    """

    devices: int
    accelerator: Accelerator = field(default_factory=Accelerator)
    inside: Link = INSIDE
    outside: Link | None = OUTSIDE
    slowdown: tuple[float, ...] = ()
    handling: tuple[float, float] = (0.0, 0.0)
    collectives: NodeCollectives | None = None  # measured inside the node; None: computed from its links
    bus: BusBandwidths | None = None  # measured among several such nodes; None: computed from their links

    def __post_init__(self) -> None:
        for number, factor in enumerate(self.slowdown, 1):
            _check(f"node: slowdown of {number} devices", factor, above_zero=True)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes in the order in which ranks fill them. Each device runs one process."""

    nodes: tuple[Node, ...]
    device: str  # "cpu" or "cuda"
    amp_mesh: tuple[int, int] | None = None  # (rows, columns) that AMP's placements tile; None: rows are nodes
    devices: int = field(init=False)
    node_of: tuple[int, ...] = field(init=False, repr=False)  # node number by device
    kind_of: tuple[int, ...] = field(init=False, repr=False)  # by node: the first node that equals it

    def __post_init__(self) -> None:
        if len(self.nodes) > 1:
            for number, node in enumerate(self.nodes):
                if node.outside is None:
                    raise ClusterError(f"cluster: node {number} has no link to the other nodes; give it one")
        node_of = tuple(number for number, node in enumerate(self.nodes) for _ in range(node.devices))
        object.__setattr__(self, "node_of", node_of)
        object.__setattr__(self, "devices", len(node_of))
        if self.amp_mesh is not None and prod(self.amp_mesh) != self.devices:
            raise ClusterError(
                f"amp_mesh: {list(self.amp_mesh)} does not have the {self.devices} devices of the cluster"
            )
        first = {node: number for number, node in reversed([*enumerate(self.nodes)])}
        object.__setattr__(self, "kind_of", tuple(map(first.__getitem__, self.nodes)))

    @property
    def memory_bytes(self) -> float | None:
        """Memory of the smallest device whose memory is known; None if none is known."""
        return self.memory_of(range(self.devices))

    def memory_of(self, devices: Iterable[int]) -> float | None:
        """Bytes that a process may fill on each of ``devices``: the least that is known; None if none is known."""
        sizes = (self.nodes[node].accelerator.memory_bytes for node in set(map(self.node_of.__getitem__, devices)))
        return min((size for size in sizes if size is not None), default=None)

    @property
    def devices_per_node(self) -> int:
        """Devices of the smallest node."""
        return min(node.devices for node in self.nodes)

    def accelerator(self, device: int) -> Accelerator:
        return self.nodes[self.node_of[device]].accelerator

    def slowest(self, devices: Iterable[int]) -> Accelerator:
        """The accelerator of ``devices`` that computes the fewest FLOPs per second."""
        nodes = dict.fromkeys(map(self.node_of.__getitem__, devices))
        return min(
            (self.nodes[node].accelerator for node in nodes), key=lambda kind: kind.peak_flops * kind.matrix_efficiency
        )


def place_ranks(*, dp: int, pp: int, tp: int = 1, replicas: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """A Plan's ``placement``: for each pipeline device, the ranks that run its stages.

    Neighbouring ranks form a tensor-parallel group; then follow the replicas and pipelines of the same stages, then the
    next pipeline device. Ranks are numbered node by node, so the heaviest traffic stays inside a node where possible
    (Megatron-LM's order: tensor before data before pipeline). ``replicas`` has the number of replicas of each pipeline
    device's stages; None: one replica each.
    """
    ends = accumulate((tp * dp * count for count in replicas or [1] * pp), initial=0)
    return tuple(tuple(range(first, end)) for first, end in pairwise(ends))
