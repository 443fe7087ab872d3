"""Modules whose code is more than operators: gradients of one's own, Python state, ties, in-place writes, constants."""

import itertools
import math
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.zoo.entry import SEQUENCES, TEXT, TOKENS, Collection, integers, normal

gradients = Collection("own: gradients")
state = Collection("own: state, randomness")
tensors = Collection("own: tensors")
structure = Collection("own: structure")


class _Two(nn.Module):
    """Two layers: forward is head(between(first(x)))."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def between(self, x):
        return torch.tanh(x)

    def forward(self, x, label):
        return F.cross_entropy(self.head(self.between(self.first(x))), label)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sign(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@gradients()
class StraightThroughFunction(_Two):
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
class GradientReversal(_Two):
    """Domain adaptation."""

    def between(self, x):
        return _Reverse.apply(torch.relu(x), 0.3) + x


class _Swish(torch.autograd.Function):
    """The right derivative, with saved tensors: memory-efficient Swish."""

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
class EfficientSwish(_Two):
    def between(self, x):
        return _Swish.apply(x)


@gradients()
class StraightThroughDetach(_Two):
    def between(self, x):
        return x + (torch.round(x) - x).detach()


@gradients()
class HookOnTensor(_Two):
    """Halves a gradient as it passes."""

    def between(self, x):
        x = torch.tanh(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return x


@gradients()
class HookOnParameter(_Two):
    def __init__(self):
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@gradients()
class HookAfterAccumulation(_Two):
    def __init__(self):
        super().__init__()
        self.first.weight.register_post_accumulate_grad_hook(self.shrink)

    @staticmethod
    def shrink(parameter):
        parameter.grad.mul_(0.9)


@gradients()
class FullBackwardHook(_Two):
    def __init__(self):
        super().__init__()
        self.first.register_full_backward_hook(lambda module, into, out: tuple(g * 0.1 if g is not None else g for g in into))
        self.zero = nn.Linear(16, 16)
        self.zero.register_full_backward_pre_hook(lambda module, out: tuple(g * 0.5 for g in out))

    def between(self, x):
        return torch.tanh(self.zero(x))


@gradients()
class ForwardHooks(_Two):
    """A forward hook that changes the output, and a pre-hook that changes the input."""

    def __init__(self):
        super().__init__()
        self.first.register_forward_hook(lambda module, arguments, out: out * 2)
        self.head.register_forward_pre_hook(lambda module, arguments: (arguments[0] + 1,))


@gradients()
class Frozen(_Two):
    """A frozen middle, a detached branch, and a parameter that is used nowhere."""

    def __init__(self):
        super().__init__()
        self.middle, self.unused = nn.Linear(16, 16).requires_grad_(False), nn.Linear(3, 3)
        self.side = nn.Linear(16, 16)

    def between(self, x):
        return torch.relu(self.middle(x)) + self.side(x).detach()


@gradients()
class NoGradient(_Two):
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
class CheckpointedReentrant(_Two):
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
class ClampedGradient(_Two):
    """where, clamp, max, sort and masked_fill, whose gradients pick."""

    def between(self, x):
        top = x.sort(dim=-1, descending=True).values[:, :8].repeat(1, 2)
        return torch.where(x > 0, x.clamp(max=1), 0.1 * x).masked_fill(x.abs() < 0.01, 0.0) + torch.maximum(top, x)


@state(only_refused="every iteration does something else")
class StepCounter(_Two):
    """A Python integer that grows, and warms a temperature up."""

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
class NumpyNoise(_Two):
    def between(self, x):
        return x * (1 + 0.1 * float(np.random.randn()))


@state(only_refused="every iteration draws anew")
class NumpyMask(_Two):
    """A mask drawn by numpy, as Wav2Vec2's of time steps."""

    def between(self, x):
        return x * torch.from_numpy(np.random.rand(16) > 0.3).to(x.dtype)


@state(only_refused="it alternates between two paths")
class Alternating(_Two):
    """itertools.cycle picks the activation."""

    def __init__(self):
        super().__init__()
        self.activations = itertools.cycle([torch.tanh, torch.relu])

    def between(self, x):
        return next(self.activations)(x)


@state(only_refused="it keeps a tensor from one forward to the next")
class Remembering(_Two):
    """The last activation, kept as an attribute, feeds the next forward."""

    def __init__(self):
        super().__init__()
        self.last = None

    def between(self, x):
        out = torch.tanh(x) if self.last is None else torch.tanh(x + 0.1 * self.last)
        self.last = x.detach()
        return out


@state()
class KeptForLater(_Two):
    """An attribute written in forward for a person to look at, read by no forward."""

    def between(self, x):
        self.activation = torch.tanh(x)
        return self.activation


@state()
class CounterBuffer(_Two):
    """A step counter that is a buffer, as BatchNorm's num_batches_tracked."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def between(self, x):
        self.steps += 1
        return torch.tanh(x)


@state()
class RunningStatistics(_Two):
    """BatchNorm in two sizes, and an average of one's own that is written and not read."""

    def __init__(self):
        super().__init__()
        self.norm, self.register = nn.BatchNorm1d(16, momentum=0.2), None
        self.register_buffer("average", torch.zeros(16))

    def between(self, x):
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return torch.tanh(x) + self.norm(x).sin()


@state()
class AverageByAssignment(_Two):
    """``self.average = …`` instead of a write."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def between(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return torch.tanh(x)


@state()
class AverageByData(_Two):
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
class SeveralDraws(_Two):
    """Dropout, noise and Bernoulli masks of one's own."""

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
class SeedsItself(_Two):
    """torch.manual_seed in forward."""

    def between(self, x):
        torch.manual_seed(0)
        return x + torch.rand_like(x)


@state(only_refused="a tensor of the data decides")
class BranchOnData(_Two):
    def between(self, x):
        if x.mean() > 0:
            return torch.tanh(x)
        return torch.relu(x)


@state(only_refused="a number of the data enters Python")
class ItemInForward(_Two):
    def between(self, x):
        return x / max(1.0, x.norm().item())


@state(only_refused="a size depends on the data")
class SelectsRows(_Two):
    def between(self, x):
        kept = x[x > 0]
        return torch.tanh(x) + kept.mean()


@state()
class TracingBranch(_Two):
    """Does the same where it is traced, by another road."""

    def between(self, x):
        if torch.jit.is_tracing() or torch.compiler.is_compiling():
            return 2 * torch.sigmoid(2 * x) - 1
        return torch.tanh(x)


@state(only_refused="the traced code does something else")
class TracingLies(_Two):
    def between(self, x):
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return torch.tanh(x) * 1.01
        return torch.tanh(x)


@state()
class NumpyInitialised(_Two):
    """From a generator with a seed of its own."""

    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(3)
        self.first.weight.data = torch.from_numpy(draw.standard_normal((16, 16)).astype(np.float32) * 0.2)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor(draw.standard_normal((4, 16)), dtype=torch.float32))


@state()
class GlobalNumpyInitialised(_Two):
    """From numpy's global generator and from random, as Python seeded them."""

    def __init__(self):
        super().__init__()
        self.first.weight.data.copy_(torch.from_numpy(np.random.randn(16, 16).astype(np.float32) * 0.2))
        self.head.bias.data.fill_(random.random())


@state()
class TruncatedNormal(nn.Module):
    """trunc_normal_, whose count of draws depends on the values."""

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
class OrthogonalInitialised(_Two):
    """orthogonal_, xavier and kaiming, a scale from another layer's norm, and reset of a slice."""

    def __init__(self):
        super().__init__()
        nn.init.orthogonal_(self.first.weight, gain=0.7)
        nn.init.kaiming_uniform_(self.head.weight, a=math.sqrt(5))
        with torch.no_grad():
            self.head.weight[0].zero_()
            self.first.bias[:4] = 0.5


