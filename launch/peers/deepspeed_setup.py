"""DeepSpeed without its launcher: it joins the process group that the ranks have, and compiles nothing."""

import os
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops import __compatible_ops__ as extensions
from torch import nn

from launch.peers.rank import PeerRank

NEVER = 10**9  # steps between DeepSpeed's own reports


def join_deepspeed(rank: PeerRank) -> None:
    """Have DeepSpeed use the process group of the ranks; models for it are built afterwards."""
    os.environ["LOCAL_RANK"] = str(rank.world.local_rank)  # DeepSpeed expects this variable of its launcher
    extensions["deepspeed_shm_comm"] = False  # on a CPU DeepSpeed would compile this extension now, for 40 s
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)


def engine_of(rank: PeerRank, model: nn.Module, optimizer: torch.optim.Optimizer, *, zero_stage: int) -> Any:
    """DeepSpeed's engine for ``model``, with the plan's sizes and clipping, and an optimizer of torch."""
    config = {
        "train_micro_batch_size_per_gpu": rank.plan.micro_batch_size,
        "gradient_accumulation_steps": rank.plan.micro_batches,
        "gradient_clipping": rank.clip_norm,
        "zero_optimization": {"stage": zero_stage, "overlap_comm": True},  # by default only stage 3 overlaps
        "zero_allow_untested_optimizer": True,
        "steps_per_print": NEVER,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine
