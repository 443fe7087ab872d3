"""The problem that a partition method solves when it is asked for a number of stages."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from auto3d.capture.graph import Graph
from auto3d.partition.cost import PartitionCosts
from auto3d.partition.outline import Outline, outline_of
from auto3d.partition.stage import crossing_bytes, possible_cuts


class StageProblem(Protocol):
    """A model to cut into ``stages`` stages, and what they would cost.

    ``outline`` has all possible cuts of the model. The other sequences have an entry for each of ``cuts``, the cuts
    between whole subgraphs. Everything is computed when a method first asks for it.
    """

    @property
    def stages(self) -> int: ...

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each pipeline runs in one iteration."""
        ...

    @property
    def outline(self) -> Outline: ...

    @property
    def cuts(self) -> Sequence[int]:
        """Positions between whole subgraphs, with 0 and the end of the model."""
        ...

    @property
    def before(self) -> tuple[tuple[float, ...], ...]:
        """Per stage, the seconds of one micro-batch before each cut on the fastest device: forward, backward, and what
        this stage recomputes. Stages that recompute alike have one object."""
        ...

    @property
    def messages(self) -> tuple[float, ...]:
        """Seconds that messages of one micro-batch take at each cut: the activations and their gradient."""
        ...

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speed of each stage's device: on a device of speed 0.5, a stage takes twice the seconds of ``before``."""
        ...

    @property
    def earliest(self) -> tuple[tuple[int, ...], ...] | None:
        """The memory limit. ``earliest[stage][last]`` is the number of the first cut at which ``stage`` may begin if it
        ends at cut ``last`` and has to fit its devices; None: every stage fits. Where no partition that fits has such a
        stage, it is any number with which a row never falls and no column rises."""
        ...

    @property
    def memory_bytes(self) -> float:
        """Memory of the smallest device, for messages; infinite if unknown."""
        ...


@dataclass(frozen=True, kw_only=True)
class GraphProblem:
    """A captured model on equal devices that run 1F1B. ``cuts`` defaults to all possible cuts.

    Stage s holds its weights with gradients and optimizer state, and the activations of the D - s micro-batches that
    1F1B keeps in flight there.
    """

    graph: Graph
    costs: PartitionCosts
    stages: int
    micro_batches: int = 1
    cuts: Sequence[int] = ()
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.cuts:
            object.__setattr__(self, "cuts", possible_cuts(self.graph))
        if not self.speeds:
            object.__setattr__(self, "speeds", (1.0,) * self.stages)

    @cached_property
    def outline(self) -> Outline:
        return outline_of(self.graph)

    @cached_property
    def before(self) -> tuple[tuple[float, ...], ...]:
        both = zip(self.costs.forward_s, self.costs.backward_s, strict=True)
        seconds = [0.0, *accumulate(forward + backward for forward, backward in both)]
        return (tuple(seconds[position] for position in self.cuts),) * self.stages

    @cached_property
    def messages(self) -> tuple[float, ...]:
        crossing = crossing_bytes(self.graph)
        return tuple(2 * self.costs.message_s(crossing[position]) for position in self.cuts)

    @cached_property
    def earliest(self) -> tuple[tuple[int, ...], ...] | None:
        if self.memory_bytes == float("inf"):
            return None
        return tuple(self._earliest(in_flight=self.stages - stage) for stage in range(self.stages))

    @property
    def memory_bytes(self) -> float:
        return self.costs.memory_bytes

    def _earliest(self, *, in_flight: int) -> tuple[int, ...]:
        """For each cut, the first cut at which a stage may begin that ends there and fits a device.

        A window moves over the operations. It counts each parameter and each kept tensor once.
        """
        graph, costs, cuts = self.graph, self.costs, self.cuts
        sizes = {value.name: value.bytes for node in graph.nodes for value in node.outputs}
        sizes |= {name: value.bytes for name, value in graph.inputs.items()}
        users: Counter[str] = Counter()  # operations of the window that hold each tensor
        used = 0.0
        copies = in_flight * costs.activation_factor

        def change(position: int, by: int) -> None:
            nonlocal used
            node = graph.nodes[position]
            used += by * copies * node.saved_bytes
            for name in (*node.saves, *node.state):
                users[name] += by
                if users[name] == (1 if by > 0 else 0):
                    state = graph.parameters.get(name)
                    used += by * (costs.state_factor * state.bytes if state else copies * sizes.get(name, 0))

        starts = [0]
        start = 0
        for last in range(1, len(cuts)):
            for position in range(cuts[last - 1], cuts[last]):
                change(position, 1)
            while used > costs.memory_bytes and start < last:
                for position in range(cuts[start], cuts[start + 1]):
                    change(position, -1)
                start += 1
            starts.append(start)
        return tuple(starts)
