"""Modules with custom gradients: autograd functions, hooks, checkpoints, frozen parts."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.zoo.entry import Collection
from tests.zoo.two_layers import TwoLayers

gradients = Collection("own: gradients")


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sign(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@gradients()
class StraightThroughFunction(TwoLayers):
    def between(self, x):
        return _Round.apply(x)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


@gradients()
class GradientReversal(TwoLayers):
    """Domain adaptation."""

    def between(self, x):
        return _Reverse.apply(torch.relu(x), 0.3) + x


class _Swish(torch.autograd.Function):
    """Memory-efficient Swish: the true derivative, from saved tensors."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s * (1 + x * (1 - s)))


@gradients()
class EfficientSwish(TwoLayers):
    def between(self, x):
        return _Swish.apply(x)


@gradients()
class StraightThroughDetach(TwoLayers):
    def between(self, x):
        return x + (torch.round(x) - x).detach()


@gradients()
class HookOnTensor(TwoLayers):
    """Halves a gradient as it passes."""

    def between(self, x):
        x = torch.tanh(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return x


@gradients()
class HookOnParameter(TwoLayers):
    def __init__(self):
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@gradients()
class HookAfterAccumulation(TwoLayers):
    def __init__(self):
        super().__init__()
        self.first.weight.register_post_accumulate_grad_hook(self.shrink)

    @staticmethod
    def shrink(parameter):
        parameter.grad.mul_(0.9)


@gradients()
class FullBackwardHook(TwoLayers):
    def __init__(self):
        super().__init__()
        self.first.register_full_backward_hook(
            lambda module, into, out: tuple(g * 0.1 if g is not None else g for g in into)
        )
        self.zero = nn.Linear(16, 16)
        self.zero.register_full_backward_pre_hook(lambda module, out: tuple(g * 0.5 for g in out))

    def between(self, x):
        return torch.tanh(self.zero(x))


@gradients()
class ForwardHooks(TwoLayers):
    """A forward hook that changes the output, and a pre-hook that changes the input."""

    def __init__(self):
        super().__init__()
        self.first.register_forward_hook(lambda module, arguments, out: out * 2)
        self.head.register_forward_pre_hook(lambda module, arguments: (arguments[0] + 1,))


@gradients()
class Frozen(TwoLayers):
    """A frozen middle, a detached branch, and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.middle, self.unused = nn.Linear(16, 16).requires_grad_(False), nn.Linear(3, 3)
        self.side = nn.Linear(16, 16)

    def between(self, x):
        return torch.relu(self.middle(x)) + self.side(x).detach()


@gradients()
class NoGradient(TwoLayers):
    """no_grad as a decorator and as a block, inference on an exponential average that is a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    @torch.no_grad()
    def centre(self, x):
        return x.mean(0)

    def between(self, x):
        return torch.tanh(x - self.centre(x) + self.mean)


@gradients()
class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x, label):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(x), label)


@gradients()
class CheckpointedReentrant(TwoLayers):
    def between(self, x):
        return checkpoint(torch.tanh, x, use_reentrant=True)


@gradients()
class CheckpointedSequential(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(16, 4)

    def forward(self, x, label):
        return F.cross_entropy(self.head(checkpoint_sequential(self.body, 2, x, use_reentrant=False)), label)


@gradients()
class ClampedGradient(TwoLayers):
    """where, clamp, max, sort and masked_fill, whose gradients select elements."""

    def between(self, x):
        top = x.sort(dim=-1, descending=True).values[:, :8].repeat(1, 2)
        return torch.where(x > 0, x.clamp(max=1), 0.1 * x).masked_fill(x.abs() < 0.01, 0.0) + torch.maximum(top, x)
