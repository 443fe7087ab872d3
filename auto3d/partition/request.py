"""What a caller asks a partition method for, and what it answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from auto3d.capture.graph import Graph
from auto3d.partition.cost import PartitionCosts
from auto3d.plan import StagePlan

BLOCKS = 32  # the number of RaNNC's blocks in its paper's experiments (section IV-A)

StageSeconds = Callable[[str, int], tuple[float, float] | None]
"""(name of a candidate stage, samples) -> seconds of its forward and its backward; None if it was not measured."""


@dataclass(frozen=True, kw_only=True)
class PartitionRequest:
    """A model to cut and the devices to cut it for. Each method reads the fields that it needs."""

    graph_at: Callable[[int], Graph]  # the model's Graph at a micro-batch size
    costs_of: Callable[[Graph], PartitionCosts]
    cuts: Sequence[
        int
    ] = ()  # positions between whole subgraphs, with 0 and the end; uniform, blocks, rannc cut elsewhere
    stages: int | None  # None: the method chooses
    micro_batch_size: int
    global_batch: int
    nodes: int
    devices_per_node: int
    any_depth: bool = False  # RaNNC: compare all numbers of stages, not only the fewest that fit
    stage_seconds: StageSeconds | None = None  # RaNNC: times of candidate stages, where some were run whole
    equal_slices: bool = False  # replicas must get equally many samples, as a Plan requires
    blocks: int = BLOCKS  # RaNNC: k, the number of blocks of which it makes stages
    smallest_micro_batch: int = 1  # RaNNC: fewest samples of a micro-batch; batch statistics may need 2

    @property
    def graph(self) -> Graph:
        return self.graph_at(self.micro_batch_size)

    @property
    def costs(self) -> PartitionCosts:
        return self.costs_of(self.graph)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Stages of a Graph, and how many devices run each stage; every device takes an equal slice of the samples."""

    stages: tuple[StagePlan, ...]
    replicas: tuple[int, ...]  # replicas of each stage, counted over all pipelines
    pipelines: int = 1  # copies of the whole pipeline
    micro_batches: int | None = None  # micro-batches of each pipeline, if the method chooses them
    schedule: str = "1f1b"  # the schedule that the method assumes
    schedule_options: dict[str, int | str] = field(default_factory=dict)
    candidates: int = 0  # candidate stages that the method compared, where it counts them
    measured_candidates: int = 0  # candidates whose times were measured; the others added up their operations
