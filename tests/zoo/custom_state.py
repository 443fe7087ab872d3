"""Modules with state, randomness, branches and custom initialisers."""

import itertools
import math
import random

import numpy as np
import torch
from torch import nn
from torch.compiler import is_compiling  # bound here, where the engine cannot replace it
from torch.nn import functional as F  # noqa: N812

from tests.zoo.entry import Collection
from tests.zoo.two_layers import TwoLayers

state = Collection("own: state, randomness")


@state(only_refused="every iteration does something else")
class StepCounter(TwoLayers):
    """A Python counter that warms up a temperature."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def between(self, x):
        self.steps += 1
        return torch.tanh(x) * min(1.0, self.steps / 8)


@state(only_refused="every iteration draws anew")
class RandomLayerDrop(nn.Module):
    """random.random() decides whether a layer runs."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x, label):
        for layer in self.layers:
            if self.training and random.random() < 0.5:
                continue
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), label)


@state(only_refused="every iteration draws anew")
class NumpyNoise(TwoLayers):
    def between(self, x):
        return x * (1 + 0.1 * float(np.random.randn()))


@state(only_refused="every iteration draws anew")
class NumpyMask(TwoLayers):
    """A mask drawn by numpy, like the time mask of Wav2Vec2."""

    def between(self, x):
        return x * torch.from_numpy(np.random.rand(16) > 0.3).to(x.dtype)


@state(only_refused="it alternates between two paths")
class Alternating(TwoLayers):
    """itertools.cycle picks the activation."""

    def __init__(self):
        super().__init__()
        self.activations = itertools.cycle([torch.tanh, torch.relu])

    def between(self, x):
        return next(self.activations)(x)


@state(only_refused="it keeps a tensor from one forward to the next")
class Remembering(TwoLayers):
    """An attribute carries the last activation to the next forward."""

    def __init__(self):
        super().__init__()
        self.last = None

    def between(self, x):
        out = torch.tanh(x) if self.last is None else torch.tanh(x + 0.1 * self.last)
        self.last = x.detach()
        return out


@state()
class KeptForLater(TwoLayers):
    """An attribute that forward writes for inspection and never reads."""

    def between(self, x):
        self.activation = torch.tanh(x)
        return self.activation


@state()
class CounterBuffer(TwoLayers):
    """A step counter in a buffer, like num_batches_tracked of BatchNorm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def between(self, x):
        self.steps += 1
        return torch.tanh(x)


@state()
class RunningStatistics(TwoLayers):
    """BatchNorm in two sizes, and a custom running average that is written but not read."""

    def __init__(self):
        super().__init__()
        self.norm, self.register = nn.BatchNorm1d(16, momentum=0.2), None
        self.register_buffer("average", torch.zeros(16))

    def between(self, x):
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return torch.tanh(x) + self.norm(x).sin()


@state()
class AverageByAssignment(TwoLayers):
    """``self.average = …`` instead of a write."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def between(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return torch.tanh(x)


@state()
class AverageByData(TwoLayers):
    """``self.average.data.copy_``."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def between(self, x):
        self.average.data.copy_(self.average.data * 0.9 + x.detach().mean(0) * 0.1)
        return torch.tanh(x)


@state()
class MomentumEncoder(nn.Module):
    """MoCo: a second encoder that forward moves towards the first."""

    def __init__(self):
        super().__init__()
        self.online, self.slow = nn.Linear(16, 8), nn.Linear(16, 8)
        self.predict = nn.Linear(8, 8)
        self.slow.load_state_dict(self.online.state_dict())
        self.slow.requires_grad_(False)

    def forward(self, x, label):
        with torch.no_grad():
            for slow, online in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                slow.data.mul_(0.99).add_(online.data, alpha=0.01)
            target = self.slow(x.flip(-1))
        return 1 - F.cosine_similarity(self.predict(self.online(x)), target).mean()


@state(draws=True)
class SeveralDraws(TwoLayers):
    """Custom dropout, noise and Bernoulli masks."""

    def between(self, x):
        x = F.dropout(x, 0.3, self.training)
        x = x + 0.1 * torch.randn(x.shape[0], 16)
        return x * torch.bernoulli(torch.full_like(x, 0.8))


@state(draws=True)
class StochasticDepth(nn.Module):
    """Drop path by a tensor, as timm writes it."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 4)

    def forward(self, x, label):
        for layer in self.layers:
            keep = x.new_empty((x.shape[0], 1)).bernoulli_(0.8)
            keep.div_(0.8)
            x = x + torch.tanh(layer(x)) * keep
        return F.cross_entropy(self.head(x), label)


