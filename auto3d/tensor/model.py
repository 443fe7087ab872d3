"""The entry point: a captured model as each rank of a tensor-parallel group runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from auto3d.capture.model import CapturedModel
from auto3d.plan import StagePlan
from auto3d.tensor_placement import Split, TensorPlacement


@dataclass(frozen=True, kw_only=True)
class TensorParallelModel:
    """What each of ``shards`` ranks runs of the model ``whole``: the same program ``local`` on tensors of its own.

    ``local`` has the operations of ``whole`` under their names, with local shapes, and between them the conversions of
    tensor/collectives.py. Its state has the names of the whole model's.
    """

    whole: CapturedModel
    local: CapturedModel
    shards: int
    placements: Mapping[str, TensorPlacement]
    """Placement of every parameter and buffer of the model, by its name, and of every value of the program."""
    positions: tuple[int, ...]
    """For each node of the local Graph the position in the whole Graph of the operation that it belongs to, in
    ascending order: a conversion belongs to the operation whose result it converts, or that needs its result."""
    drawn_per_shard: frozenset[str]  # random operations whose results are split: each rank draws numbers of its own

    @property
    def split(self) -> dict[str, Split]:
        """How the parameters and buffers are split, as a Plan says it."""
        state = {*self.whole.graph.parameters, *self.whole.graph.buffers}
        return {n: p.split for n, p in sorted(self.placements.items()) if n in state and p.split is not None}

    def stages(self, stages: Sequence[StagePlan]) -> tuple[StagePlan, ...]:
        """The stages of the local Graph that match ``stages`` of the whole one, what they keep included."""
        raise NotImplementedError


def tensor_parallel(
    captured: CapturedModel,
    shards: int,
    *,
    split: Mapping[str, Split] | None = None,
    sequence_parallel: bool = False,
) -> TensorParallelModel:
    """``captured`` as each of ``shards`` ranks runs it, with the least communication.

    ``split`` is how a Plan splits the model's state; without it, every product's weights are split where that is
    possible. With ``sequence_parallel``, values between products are split along the sequence where that costs no more
    communication. Raises PlanError if ``split`` does not fit the model.
    """
    raise NotImplementedError
