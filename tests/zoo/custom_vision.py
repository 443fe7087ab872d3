"""Convolutional networks and generative models, as users write them."""

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

from tests.zoo.entry import FEATURES, IMAGES, Collection, integers, normal

convolutions = Collection("own: convolutions")
generative = Collection("own: generative, contrastive")


@convolutions({"x": normal(3, 16, 16), "mask": integers(16, 16, high=3)})
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = self.block(3, 8), self.block(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge, self.head = self.block(16, 8), nn.Conv2d(8, 3, 1)

    @staticmethod
    def block(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

    def forward(self, x, mask):
        skip = self.down1(x)
        low = self.down2(F.max_pool2d(skip, 2))
        return F.cross_entropy(self.head(self.merge(torch.cat([self.up(low), skip], 1))), mask)


@convolutions({"x": normal(4, 64), "label": integers(high=4)})
class Conv1dNetwork(nn.Module):
    """Dilated causal convolutions, as in WaveNet."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(4 if i == 0 else 8, 16, 2, dilation=2**i) for i in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x, label):
        for i, layer in enumerate(self.layers):
            a, b = layer(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            x = torch.tanh(a) * torch.sigmoid(b)
        return F.cross_entropy(self.head(x.mean(-1)), label)


@convolutions({"x": normal(2, 8, 8, 8), "label": integers(high=4)})
class Conv3dNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 8, 3, stride=2)
        self.normal, self.head = nn.InstanceNorm3d(4, affine=True), nn.Linear(8, 4)

    def forward(self, x, label):
        x = F.avg_pool3d(F.relu(self.normal(self.first(x))), 2)
        return F.cross_entropy(self.head(self.second(x).mean((2, 3, 4))), label)


@convolutions(IMAGES)
class VGG(nn.Module):
    """In-place dropout on a fresh value and after a flatten."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((2, 2)),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Dropout(0.0, inplace=True),
            nn.Linear(32, 16),
            nn.ReLU(True),
            nn.Dropout(0.0, inplace=True),
            nn.Linear(16, 4),
        )

    def forward(self, x, label):
        x = self.features(x)
        x = torch.flatten(x, 1)
        return F.cross_entropy(self.classifier(x), label)


@convolutions(IMAGES, draws=True)
class DropoutInPlace(nn.Module):
    """Random in-place dropout on the result of a linear layer and on a view."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x, label):
        x = self.drop(self.second(self.first(x).mean((2, 3))))
        return F.cross_entropy(self.head(x), label)


@convolutions(IMAGES)
class InvertedResidual(nn.Module):
    """MobileNet's block: depthwise convolutions, hardswish in place, squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(3, 16, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish(inplace=True))
        self.depth = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6(True)
        )
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1))
        self.head = nn.Linear(16, 4)

    def forward(self, x, label):
        x = self.depth(self.expand(x))
        x = x * F.hardsigmoid(self.squeeze(x), inplace=True)
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


@convolutions(IMAGES)
class ResidualInPlace(nn.Module):
    """``out += identity`` and ``relu_``."""

    def __init__(self):
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8, 4)

    def forward(self, x, label):
        x = self.stem(x)
        identity = x
        out = self.two(F.relu_(self.norm(self.one(x))))
        out += identity
        out = out.relu_()
        return F.cross_entropy(self.head(out.mean((2, 3))), label)


@convolutions(IMAGES)
class DenseNetwork(nn.Module):
    """Concatenates all earlier features: skips over every cut."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(4))
        self.head = nn.Linear(19, 4)

    def forward(self, x, label):
        features = [x]
        for layer in self.layers:
            features.append(F.elu(layer(torch.cat(features, 1))))
        return F.cross_entropy(self.head(torch.cat(features, 1).amax((2, 3))), label)


@convolutions({"x": normal(3, 12, 12), "y": normal(3, 24, 24)})
class SuperResolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 5, padding=2), nn.Conv2d(8, 12, 3, padding=1)

    def forward(self, x, y):
        made = F.pixel_shuffle(self.second(F.prelu(self.first(x), torch.tensor([0.25]))), 2)
        return F.l1_loss(made + F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False), y)


@convolutions(IMAGES)
class SpatialTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.where, self.conv, self.head = nn.Linear(3 * 256, 6), nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
        self.where.weight.data.zero_()
        self.where.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))

    def forward(self, x, label):
        grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), list(x.size()), align_corners=False)
        x = self.conv(F.grid_sample(x, grid, align_corners=False))
        return F.cross_entropy(self.head(F.softplus(x).mean((2, 3))), label)


@convolutions({"x": normal(3, 16, 16), "boxes": normal(4), "label": integers(high=4)})
class SingleBoxDetector(nn.Module):
    """Regresses one box and its class: a focal loss and an IoU loss."""

    def __init__(self):
        super().__init__()
        self.conv, self.box, self.kind = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x, boxes, label):
        x = F.relu(self.conv(x)).mean((2, 3))
        kind = F.cross_entropy(self.kind(x), label, reduction="none")
        focal = ((1 - torch.exp(-kind)) ** 2 * kind).mean()
        a, b = self.box(x).sigmoid(), boxes.sigmoid()
        inside = torch.minimum(a[:, 2:], b[:, 2:]).prod(-1)
        iou = inside / (a[:, 2:].prod(-1) + b[:, 2:].prod(-1) - inside + 1e-6)
        return focal + (1 - iou).mean() + F.smooth_l1_loss(a[:, :2], b[:, :2])


@convolutions(IMAGES)
class NormedConvolutions(nn.Module):
    """Spectral norm, whose power iteration writes buffers, by parametrization."""

    def __init__(self):
        super().__init__()
        self.conv = parametrizations.spectral_norm(nn.Conv2d(3, 8, 3))
        self.head = parametrizations.spectral_norm(nn.Linear(8, 4))

    def forward(self, x, label):
        return F.cross_entropy(self.head(F.leaky_relu(self.conv(x), 0.2).mean((2, 3))), label)


@convolutions(FEATURES)
class WeightNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(16, 16))
        self.head = parametrizations.weight_norm(nn.Linear(16, 4))

    def forward(self, x, label):
        return F.cross_entropy(self.head(torch.tanh(self.first(x))), label)


@convolutions(FEATURES)
class Orthogonal(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = parametrizations.orthogonal(nn.Linear(16, 16)), nn.Linear(16, 4)

    def forward(self, x, label):
        return F.cross_entropy(self.head(torch.tanh(self.first(x))), label)


@convolutions(FEATURES)
class OldSpectralNorm(nn.Module):
    """torch.nn.utils.spectral_norm: a hook that sets the weight before each forward."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.utils.spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 4)

    def forward(self, x, label):
        return F.cross_entropy(self.head(torch.tanh(self.first(x))), label)


@generative({"x": normal(16)}, draws=True)
class VariationalAutoencoder(nn.Module):
    """Reparametrises by randn_like."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 16), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        return F.mse_loss(self.decode(z), x, reduction="sum") / x.size(0) + 0.1 * kl


@generative({"x": normal(16)}, draws=True)
class NormalDistribution(nn.Module):
    """Reparametrises by torch.distributions."""

    def __init__(self):
        super().__init__()
        self.mean, self.scale, self.decode = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x):
        posterior = torch.distributions.Normal(self.mean(x), F.softplus(self.scale(x)), validate_args=False)
        prior = torch.distributions.Normal(torch.zeros(8), torch.ones(8), validate_args=False)
        kl = torch.distributions.kl_divergence(posterior, prior).mean()
        return F.mse_loss(self.decode(posterior.rsample()), x) + 0.01 * kl


@generative({"x": normal(8)})
class AffineCouplings(nn.Module):
    """A RealNVP: its loss is a negative log-likelihood."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x):
        determinant = torch.zeros(x.size(0), device=x.device)
        for i, net in enumerate(self.nets):
            a, b = x.chunk(2, dim=1) if i % 2 == 0 else x.chunk(2, dim=1)[::-1]
            shift, scale = net(a).chunk(2, dim=1)
            scale = torch.tanh(scale)
            b = b * scale.exp() + shift
            determinant = determinant + scale.sum(1)
            x = torch.cat([a, b], 1)
        return (0.5 * (x**2).sum(1) + 4 * math.log(2 * math.pi) - determinant).mean()


@generative({"x": normal(4, 4)})
class InvertibleLinear(nn.Module):
    """Glow's 1 x 1 convolution: slogdet of a weight."""

    def __init__(self):
        super().__init__()
        self.mix, self.scale = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0]), nn.Parameter(torch.zeros(4))
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        z = (x * self.scale.exp()) @ self.mix
        z = z + self.last(z)
        return 0.5 * (z**2).sum((1, 2)).mean() - 4 * torch.slogdet(self.mix)[1] - 4 * self.scale.sum()


@generative({"noise": normal(8), "real": normal(16)})
class AdversarialLosses(nn.Module):
    """Generator and discriminator in one loss: the discriminator's side sees a detached sample."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, noise, real):
        fake = self.generator(noise)
        of_real, of_fake = self.discriminator(real), self.discriminator(fake.detach())
        loss = F.binary_cross_entropy_with_logits(of_real, torch.ones_like(of_real))
        loss = loss + F.binary_cross_entropy_with_logits(of_fake, torch.zeros_like(of_fake))
        return loss - 0.1 * F.logsigmoid(self.discriminator(fake)).mean()


@generative({"noise": normal(8), "real": normal(16)})
class GradientPenalty(nn.Module):
    """A second derivative inside the forward: torch.autograd.grad with create_graph."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, noise, real):
        fake = self.generator(noise)
        between = (0.5 * fake.detach() + 0.5 * real).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return self.critic(fake).mean() - self.critic(real).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()


@generative({"a": normal(16), "b": normal(16)})
class InfoNCE(nn.Module):
    """Two towers and a learned temperature: the loss mixes the samples of a micro-batch."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 8)
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, a, b):
        scores = F.normalize(self.left(a), dim=-1) @ F.normalize(self.right(b), dim=-1).T * self.temperature.exp()
        target = torch.arange(a.size(0), device=a.device)
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


@generative({"a": normal(16), "b": normal(16)})
class BarlowTwins(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.projector = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 8)

    def forward(self, a, b):
        a, b = self.projector(self.backbone(a)), self.projector(self.backbone(b))
        c = (a.T @ b) / a.size(0)
        on = torch.diagonal(c).add(-1).pow(2).sum()
        off = c.flatten()[:-1].view(7, 9)[:, 1:].flatten().pow(2).sum()
        return on + 0.005 * off


@generative({"anchor": normal(16), "positive": normal(16), "negative": normal(16)})
class SiameseTriplet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, anchor, positive, negative):
        return F.triplet_margin_loss(self.net(anchor), self.net(positive), self.net(negative))


@generative({"x": normal(2, 8), "t": integers(high=10), "noise": normal(2, 8)})
class Diffusion(nn.Module):
    """A schedule kept as a buffer and indexed by the data; the noise is an input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.1, 10), 0))
        self.time, self.net = nn.Embedding(10, 16), nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 16))

    def forward(self, x, t, noise):
        share = self.kept[t].view(-1, 1, 1)
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([noisy.flatten(1), self.time(t)], 1)), noise.flatten(1))


@generative({"x": normal(16)})
class VectorQuantised(nn.Module):
    """A straight-through estimator by detach, and a codebook loss."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode, self.codes = nn.Linear(16, 8), nn.Linear(8, 16), nn.Embedding(12, 8)

    def forward(self, x):
        z = self.encode(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        loss = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return F.mse_loss(self.decode(z + (code - z).detach()), x) + loss


@generative(FEATURES, draws=True)
class GumbelChoice(nn.Module):
    def __init__(self):
        super().__init__()
        self.choose, self.values, self.head = nn.Linear(16, 6), nn.Parameter(torch.randn(6, 16)), nn.Linear(16, 4)

    def forward(self, x, label):
        chosen = F.gumbel_softmax(self.choose(x), tau=1.0, hard=True)
        return F.cross_entropy(self.head(chosen @ self.values), label)


@generative({"state": normal(8), "action": integers(high=4), "reward": normal(), "next": normal(8)})
class QLearning(nn.Module):
    """A target network without gradients, and gather."""

    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.target = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())

    def forward(self, state, action, reward, next):
        value = self.online(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            wanted = reward + 0.9 * self.target(next).max(1).values
        return F.huber_loss(value, wanted)
