"""One rank of a peer: its model, its micro-batches and its optimizer, which are those that auto3d would have."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from auto3d.capture.model import CapturedModel
from auto3d.capture.skeleton import seeded
from auto3d.data import Batches, DataSettings
from auto3d.mesh import PIPELINE
from auto3d.plan import Plan
from auto3d.runtime.optimizer.build import build_optimizer
from auto3d.runtime.process.world import World
from auto3d.runtime.samples.loading import Loader, Need, pinned_memory_of
from auto3d.runtime.settings import TrainingSettings

Iteration = Callable[[int], torch.Tensor | None]
"""Runs the iteration of that number; returns this rank's share of its loss, a scalar: the mean is the sum of the shares
of all ranks. None: no share."""


@dataclass(frozen=True, kw_only=True)
class PeerRank:
    """What a peer builds its rank from. Every rank of the joined world has a PeerRank."""

    world: World
    plan: Plan
    captured: CapturedModel
    settings: TrainingSettings
    data: DataSettings
    device: torch.device
    state: Mapping[str, torch.Tensor] | None  # initial weights; None: what the plan's seed draws

    @property
    def pipeline(self) -> int:
        """The number of this rank among the data-parallel ranks."""
        return self.plan.position(self.world.rank)[1][PIPELINE]

    @property
    def first_micro_batch(self) -> int:
        """The number of this rank's first micro-batch in the global batch."""
        return self.pipeline * self.plan.micro_batches

    @property
    def clip_norm(self) -> float:
        return self.settings.optimizer.clip_norm

    def inputs(self, names: tuple[str, ...] | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """The inputs called ``names`` (default: all) of this rank's micro-batches, from the first iteration on."""
        batches = Batches(
            self.data,
            seed=self.plan.seed,
            global_batch=self.plan.global_batch,
            micro_batch_size=self.plan.micro_batch_size,
        )
        loader = Loader(batches, pinned_memory_of(self.device))
        taken = tuple(self.data.inputs) if names is None else names
        indices = range(self.first_micro_batch, self.first_micro_batch + self.plan.micro_batches)
        for iteration in count():
            needs = [Need(iteration, index, taken) for index in indices]
            loader.start(needs, 1)
            for need in needs:
                yield loader.read(need.iteration, need.index, need.names).inputs

    def user_model(self) -> nn.Module:
        """The user's module with its initial weights, on the CPU, as a user of the peer would build it."""
        with seeded(self.plan.seed):
            model = self.captured.exported.build()
        if self.state is not None:
            with torch.no_grad():
                for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                    if name in self.state:
                        tensor.copy_(self.state[name])
        return model.train()

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
        """The optimizer of the parameters of ``model`` that are trained, and its learning-rate schedule."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return build_optimizer(parameters, self.settings.optimizer, iterations=self.settings.iterations)
