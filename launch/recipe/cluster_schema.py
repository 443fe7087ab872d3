"""The keys of a cluster: nodes, links and accelerators."""

from dataclasses import dataclass
from typing import Any

from auto3d.cost.systems import SYSTEMS
from auto3d.plan import AUTO3D
from launch.recipe.schema_key import LARGEST_NODE, LARGEST_NODES, key


@dataclass
class LinkRecipe:
    gbit_per_s: float | None = key(
        None,
        "bandwidth of one lane in each direction, in Gbit/s; none: the usual one of the accelerator, with its lanes; "
        "100 without an accelerator and on CPUs",
        least=1e-6,
    )
    latency_us: float | None = key(
        None, "latency of a message, in microseconds; none: as for gbit_per_s, 20 without an accelerator", least=0
    )
    lanes: int | None = key(
        None,
        "lanes that the devices of a node share; none: one per device, or those of the accelerator's bandwidth",
        least=1,
    )


@dataclass
class CollectivesRecipe:
    """Measured bus bandwidths of collectives among all devices of some nodes, a bandwidth for each number of nodes."""

    megabytes: float = key(256.0, "size of the measured tensors, in MB", least=1e-6)
    nodes: list[int] = key([], "numbers of nodes, rising", least=1)
    all_reduce_gb_per_s: list[float] = key([], "bus bandwidth of an all-reduce, in GB/s", least=1e-6)
    all_gather_gb_per_s: list[float] = key([], "bus bandwidth of an all-gather, in GB/s", least=1e-6)


@dataclass
class NodesRecipe:
    nodes: int = key(1, "number of machines", least=1, below=LARGEST_NODES)
    devices_per_node: int = key(
        4, "ranks per machine: one per GPU, or as many as a CPU should run", least=1, below=LARGEST_NODE
    )
    accelerator: str | None = key(
        None, "kind of device: a file of recipes/accelerators/; none: round figures of a data-centre GPU"
    )
    inside: LinkRecipe = key(LinkRecipe, "links between the devices of a node")
    outside: LinkRecipe | None = key(LinkRecipe, "links from a node to the others; none: there are none")
    collectives: CollectivesRecipe | None = key(
        None, "measured bus bandwidths of collectives of large tensors; none: they follow from the links"
    )


@dataclass
class AcceleratorRecipe:
    """The keys of a file of recipes/accelerators/."""

    inside: LinkRecipe | None = key(
        None, "usual link between the devices of a node, for clusters that give none; none: round figures"
    )
    outside: LinkRecipe | None = key(
        None, "usual links from a node to the others, for clusters that give none; none: round figures"
    )
    peak_tflops: dict[str, float] = key({}, "peak speed of matrix products in TFLOP/s, by precision")
    float8_tflops: float | None = key(
        None,
        "the same of products whose operands have 8 bits, for predictions in float8; none: it has no such units",
        least=0.001,
    )
    memory_gib: float | None = key(None, "memory that a process may fill, in GiB; none: unknown", least=0.001)
    memory_gb_per_s: float = key(700.0, "memory bandwidth, in GB/s", least=1e-6)
    compute_capability: float | None = key(
        None,
        "NVIDIA's compute capability, such as 9.0, by which torch sizes the workspaces of cuBLAS that predicted memory "
        "then has; none: it has none",
        least=1,
    )
    matrix_efficiency: Any = key(
        0.6,
        "fraction of the peak speed that large matrix products reach; one number, or one by precision",
        least=0.001,
        most=1,
        per_precision=True,
    )
    half_gflops: Any = key(
        1.0,
        "GFLOP of a matrix product that is so small that it reaches half of that fraction; one number, or one by "
        "precision",
        least=0,
        per_precision=True,
    )
    tflops_at_2_bytes: float | None = key(
        None,
        "TFLOP/s of large products in 16 bits where rows of their matrices begin at multiples of 2 bytes only, as with "
        "a vocabulary of 50,257; none: the speed of others",
        least=0.001,
    )
    tflops_at_4_bytes: float | None = key(
        None, "the same where they begin at multiples of 4 or 8 bytes, and not of 16", least=0.001
    )
    memory_efficiency: float = key(0.75, "fraction of the memory bandwidth that operations reach", least=0.001, most=1)
    launch_us: float = key(10.0, "microseconds from the launch of one operation to the launch of the next", least=0)
    collective_launch_us: float = key(
        10.0, "microseconds that a collective inside a stage takes for each other rank that it waits for", least=0
    )
    crossing_launch_us: float | None = key(
        None, "collective_launch_us in pipelines whose messages cross nodes; none: the same", least=0
    )
    micro_batch_us: float = key(
        0.0, "microseconds of host time per micro-batch of a stage, in addition to its operations", least=0
    )
    iteration_ms: float = key(0.0, "milliseconds that every iteration takes in addition, whatever its size", least=0)
    sync_start_ms: float = key(
        0.0, "milliseconds of compute that a device loses when it starts the sum of a stage's gradients", least=0
    )
    sync_slowdown: float = key(
        0.0,
        "fraction by which compute takes longer while a sum of gradients runs beside it: at 0.1, 1.1 times as long",
        least=0,
    )
    fitted_to: str = key(
        "",
        "system on whose iterations these figures were fitted; empty: they are those of a data sheet or of single "
        "operations",
        choices=("", AUTO3D, *SYSTEMS),
    )


FIGURES = {
    "memory_efficiency": ("memory_efficiency", 1.0),
    "launch_s": ("launch_us", 1e6),
    "collective_launch_s": ("collective_launch_us", 1e6),
    "crossing_launch_s": ("crossing_launch_us", 1e6),
    "micro_batch_s": ("micro_batch_us", 1e6),
    "iteration_s": ("iteration_ms", 1e3),
    "sync_start_s": ("sync_start_ms", 1e3),
    "sync_slowdown": ("sync_slowdown", 1.0),
}
"""Field of an Accelerator -> the key that says it, and how many of the key's units are one of the field's."""


@dataclass
class ClusterRecipe(NodesRecipe):
    more: list[NodesRecipe] = key([], "more nodes, of other kinds")
    device: str = key("cpu", "type of device that a rank computes on", choices=("cpu", "cuda"))
    memory_gib: float | None = key(
        None,
        "memory that a process may fill on each device, in GiB; plans that need more are refused; none: memory_gib of "
        "each node's accelerator, which is usable memory and not the data sheet's figure",
        least=0.001,
    )
