"""What is to be planned: a captured model, or one that is known by measured layers; both look the same to a search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import accumulate
from typing import Protocol

from auto3d.capture.graph import Graph
from auto3d.cost.layers import Layer
from auto3d.cost.model import TimesOf
from auto3d.cost.work import Work
from auto3d.partition.blocks import blocks, even_bounds
from auto3d.partition.contiguous import cheapest_cuts, smallest_maximum
from auto3d.partition.recompute import subgraph_starts
from auto3d.partition.stage import check_enough, cut
from auto3d.partition.uniform import TOLERANCE, uniform
from auto3d.plan import StagePlan, stages_between
from auto3d.schedule.asynchronous import check_trainable
from auto3d.schedule.operation import Schedule


class Subject(Protocol):
    """Positions, as in a Plan's stages, are operations of the Graph at ``samples``, or layers."""

    times: TimesOf | None  # where they were measured

    def work(self, samples: int) -> Work: ...

    def fingerprint(self, samples: int) -> str:
        """What a Plan at this number of samples holds as its graph."""
        ...

    def cuts(self, samples: int) -> Sequence[int]:
        """Positions between which stages consist of whole subgraphs, with 0 and the end."""
        ...

    def stages(self, method: str, count: int, samples: int) -> tuple[StagePlan, ...]:
        """By ``uniform`` or ``blocks``, which need no costs; raises PartitionError where there are too few parts."""
        ...

    def starts(self, stage: StagePlan, samples: int) -> Sequence[int]:
        """Positions at which the subgraphs inside ``stage`` begin."""
        ...

    def check_trainable(
        self, schedule: Schedule, stages: Sequence[StagePlan], samples: int, *, clip_norm: float
    ) -> None:
        """Raise PlanError if an asynchronous ``schedule`` cannot train these stages."""
        ...


class CapturedSubject:
    """Graphs at any number of samples, and their work."""

    times = None

    def __init__(
        self,
        graph_at: Callable[[int], Graph],
        work: Callable[[Graph], Work],
        cuts: Callable[[Graph], Sequence[int]],
    ) -> None:
        self.graph, self.work_of = lru_cache(None)(graph_at), work
        self.work = lru_cache(None)(lambda samples: work(self.graph(samples)))
        self.cuts = lru_cache(None)(lambda samples: cuts(self.graph(samples)))
        self.stages = lru_cache(None)(self._stages)

    def fingerprint(self, samples: int) -> str:
        return self.graph(samples).fingerprint

    def _stages(self, method: str, count: int, samples: int) -> tuple[StagePlan, ...]:
        return {"uniform": uniform, "blocks": blocks}[method](self.graph(samples), count)

    def starts(self, stage: StagePlan, samples: int) -> Sequence[int]:
        return subgraph_starts(self.graph(samples), stage, self.cuts(samples))

    def check_trainable(
        self, schedule: Schedule, stages: Sequence[StagePlan], samples: int, *, clip_norm: float
    ) -> None:
        graph = self.graph(samples)
        check_trainable(schedule, cut(graph, stages), graph.trained, clip_norm=clip_norm)


@dataclass(frozen=True, kw_only=True)
class LayeredSubject:
    layers: tuple[Layer, ...]
    work: Callable[[int], Work]
    times: TimesOf

    @cached_property
    def _digest(self) -> str:
        return sha256(str(self.layers).encode()).hexdigest()

    def fingerprint(self, samples: int) -> str:
        return f"{self._digest} {samples}"

    def cuts(self, samples: int) -> Sequence[int]:
        return range(len(self.layers) + 1)

    def stages(self, method: str, count: int, samples: int) -> tuple[StagePlan, ...]:
        if method == "uniform":
            before = [0.0, *accumulate(layer.flops for layer in self.layers)]
            check_enough(before, count)
            anywhere = [[0] * len(before)] * count
            sent = [0.0, *(layer.output for layer in self.layers)]
            limit = smallest_maximum(before, anywhere) * (1 + TOLERANCE)
            return stages_between(cheapest_cuts(before, sent, anywhere, limit))
        heavy = [number for number, layer in enumerate(self.layers) if layer.reductions > 1]
        return stages_between(even_bounds([*heavy, heavy[-1] + 1], count, len(self.layers)))

    def starts(self, stage: StagePlan, samples: int) -> Sequence[int]:
        return [position for span in stage.operations for position in range(*span)]

    def check_trainable(
        self, schedule: Schedule, stages: Sequence[StagePlan], samples: int, *, clip_norm: float
    ) -> None:
        check_trainable(schedule, (), (), clip_norm=clip_norm)
