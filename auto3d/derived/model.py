"""A model as one rank runs it that has a share of its work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from auto3d.capture.model import CapturedModel
from auto3d.plan import StagePlan, stages_at
from auto3d.share import Share
from auto3d.tensor_placement import Split, TensorPlacement


@dataclass(frozen=True, kw_only=True)
class Derived:
    """What a rank with ``share`` of the model ``whole`` runs.

    With shards, it is the same program on every rank of a tensor-parallel group, on tensors of its own: the operations
    of ``whole`` under their names, with local shapes, and between them the conversions of tensor/collectives.py.

    With slices, it is one program for each slice of the sequence, in order. A slice computes what ``whole`` computes at
    its places of the sequence, from its own values and from the keys and values of attention that the slices before it
    had. So forwards go from the first slice to the last, and backwards from the last to the first. The loss of a slice
    is the mean over its own targets.

    All programs have the state of ``whole``, under its names, and take all of its inputs.
    """

    whole: CapturedModel
    share: Share
    programs: tuple[CapturedModel, ...]  # one program, or one per slice
    positions: tuple[tuple[int, ...], ...]
    """Per program, for each node of its Graph the position in the whole Graph of the operation that it belongs to, in
    ascending order. A conversion belongs to the operation whose result it converts, or that needs its result."""
    placements: Mapping[str, TensorPlacement]
    """Placement of every parameter, buffer and constant of the model, by its name. With shards also of every value, as
    the last slice holds it."""
    drawn_per_shard: frozenset[str] = frozenset()
    """Random operations whose results are split among shards: each rank draws numbers of its own."""
    half_of: Mapping[str, int] = field(default_factory=dict)
    """Where each micro-batch runs as two halves, the name of each node that runs on one half -> 0 or 1. The two are
    called NAME_half0 and NAME_half1 after the operation NAME; an operation that keeps its name runs once."""

    @property
    def program(self) -> CapturedModel:
        """The only program, or the last slice's, whose attention takes most."""
        return self.programs[-1]

    @property
    def split(self) -> dict[str, Split]:
        """How the parameters and buffers are split, as a Plan says it."""
        state = {*self.whole.graph.parameters, *self.whole.graph.buffers}
        return {n: p.split for n, p in sorted(self.placements.items()) if n in state and p.split is not None}

    def stages(self, stages: Sequence[StagePlan], number: int = -1) -> tuple[StagePlan, ...]:
        """The stages of program ``number`` that match ``stages`` of the whole Graph, what they keep included."""
        return stages_at(self.positions[number], stages)
