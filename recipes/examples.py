"""Examples for `model.factory`, which takes any function that makes an nn.Module whose forward returns the loss."""

import torch
from torch import nn


class ResidualPerceptron(nn.Module):
    """A classifier of vectors, with ``depth`` residual blocks of two linear layers each."""

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


class Bottleneck(nn.Module):
    """The residual block of ResNet-50 and deeper: three convolutions and a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != outputs:
            projection = nn.Conv2d(channels, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.norm1(self.conv1(hidden)))
        out = torch.relu(self.norm2(self.conv2(out)))
        return torch.relu(self.norm3(self.conv3(out)) + self.shortcut(hidden))


class ResNet(nn.Module):
    """A classifier of images: a stem, groups of ``blocks`` bottlenecks with doubling width, and a head."""

    def __init__(self, *, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.ModuleList()
        channels = width
        for group, count in enumerate(blocks):
            for block in range(count):
                group_width = width * 2**group
                stride = 2 if group > 0 and block == 0 else 1
                self.blocks.append(Bottleneck(channels, group_width, stride))
                channels = 4 * group_width
        self.head = nn.Linear(channels, classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """``pixel_values`` [batch, 3, height, width] and ``labels`` [batch] -> the loss, a scalar."""
        hidden = self.pool(torch.relu(self.norm(self.conv(pixel_values))))
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden.mean(dim=(2, 3))), labels)


RESNET_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def resnet(depth: int = 50, width_factor: float = 1, classes: int = 1000) -> nn.Module:
    """ResNet of He et al. (2016), table 1, with ``width_factor`` times as many channels in every layer."""
    if depth not in RESNET_BLOCKS:
        raise ValueError(f"depth {depth} is not one of {', '.join(map(str, RESNET_BLOCKS))}")
    return ResNet(blocks=RESNET_BLOCKS[depth], width=round(64 * width_factor), classes=classes)