@state()
class ScaledByAnother(_Two):
    """The head's weights are scaled by the norm of the first layer's."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.head.weight.mul_(1 / self.first.weight.norm())


@tensors()
class PlainAttributes(_Two):
    """Tensors kept as plain attributes, in a list and in a dict."""

    def __init__(self):
        super().__init__()
        self.scale, self.shifts = torch.linspace(0.5, 1.5, 16), [torch.ones(16), torch.arange(16) / 16]
        self.table = {"mask": (torch.arange(16) % 3 > 0).float()}

    def between(self, x):
        return torch.tanh(x * self.scale + self.shifts[0] * self.shifts[1]) * self.table["mask"]


@tensors()
class ConstantsInForward(_Two):
    """torch.tensor, torch.zeros, full, eye, linspace and from_numpy in forward, most without a device."""

    def between(self, x):
        weights = torch.tensor([0.1 * i for i in range(16)])
        x = x * weights + torch.zeros(16) + torch.full((16,), 0.2) + torch.from_numpy(np.linspace(0, 1, 16)).float()
        return torch.tanh(x @ torch.eye(16) + torch.as_tensor(3.0) + torch.tensor(x.shape[-1], device=x.device) ** -0.5)


@tensors()
class ClassWeights(_Two):
    """Loss modules with weights, label smoothing and an ignored index."""

    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 0.5]), label_smoothing=0.1, ignore_index=3)

    def forward(self, x, label):
        return self.criterion(self.head(self.between(self.first(x))), label.clamp(max=2))


@tensors(SEQUENCES)
class WritesThroughViews(_Two):
    """In place on a view whose base is not used again, after flatten, unsqueeze and a slice."""

    def forward(self, x, label):
        x = self.first(x)
        flat = (x * 2).flatten(0, 1)
        flat += 1
        wide = torch.sin(flat).unsqueeze(1)
        wide.mul_(0.5)
        out = wide.squeeze(1).view_as(x).clone()
        out[:, 0] = 0
        out[:, 1:3] += x[:, 2:4]
        out[..., -1].clamp_(min=-0.1)
        return F.cross_entropy(self.head(out.mean(1)), label)


@tensors(SEQUENCES)
class WritesToResults(_Two):
    """In place on results of topk, sort and max, which are no views."""

    def forward(self, x, label):
        x = self.first(x)
        top, _ = x.topk(4, dim=-1)
        top *= 0.5
        top += 1
        ordered = x.sort(-1).values
        ordered.mul_(0.5)
        most = x.max(1).values
        most.add_(1)
        mixed = ordered.mean(1) + most
        return F.cross_entropy(self.head(mixed), label) + top.mean()


@tensors(SEQUENCES)
class WritesToPieces(_Two):
    """In place on results of split and unbind, without gradients, as targets are made."""

    def forward(self, x, label):
        with torch.no_grad():
            left, right = torch.split(x + 1, 8, dim=-1)
            left.sigmoid_()
            first, *others = torch.unbind(x * 3, dim=1)
            first.relu_()
            target = torch.cat([left, right], -1).mean(1) + first + others[0]
        x = self.first(x).mean(1)
        return F.cross_entropy(self.head(torch.tanh(x)), label) + F.mse_loss(x, target)


@tensors(SEQUENCES)
class WriteSeenByAnother(_Two):
    """A write that another view sees afterwards."""

    def forward(self, x, label):
        x = self.first(x).clone()
        view = x.view(-1, 16)
        x[:, 0].mul_(2)
        return F.cross_entropy(self.head(view.view_as(x).mean(1)), label)


@tensors({"x": normal(8, 16), "where": integers(8, high=8), "label": integers(high=4)})
class ScatterGather(_Two):
    """index_put, scatter, gather, index_select, masked_scatter, take_along_dim."""

    def forward(self, x, where, label):
        x = self.first(x)
        rows = torch.arange(x.size(0))[:, None]
        a = torch.zeros_like(x)
        a[rows, where] = x
        b = torch.zeros_like(x).scatter(1, where[..., None].expand_as(x), x)
        c = torch.zeros_like(x).index_put((rows, where), x, accumulate=True)
        d = x.index_select(2, torch.tensor([3, 1, 2])).mean(-1, keepdim=True)
        e = torch.take_along_dim(x, where[..., None], dim=1)
        f = x.masked_scatter(x > 0, torch.zeros_like(x))
        return F.cross_entropy(self.head((a + b + c + d + e + f).mean(1)), label)


@tensors(SEQUENCES)
class Fourier(_Two):
    """An FNet layer and a spectral filter with complex weights."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.view_as_real(torch.randn(5, 16, dtype=torch.cfloat)) * 0.3)

    def forward(self, x, label):
        x = self.first(x)
        y = torch.fft.fft2(x).real
        z = torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.filter), n=8, dim=1)
        return F.cross_entropy(self.head((0.1 * y + z).mean(1)), label)


@tensors()
class ComplexParameter(_Two):
    """A parameter of complex numbers."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(16, dtype=torch.cfloat))

    def between(self, x):
        return (torch.complex(x, x.flip(-1)) * self.phase).abs()


@tensors()
class SparseProduct(_Two):
    """An adjacency matrix as a sparse buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("graph", torch.eye(16).roll(1, 0).to_sparse())

    def between(self, x):
        return torch.tanh(torch.sparse.mm(self.graph, x.T).T)


