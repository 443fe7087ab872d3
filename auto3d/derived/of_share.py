"""The entry point: a captured model as a rank runs it that has a share of its work."""

from collections.abc import Mapping

from auto3d.capture.model import CapturedModel
from auto3d.derived.halves import sub_pipelined
from auto3d.derived.model import Derived
from auto3d.derived.shards import tensor_parallel
from auto3d.derived.slices import sliced
from auto3d.share import Share
from auto3d.tensor_placement import Split


def derived(
    captured: CapturedModel,
    share: Share,
    *,
    split: Mapping[str, Split],
    halves: bool = False,
    fused_attention: bool = True,
) -> Derived:
    """``captured`` divided for ranks that have ``share`` of its work; ``share.slice_number`` does not matter.

    ``split`` is how a Plan splits the state among shards. With ``halves``, each micro-batch runs as two halves: one
    computes while the collectives of the other run. ``fused_attention`` is the argument of ``describe``. Raises
    PlanError where the model does not allow it.
    """
    assert not (halves and share.slices > 1), "they do not go together"
    if share.slices > 1:
        return sliced(captured, share.slices, tp=share.tp, split=split, fused_attention=fused_attention)
    of_all = tensor_parallel(captured, share, split=split, fused_attention=fused_attention)
    return sub_pipelined(of_all, fused_attention=fused_attention) if halves else of_all
