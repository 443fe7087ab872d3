"""Models for `model.factory`: any function that makes an nn.Module whose forward returns its loss."""

import torch
from torch import nn


class ResidualPerceptron(nn.Module):
    """A classifier of vectors: ``depth`` residual blocks of two layers."""

    def __init__(self, *, inputs: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """``features`` [batch, inputs] and ``label`` [batch] -> the loss, a scalar."""
        hidden = self.first(features)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden), label)


def residual_perceptron(inputs: int = 64, width: int = 256, depth: int = 8, classes: int = 10) -> nn.Module:
    return ResidualPerceptron(inputs=inputs, width=width, depth=depth, classes=classes)
