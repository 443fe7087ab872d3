"""The parts of a training's state that one rank holds, by which a checkpoint is written and read under another Plan."""

from dataclasses import dataclass

import torch

from auto3d.capture.shard import Shard


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """What one rank holds of one tensor: the whole, a tensor-parallel shard, or a range of either (ZeRO-1)."""

    tensor: torch.Tensor  # writing to it changes the rank
    shape: tuple[int, ...]  # shape of the whole tensor, without a tensor-parallel shard's padding
    shard: Shard | None = None  # None: all ranks of a tensor-parallel group hold the whole
    flat: tuple[int, int] | None = None
    """``[first, last)`` of the flattened shard, or of the flattened whole if there is no shard. ``tensor`` is then 1-D.
    None: all elements."""
    is_stored: bool = True
    """False: the values differ between ranks, as batch statistics do, and a checkpoint stores another rank's."""
