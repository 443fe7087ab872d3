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
from auto3d.partition.outline import Outline, outline_of
from auto3d.partition.recompute import subgraph_starts
from auto3d.partition.stage import cut
from auto3d.plan import StagePlan
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

    def outline(self, samples: int) -> Outline:
        """All cuts that the model has, whole subgraphs or not."""
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
        self.outline = lru_cache(None)(lambda samples: outline_of(self.graph(samples)))

    def fingerprint(self, samples: int) -> str:
        return self.graph(samples).fingerprint

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

    @cached_property
    def _outline(self) -> Outline:
        blocks = [number for number, layer in enumerate(self.layers) if layer.reductions > 1]
        return Outline(
            positions=range(len(self.layers) + 1),
            flops=[0.0, *accumulate(layer.flops for layer in self.layers)],
            sent=[0.0, *(layer.output for layer in self.layers)],
            block_starts=[*blocks, blocks[-1] + 1] if blocks else [],
        )

    def outline(self, samples: int) -> Outline:
        return self._outline

    def starts(self, stage: StagePlan, samples: int) -> Sequence[int]:
        return [position for span in stage.operations for position in range(*span)]

    def check_trainable(
        self, schedule: Schedule, stages: Sequence[StagePlan], samples: int, *, clip_norm: float
    ) -> None:
        check_trainable(schedule, (), (), clip_norm=clip_norm)
