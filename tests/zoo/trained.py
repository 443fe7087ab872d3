"""Settings of every training of the zoo, and the results of one process."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from tests.distributed.parity import SGD

SEED = 5
ITERATIONS = 3
MICRO_BATCH = 2
OPTIMIZER = replace(SGD, warmup_iterations=0)  # every iteration changes the parameters


@dataclass(frozen=True)
class Trained:
    """What one process saw of the training. ``gradients`` are those of the first iteration, after clipping."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray]


def array(tensor: torch.Tensor) -> np.ndarray:
    """A copy that later updates do not change; bfloat16, which numpy lacks, as float32; sparse ones dense."""
    tensor = tensor.detach().to_dense()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).clone().numpy()
