"""Modules whose tensors are more than activations: constants, in-place writes, complex and sparse values."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.zoo.entry import SEQUENCES, TEXT, Collection, integers, normal
from tests.zoo.two_layers import TwoLayers

tensors = Collection("own: tensors")


@tensors()
class PlainAttributes(TwoLayers):
    """Tensors kept as plain attributes, in a list and in a dict."""

    def __init__(self):
        super().__init__()
        self.scale, self.shifts = torch.linspace(0.5, 1.5, 16), [torch.ones(16), torch.arange(16) / 16]
        self.table = {"mask": (torch.arange(16) % 3 > 0).float()}

    def between(self, x):
        return torch.tanh(x * self.scale + self.shifts[0] * self.shifts[1]) * self.table["mask"]


@tensors()
class ConstantsInForward(TwoLayers):
    """torch.tensor, torch.zeros, full, eye, linspace and from_numpy in forward, most without a device."""

    def between(self, x):
        weights = torch.tensor([0.1 * i for i in range(16)])
        x = x * weights + torch.zeros(16) + torch.full((16,), 0.2) + torch.from_numpy(np.linspace(0, 1, 16)).float()
        return torch.tanh(x @ torch.eye(16) + torch.as_tensor(3.0) + torch.tensor(x.shape[-1], device=x.device) ** -0.5)


@tensors(of_whole_batch=True)
class ClassWeights(TwoLayers):
    """Loss modules with weights, label smoothing and an ignored index."""

    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(
            weight=torch.tensor([1.0, 2.0, 3.0, 0.5]), label_smoothing=0.1, ignore_index=3
        )

    def forward(self, x, label):
        return self.criterion(self.head(self.between(self.first(x))), label.clamp(max=2))


@tensors(SEQUENCES)
class WritesThroughViews(TwoLayers):
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
class WritesToResults(TwoLayers):
    """In place on results of topk, sort and max, which are not views."""

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
class WritesToPieces(TwoLayers):
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
class WriteSeenByAnother(TwoLayers):
    """A write that another view reads afterwards."""

    def forward(self, x, label):
        x = self.first(x).clone()
        view = x.view(-1, 16)
        x[:, 0].mul_(2)
        return F.cross_entropy(self.head(view.view_as(x).mean(1)), label)


@tensors({"x": normal(8, 16), "where": integers(8, high=8), "label": integers(high=4)})
class ScatterGather(TwoLayers):
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
class Fourier(TwoLayers):
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
class ComplexParameter(TwoLayers):
    """A parameter of complex numbers."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(16, dtype=torch.cfloat))

    def between(self, x):
        return (torch.complex(x, x.flip(-1)) * self.phase).abs()


@tensors()
class SparseProduct(TwoLayers):
    """An adjacency matrix as a sparse buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("graph", torch.eye(16).roll(1, 0).to_sparse())

    def between(self, x):
        return torch.tanh(torch.sparse.mm(self.graph, x.T).T)


@tensors()
class VectorMapped(TwoLayers):
    """torch.vmap over the samples."""

    def between(self, x):
        return torch.vmap(lambda row: torch.outer(row, row).tanh().sum(-1))(x)


@tensors(SEQUENCES)
class Products(TwoLayers):
    """einsum, bmm, tensordot, kron, matrix power, cdist, cumsum, cumprod, logsumexp, roll, unfold."""

    def forward(self, x, label):
        x = self.first(x)
        gram = torch.einsum("bid,bjd->bij", x, x).softmax(-1)
        y = torch.bmm(gram, x) + torch.tensordot(x, self.first.weight, dims=([2], [1]))
        y = y + torch.cdist(x, x).mean(-1, keepdim=True) + x.cumsum(1) * 0.1 + torch.roll(x, 1, 1)
        y = y + torch.matrix_power(gram, 2) @ x + x.unfold(1, 2, 1).sum(-1).mean(1, keepdim=True)
        return F.cross_entropy(self.head(torch.logsumexp(y, 1)), label) + torch.cumprod(gram, -1).mean()


@tensors()
class Autocast(TwoLayers):
    """A region of automatic mixed precision."""

    def forward(self, x, label):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.tanh(self.first(x))
        return F.cross_entropy(self.head(x.float()), label)


@tensors()
class AutocastOff(TwoLayers):
    """A region that keeps 32 bits, as around rotary embeddings in models of transformers."""

    def between(self, x):
        with torch.autocast(device_type=x.device.type, enabled=False):
            return torch.tanh(x.float())


@tensors(relative=1e-2)  # bfloat16 keeps 8 bits
class HalfPrecision(nn.Module):
    """A module in bfloat16 between two in 32 bits."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(16, 16), nn.Linear(16, 16).to(torch.bfloat16), nn.Linear(16, 4)

    def forward(self, x, label):
        x = self.middle(self.first(x).to(torch.bfloat16)).float()
        return F.cross_entropy(self.head(torch.tanh(x)), label)


@tensors()
class DoublePrecision(TwoLayers):
    def __init__(self):
        super().__init__()
        self.double()

    def forward(self, x, label):
        return super().forward(x.double(), label)


@tensors()
class LinearAlgebra(TwoLayers):
    """inverse, solve, cholesky, determinant."""

    def between(self, x):
        a = self.first.weight @ self.first.weight.T + torch.eye(16)
        chol = torch.linalg.cholesky(a)
        return torch.tanh(torch.linalg.solve(a, x.T).T + x @ torch.linalg.inv(chol) + torch.linalg.slogdet(a)[1])


@tensors(TEXT)
class PaddedText(nn.Module):
    """padding_idx, a mask from the tokens, a mean without padding, max_norm."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden = nn.Embedding(256, 16, padding_idx=0), nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens, label):
        mask = (tokens != 0).unsqueeze(-1)
        x = (self.embed(tokens) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return F.cross_entropy(self.head(torch.relu(self.hidden(x))), label)


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
