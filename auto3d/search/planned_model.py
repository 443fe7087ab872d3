"""The model that a search plans: a captured model or a list of measured layers. Both look the same to the search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import accumulate
from typing import Protocol

from auto3d.capture.graph import Graph
from auto3d.cost.layers import Layer
from auto3d.cost.times import TimesOf
from auto3d.cost.work import Work, WorkAt
from auto3d.partition.outline import Outline, outline_of
from auto3d.partition.recompute import subgraph_starts
from auto3d.partition.stage import cut
from auto3d.plan import PlanError, StagePlan
from auto3d.schedule.asynchronous import check_trainable
from auto3d.schedule.operation import Schedule
from auto3d.share import WHOLE, Share
from auto3d.tensor_placement import Split


class PlannedModel(Protocol):
    """A model to plan; ``samples`` is the number of samples that one operation runs.

    Positions, as in a Plan's stages, count the operations of the Graph at this number of samples, or the layers.
    """

    @property
    def times(self) -> TimesOf | None:
        """Measured times of the operations, if there are any."""
        ...

    def work(self, samples: int, share: Share = WHOLE) -> Work:
        """The work of ``share`` of the model; raises InputError if the model cannot be divided so."""
        ...

    def fingerprint(self, samples: int) -> str:
        """The value of ``Plan.graph`` for this number of samples."""
        ...

    def split(self, samples: int, share: Share) -> dict[str, Split]:
        """The value of ``Plan.split`` for ``share``; raises InputError if a rule is not possible."""
        ...

    def cuts(self, samples: int) -> Sequence[int]:
        """Positions between whole subgraphs, with 0 and the end of the model."""
        ...

    def outline(self, samples: int) -> Outline:
        """All possible cuts of the model, also inside subgraphs."""
        ...

    def starts(self, stage: StagePlan, samples: int) -> Sequence[int]:
        """Positions where the subgraphs of ``stage`` begin."""
        ...

    def check_trainable(
        self, schedule: Schedule, stages: Sequence[StagePlan], samples: int, *, clip_norm: float
    ) -> None:
        """Raise PlanError if the asynchronous ``schedule`` cannot train these stages."""
        ...


class PlannedGraphs:
    """A captured model: its Graph at any number of samples, with its work."""

    times: TimesOf | None = None

    def __init__(
        self,
        graph_at: Callable[[int], Graph],
        work: Callable[[Graph], Work],
        cuts: Callable[[Graph], Sequence[int]],
        split: Callable[[int, Share], dict[str, Split]],
        share_work: WorkAt | None = None,
    ) -> None:
        """``split`` has the arguments and the result of the method of that name; ``share_work`` does what ``work``
        does, for any share but the whole."""
        self.graph, self.work_of = lru_cache(None)(graph_at), work
        self._work = lru_cache(None)(lambda samples: work(self.graph(samples)))
        self._share_work = lru_cache(None)(share_work or _not_shared)
        self.cuts = lru_cache(None)(lambda samples: cuts(self.graph(samples)))
        self.outline = lru_cache(None)(lambda samples: outline_of(self.graph(samples)))
        self.split = lru_cache(None)(split)
        self._starts = lru_cache(2**12)(self._find_starts)  # the plans of a search have many stages in common

    def work(self, samples: int, share: Share = WHOLE) -> Work:
        return self._work(samples) if share == WHOLE else self._share_work(samples, share)

    def fingerprint(self, samples: int) -> str:
        return self.graph(samples).fingerprint

    def starts(self, stage: StagePlan, samples: int) -> Sequence[int]:
        return self._starts(stage.operations, samples)

    def _find_starts(self, operations: tuple[tuple[int, int], ...], samples: int) -> Sequence[int]:
        return subgraph_starts(self.graph(samples), StagePlan(operations=operations), self.cuts(samples))

    def check_trainable(
        self, schedule: Schedule, stages: Sequence[StagePlan], samples: int, *, clip_norm: float
    ) -> None:
        graph = self.graph(samples)
        check_trainable(schedule, cut(graph, stages), graph.trained, clip_norm=clip_norm)


def _not_shared(samples: int, share: Share) -> Work:
    if share.slices > 1:
        raise PlanError("schedule: this model is planned without slices of the sequence")
    raise PlanError(f"tp: found {share.tp}; this model is planned without tensor parallelism, so tp must be 1")


@dataclass(frozen=True, kw_only=True)
class PlannedLayers:
    """A model of measured layers, split as its measurements were: with the whole sequence on every rank."""

    layers: tuple[Layer, ...]
    layer_work: Callable[[int, int], Work]  # arguments: samples, tensor-parallel degree
    times: TimesOf

    def work(self, samples: int, share: Share = WHOLE) -> Work:
        if share.sequence_parallel:
            raise PlanError("sequence_parallel: found true; the layers were measured without it")
        if share.slices > 1:
            raise PlanError("schedule: a model of measured layers runs no slices of the sequence")
        return self.layer_work(samples, share.tp)

    @cached_property
    def _digest(self) -> str:
        return sha256(str(self.layers).encode()).hexdigest()

    def fingerprint(self, samples: int) -> str:
        return f"{self._digest} {samples}"

    def split(self, samples: int, share: Share) -> dict[str, Split]:
        return {}  # plans of measured layers are only predicted

    def cuts(self, samples: int) -> Sequence[int]:
        return range(len(self.layers) + 1)

    @cached_property
    def _outline(self) -> Outline:
        blocks = [number for number, layer in enumerate(self.layers) if layer.reductions > 1]
        flops = [0.0, *accumulate(layer.flops for layer in self.layers)]
        return Outline(
            positions=range(len(self.layers) + 1),
            flops=flops,
            weight_flops=flops,
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
