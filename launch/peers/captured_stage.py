"""A stage of the captured program as a plain nn.Module, for pipelines that are not ours."""

from itertools import count
from typing import Any

import torch
from torch import nn

from auto3d.partition.segment import segments
from auto3d.partition.stage import Stage
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.program import segment_program
from auto3d.runtime.weights.materialize import materialize
from launch.peers.rank import PeerRank


class CapturedStage(nn.Module):
    """Takes the values that the stage receives, in the order of ``received``; returns those that it sends, or the loss.

    It loads its own inputs of the data: its first forward runs the first micro-batch of the first iteration, and every
    peer runs the forwards of a stage in this order. So dropout draws what it draws in auto3d.
    """

    def __init__(self, rank: PeerRank, stage: Stage) -> None:
        super().__init__()
        captured, graph = rank.captured, rank.captured.graph
        self.received = [transfer.value for transfer in stage.received]
        sent = list(dict.fromkeys(transfer.value.name for transfer in stage.sent))
        self.sent = [graph.value(name) for name in sent] or [graph.value(graph.loss)]
        constants = captured.exported.constants
        names = [name for name in stage.state if name not in constants]
        tensors = materialize(captured.exported.build, names, seed=rank.plan.seed, state=rank.state)
        tensors |= {name: value for name, value in constants.items() if name in stage.state}
        self._randomness = Randomness(
            rank.plan.seed,
            first_micro_batch=rank.first_micro_batch,
            micro_batches=rank.plan.micro_batches,
            device=rank.device,
        )
        (segment,) = segments(graph, stage, [(0, len(graph.nodes))])
        self._program, state, self._takes = segment_program(segment, captured, randomness=self._randomness)
        self._attributes = [attribute(name) for name in state]
        for name in state:
            tensor = tensors[name].to(rank.device)
            if name in graph.parameters:
                parameter = nn.Parameter(tensor, requires_grad=name in graph.trained)
                self.register_parameter(attribute(name), parameter)
            else:
                self.register_buffer(attribute(name), tensor)
        self._gives = [segment.gives.index(value.name) for value in self.sent]
        self._inputs = rank.inputs(stage.inputs) if stage.inputs else None
        self._forwards = count()

    def forward(self, *received: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        self._randomness.micro_batch = next(self._forwards)
        values = {
            value.name: _ContiguousGradient.apply(tensor) if value.differentiable else tensor
            for value, tensor in zip(self.received, received, strict=True)
        }
        if self._inputs is not None:
            values |= next(self._inputs)
        made = self._program(
            *(getattr(self, name) for name in self._attributes), *(values[name] for name in self._takes)
        )
        given = tuple(made[place].contiguous() for place in self._gives)
        return given if len(given) > 1 else given[0]


def attribute(name: str) -> str:
    """The attribute of a stage that holds the model's parameter or buffer ``name``; attributes have no dots."""
    return f"state/{name.replace('.', '/')}"


class _ContiguousGradient(torch.autograd.Function):
    """The identity, with a contiguous gradient: torch's zero-bubble schedules send gradients as they are."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()