@state(only_refused="every iteration seeds itself alike")
class SeedsItself(TwoLayers):
    """torch.manual_seed in forward."""

    def between(self, x):
        torch.manual_seed(0)
        return x + torch.rand_like(x)


@state(only_refused="a tensor of the data decides")
class BranchOnData(TwoLayers):
    def between(self, x):
        if x.mean() > 0:
            return torch.tanh(x)
        return torch.relu(x)


@state(only_refused="a number of the data enters Python")
class ItemInForward(TwoLayers):
    def between(self, x):
        return x / max(1.0, x.norm().item())


@state(only_refused="a size depends on the data")
class SelectsRows(TwoLayers):
    def between(self, x):
        kept = x[x > 0]
        return torch.tanh(x) + kept.mean()


@state()
class TracingBranch(TwoLayers):
    """Takes another path with the same result when it is traced."""

    def between(self, x):
        if torch.jit.is_tracing() or torch.compiler.is_compiling():
            return 2 * torch.sigmoid(2 * x) - 1
        return torch.tanh(x)


@state()
class TracedBranch(TwoLayers):
    """A branch that only a trace takes; the engine answers the question as an eager run would."""

    def between(self, x):
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return torch.tanh(x) * 1.01
        return torch.tanh(x)


@state(only_refused="the traced code does something else")
class TracingLies(TwoLayers):
    def between(self, x):
        return torch.tanh(x) * 1.01 if is_compiling() else torch.tanh(x)


@state()
class NumpyInitialised(TwoLayers):
    """Initialises from a generator with a fixed seed."""

    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(3)
        self.first.weight.data = torch.from_numpy(draw.standard_normal((16, 16)).astype(np.float32) * 0.2)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor(draw.standard_normal((4, 16)), dtype=torch.float32))


@state()
class GlobalNumpyInitialised(TwoLayers):
    """Initialises from numpy's global generator and from random, with the seeds that are set."""

    def __init__(self):
        super().__init__()
        self.first.weight.data.copy_(torch.from_numpy(np.random.randn(16, 16).astype(np.float32) * 0.2))
        self.head.bias.data.fill_(random.random())


@state()
class TruncatedNormal(nn.Module):
    """trunc_normal_, whose number of draws depends on the values."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(6)), nn.Linear(16, 4)
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight, std=0.3, a=-0.6, b=0.6)

    def forward(self, x, label):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), label)


@state()
class RejectionInitialised(nn.Module):
    """Draws until the norm fits: values steer the initialisation."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 4)
        for layer in self.layers:
            while layer.weight.norm() > 2.35:
                layer.reset_parameters()

    def forward(self, x, label):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), label)


@state()
class OrthogonalInitialised(TwoLayers):
    """orthogonal_, xavier and kaiming, a scale from another layer's norm, and reset of a slice."""

    def __init__(self):
        super().__init__()
        nn.init.orthogonal_(self.first.weight, gain=0.7)
        nn.init.kaiming_uniform_(self.head.weight, a=math.sqrt(5))
        with torch.no_grad():
            self.head.weight[0].zero_()
            self.first.bias[:4] = 0.5


@state()
class ScaledByAnother(TwoLayers):
    """The head's weights are scaled by the norm of the first layer's."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.head.weight.mul_(1 / self.first.weight.norm())