@tensors()
class VectorMapped(_Two):
    """torch.vmap over the samples."""

    def between(self, x):
        return torch.vmap(lambda row: torch.outer(row, row).tanh().sum(-1))(x)


@tensors(SEQUENCES)
class Products(_Two):
    """einsum, bmm, tensordot, kron, matrix power, cdist, cumsum, cumprod, logsumexp, roll, unfold."""

    def forward(self, x, label):
        x = self.first(x)
        gram = torch.einsum("bid,bjd->bij", x, x).softmax(-1)
        y = torch.bmm(gram, x) + torch.tensordot(x, self.first.weight, dims=([2], [1]))
        y = y + torch.cdist(x, x).mean(-1, keepdim=True) + x.cumsum(1) * 0.1 + torch.roll(x, 1, 1)
        y = y + torch.matrix_power(gram, 2) @ x + x.unfold(1, 2, 1).sum(-1).mean(1, keepdim=True)
        return F.cross_entropy(self.head(torch.logsumexp(y, 1)), label) + torch.cumprod(gram, -1).mean()


@tensors()
class Autocast(_Two):
    """A region of automatic mixed precision."""

    def forward(self, x, label):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.tanh(self.first(x))
        return F.cross_entropy(self.head(x.float()), label)


@tensors()
class AutocastOff(_Two):
    """A region that keeps 32 bits, as models of transformers have around rotary embeddings."""

    def between(self, x):
        with torch.autocast(device_type=x.device.type, enabled=False):
            return torch.tanh(x.float())


@tensors()
class HalfPrecision(nn.Module):
    """A module in bfloat16 between two in 32 bits."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(16, 16), nn.Linear(16, 16).to(torch.bfloat16), nn.Linear(16, 4)

    def forward(self, x, label):
        x = self.middle(self.first(x).to(torch.bfloat16)).float()
        return F.cross_entropy(self.head(torch.tanh(x)), label)


@tensors()
class DoublePrecision(_Two):
    def __init__(self):
        super().__init__()
        self.double()

    def forward(self, x, label):
        return super().forward(x.double(), label)


@tensors()
class LinearAlgebra(_Two):
    """inverse, solve, cholesky, determinant."""

    def between(self, x):
        a = self.first.weight @ self.first.weight.T + torch.eye(16)
        chol = torch.linalg.cholesky(a)
        return torch.tanh(torch.linalg.solve(a, x.T).T + x @ torch.linalg.inv(chol) + torch.linalg.slogdet(a)[1])


@tensors(TEXT)
class PaddedText(nn.Module):
    """padding_idx, a mask from the tokens, a mean over what is no padding, max_norm."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16, padding_idx=0), nn.Linear(16, 4)

    def forward(self, tokens, label):
        mask = (tokens != 0).unsqueeze(-1)
        x = (self.embed(tokens) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return F.cross_entropy(self.head(x), label)


@tensors({"x": normal(20, 5), "targets": integers(4, high=4)})
class ConnectionistTemporal(nn.Module):
    """CTC loss with lengths made in forward."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv1d(5, 16, 3), nn.Linear(16, 6)

    def forward(self, x, targets):
        logits = self.head(torch.relu(self.first(x.transpose(1, 2))).transpose(1, 2)).log_softmax(-1)
        n, t = logits.shape[:2]
        lengths = torch.full((n,), t, dtype=torch.long)
        return F.ctc_loss(logits.transpose(0, 1), targets + 1, lengths, torch.full((n,), 4, dtype=torch.long))


@structure(TEXT)
class TiedEverywhere(nn.Module):
    """One weight by assignment, one module under two names, and one transposed in use."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(256, 16), nn.Linear(16, 256, bias=False)
        self.out.weight = self.embed.weight
        self.layer = nn.Linear(16, 16)
        self.again = self.layer
        self.head = nn.Linear(16, 4)

    def forward(self, tokens, label):
        x = self.again(torch.relu(self.layer(self.embed(tokens))))
        x = x + F.linear(x, self.layer.weight.T)
        return F.cross_entropy(self.head(x.mean(1)), label) + F.cross_entropy(self.out(x).transpose(1, 2), tokens)


@structure()
class SharedLayers(nn.Module):
    """ALBERT: one layer, six times."""

    def __init__(self):
        super().__init__()
        self.into, self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, label):
        x = self.into(x)
        for _ in range(6):
            x = x + torch.tanh(self.layer(x))
        return F.cross_entropy(self.head(x), label)


@structure()
class SameListTwice(nn.Module):
    """[layer] * 3 in a Sequential."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(*[nn.Linear(16, 16)] * 3), nn.Linear(16, 4)

    def forward(self, x, label):
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), label)


@structure()
class ParameterContainers(nn.Module):
    """ParameterList, ParameterDict, ModuleDict with odd names."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) * 0.2 for _ in range(3))
        self.scales = nn.ParameterDict({"a b": torch.ones(16), "0": torch.zeros(16), "self": torch.ones(1)})
        self.heads = nn.ModuleDict({"head 1": nn.Linear(16, 4), "2": nn.Linear(16, 4)})

    def forward(self, x, label):
        for weight in self.weights:
            x = torch.tanh(x @ weight) * self.scales["a b"] + self.scales["0"]
        return F.cross_entropy(self.heads["head 1" if self.training else "2"](x * self.scales["self"]), label)


@structure()
class ScalarsAndEmpty(_Two):
    """Parameters of no dimension and of no elements."""

    def __init__(self):
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0))

    def between(self, x):
        return torch.tanh(x) * self.scale + self.empty.sum()


@structure()
class LazyLayers(nn.Module):
    """Layers that know their sizes at the first forward."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.LazyLinear(16), nn.LazyLinear(4)

    def forward(self, x, label):
        return F.cross_entropy(self.head(torch.tanh(self.first(x))), label)


@structure()
class CompiledSubmodule(_Two):
    def __init__(self):
        super().__init__()
        self.inner = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.GELU()), backend="eager")

    def between(self, x):
        return self.inner(x)


@structure()
class ScriptedSubmodule(_Two):
    def __init__(self):
        super().__init__()
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))

    def between(self, x):
        return self.inner(x)


@structure()
class TracedFunction(_Two):
    """A function of torch.jit.script in forward."""

    def between(self, x):
        return _scripted(x)


@torch.jit.script
def _scripted(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


@structure()
class FunctionalCall(_Two):
    """Runs a submodule with other weights, as meta-learning does: one inner step by autograd.grad."""

    def forward(self, x, label):
        inner = F.cross_entropy(self.head(torch.tanh(self.first(x))), label)
        weight, bias = torch.autograd.grad(inner, (self.head.weight, self.head.bias), create_graph=True)
        new = {"weight": self.head.weight - 0.1 * weight, "bias": self.head.bias - 0.1 * bias}
        return F.cross_entropy(torch.func.functional_call(self.head, new, (torch.tanh(self.first(x)),)), label)


@structure({"tokens": TOKENS, "label": integers(high=4)})
class AdaptedWeights(nn.Module):
    """LoRA over a frozen model."""

    def __init__(self):
        super().__init__()
        self.embed, self.base = nn.Embedding(256, 16), nn.Linear(16, 16)
        self.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(4, 16) * 0.1), nn.Parameter(torch.randn(16, 4) * 0.1)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens, label):
        x = self.embed(tokens)
        x = torch.relu(self.base(x) + x @ self.down.T @ self.up.T)
        return F.cross_entropy(self.head(x.mean(1)), label)


@structure()
class HyperNetwork(nn.Module):
    """Weights of one layer made by another."""

    def __init__(self):
        super().__init__()
        self.make, self.head = nn.Linear(16, 64), nn.Linear(4, 4)

    def forward(self, x, label):
        weight = self.make(x).view(-1, 4, 16)
        return F.cross_entropy(self.head(torch.tanh(torch.bmm(weight, x[:, :, None]).squeeze(-1))), label)


@structure()
class LossTuple(_Two):
    """Returns the loss first, then logits."""

    def forward(self, x, label):
        logits = self.head(torch.tanh(self.first(x)))
        return F.cross_entropy(logits, label), logits


@structure()
class SeveralLosses(nn.Module):
    """Heads at several depths; weights of the losses are learned."""

    def __init__(self):
        super().__init__()
        self.layers, self.heads = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), nn.ModuleList(nn.Linear(16, 4) for _ in range(3))
        self.log_variance = nn.Parameter(torch.zeros(3))

    def forward(self, x, label):
        losses = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = torch.tanh(layer(x))
            losses.append(F.cross_entropy(head(x), label))
        return {"loss": (torch.stack(losses) * torch.exp(-self.log_variance) + self.log_variance).sum(), "parts": losses}


COLLECTIONS = [gradients, state, tensors, structure]
