"""Recurrent networks, attention and mixtures, as users write them."""

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.zoo.entry import FEATURES, SEQUENCES, TEXT, TOKENS, Collection, integers, normal

recurrent = Collection("own: recurrent")
attention = Collection("own: attention, mixtures")


@recurrent(SEQUENCES)
class HandWrittenLSTM(nn.Module):
    """The initial state is torch.zeros without a device."""

    def __init__(self):
        super().__init__()
        self.gates, self.head = nn.Linear(32, 64), nn.Linear(16, 4)

    def forward(self, x, label):
        h = torch.zeros(x.shape[0], 16)
        c = torch.zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            i, f, g, o = self.gates(torch.cat([x[:, t], h], dim=1)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return F.cross_entropy(self.head(h), label)


@recurrent(SEQUENCES)
class HandWrittenGRU(nn.Module):
    """Appends to a Python list and stacks it."""

    def __init__(self):
        super().__init__()
        self.update, self.reset, self.candidate = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x, label):
        h, states = x.new_zeros(x.size(0), 16), []
        for step in x.unbind(1):
            both = torch.cat([step, h], -1)
            z, r = self.update(both).sigmoid(), self.reset(both).sigmoid()
            h = (1 - z) * h + z * self.candidate(torch.cat([step, r * h], -1)).tanh()
            states.append(h)
        return F.cross_entropy(self.head(torch.stack(states, 1).mean(1)), label)


@recurrent(SEQUENCES)
class BidirectionalLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(16, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x, label):
        out, _ = self.inner(x)
        return F.cross_entropy(self.head(out[:, -1]), label)


@recurrent(SEQUENCES)
class StackedGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.GRU(16, 16, batch_first=True), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x, label):
        out, _ = self.first(x)
        _, last = self.second(out)
        return F.cross_entropy(self.head(last[-1]), label)


@recurrent(SEQUENCES)
class CellLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(16, 16), nn.Linear(16, 4)

    def forward(self, x, label):
        state = None
        for t in range(x.size(1)):
            state = self.cell(x[:, t], state)
        return F.cross_entropy(self.head(state[0]), label)


@recurrent(TEXT)
class ElmanRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(256, 16), nn.RNN(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, tokens, label):
        return F.cross_entropy(self.head(self.rnn(self.embed(tokens))[0].max(dim=1).values), label)


@recurrent({**SEQUENCES, "lengths": integers(high=8)})
class PackedLSTM(nn.Module):
    """Packs by the lengths of the data: its sizes depend on values."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x, lengths, label):
        packed = nn.utils.rnn.pack_padded_sequence(x, (lengths + 1).cpu(), batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return F.cross_entropy(self.head(h[-1]), label)


@recurrent(SEQUENCES)
class LinearRecurrence(nn.Module):
    """A diagonal state space model by a cumulative sum in the logarithm."""

    def __init__(self):
        super().__init__()
        self.decay, self.into, self.out = nn.Parameter(torch.rand(16)), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, label):
        log_decay = F.logsigmoid(self.decay).expand(x.shape[0], x.shape[1], 16)
        total = torch.cumsum(log_decay, dim=1)
        state = torch.cumsum(self.into(x) * torch.exp(-total), dim=1) * torch.exp(total)
        return F.cross_entropy(self.out(state[:, -1]), label)


class _Block(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


@attention(SEQUENCES)
class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(_Block() for _ in range(2)), nn.Linear(16, 4)

    def forward(self, x, label):
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean(1)), label)


@attention(SEQUENCES)
class AttentionWithWeights(nn.Module):
    """Asks for the weights, and masks with a triangle made in forward."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x, label):
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), diagonal=1)
        out, weights = self.attention(x, x, x, attn_mask=mask)
        return F.cross_entropy(self.head(out.mean(1)), label) + 0.1 * weights.pow(2).mean()


@attention(SEQUENCES)
class TransformerEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 4)

    def forward(self, x, label):
        return F.cross_entropy(self.head(self.encoder(x).mean(1)), label)


@attention({"source": normal(6, 16), "target": normal(5, 16)})
class Transformer(nn.Module):
    """torch.nn.Transformer with its causal mask."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        return F.mse_loss(self.inner(source, target, tgt_mask=mask), target)


@attention({"tokens": TOKENS, "labels": TOKENS})
class NanoGPT(nn.Module):
    """A mask as a buffer, tied weights by assignment, positions by torch.arange, initialised by apply."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, 16), nn.Embedding(16, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 256, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))
        self.apply(self._init)
        self.head.weight = self.tokens.weight

    def _init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens, labels):
        b, t = tokens.size()
        x = self.tokens(tokens) + self.positions(torch.arange(0, t, device=tokens.device))
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (part.view(b, t, 2, 8).transpose(1, 2) for part in qkv(x).split(16, dim=2))
            weights = (q @ k.transpose(-2, -1)) / math.sqrt(8)
            weights = weights.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")).softmax(-1)
            x = x + out((weights @ v).transpose(1, 2).contiguous().view(b, t, 16))
        return F.cross_entropy(self.head(x).view(-1, 256), labels.view(-1))


@attention({"tokens": TOKENS, "labels": TOKENS})
class RotaryLlama(nn.Module):
    """Rotary embeddings as complex numbers, kept as a plain attribute; grouped keys by repeat_interleave."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        angles = torch.outer(torch.arange(16).float(), 1.0 / (1e4 ** (torch.arange(0, 4, 2).float() / 4)))
        self.rotation = torch.polar(torch.ones_like(angles), angles)

    def rotate(self, x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.rotation[None, :, None]).flatten(3)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        q = self.rotate(self.q(x).unflatten(-1, (4, 4)))
        k, v = self.kv(x).unflatten(-1, (4, 4)).chunk(2, dim=2)
        k, v = (part.repeat_interleave(2, dim=2).transpose(1, 2) for part in (self.rotate(k), v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@attention(SEQUENCES)
class NarrowValues(nn.Module):
    """Attention with a value head narrower than the query head."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.head = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x, label):
        q, k = (layer(x).unflatten(-1, (2, 16)).transpose(1, 2) for layer in (self.q, self.k))
        v = self.v(x).unflatten(-1, (2, 4)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(out.mean(1)), label)


@attention({"tokens": TOKENS, "labels": TOKENS})
class AlibiAttention(nn.Module):
    """Slopes by torch.tensor in forward; einsum throughout."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(256, 16), nn.Linear(16, 48), nn.Linear(16, 256)

    def forward(self, tokens, labels):
        q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, 8)) for part in (q, k, v))
        slopes = torch.tensor([2 ** -(i + 1) for i in range(2)], device=q.device)
        positions = torch.arange(tokens.shape[1], device=q.device)
        bias = slopes[:, None, None] * (positions[None, :] - positions[:, None]).tril()
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5 + bias
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(*tokens.shape, 16)
        return F.cross_entropy(self.head(out).transpose(1, 2), labels)


@attention(SEQUENCES)
class MixtureByHand(nn.Module):
    """Every expert runs on every token; topk's result is normalised in place."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(16, 4, bias=False), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x, label):
        weights, chosen = torch.topk(self.gate(x).softmax(-1), 2, dim=-1)
        weights /= weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return F.cross_entropy(self.head((x + out).mean(1)), label)


@attention(SEQUENCES, only_refused="which tokens an expert sees is a size that depends on the data")
class MixtureByIndex(nn.Module):
    """Each expert runs on the tokens that chose it."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(16, 4), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, label):
        flat = x.reshape(-1, 16)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            out.index_add_(0, rows, expert(flat[rows]) * weight[rows, None])
        return F.cross_entropy(self.head(out.view_as(x).mean(1)), label)


@attention(SEQUENCES)
class BatchedExperts(nn.Module):
    """Experts as one three-dimensional weight, a capacity, one-hot dispatch by einsum, and an auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(16, 4), nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 32) * 0.1), nn.Parameter(torch.randn(4, 32, 16) * 0.1)

    def forward(self, x, label):
        flat = x.flatten(0, 1)
        probabilities = self.gate(flat).softmax(-1)
        weight, chosen = probabilities.max(-1)
        one_hot = F.one_hot(chosen, 4).to(x.dtype)
        place = (one_hot.cumsum(0) * one_hot).sum(-1).long() - 1
        dispatch = (
            one_hot[:, :, None] * F.one_hot(place.clamp(max=7), 8).to(x.dtype)[:, None] * (place < 8)[:, None, None]
        )
        packed = torch.einsum("td,tec->ecd", flat, dispatch)
        out = torch.bmm(F.gelu(torch.bmm(packed, self.up)), self.down)
        mixed = torch.einsum("ecd,tec->td", out, dispatch * weight[:, None, None]).view_as(x)
        balance = 4 * (one_hot.mean(0) * probabilities.mean(0)).sum()
        return F.cross_entropy(self.head((x + mixed).mean(1)), label) + 0.01 * balance


@attention({"x": normal(16, 16), "label": integers(high=4)})
class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.channels = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x, label):
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = x + tokens(x.transpose(1, 2)).transpose(1, 2)
            x = x + channels(x)
        return F.cross_entropy(self.head(x.mean(dim=1)), label)


@attention(
    {"users": integers(high=50), "items": integers(5, high=50), "bag": integers(6, high=50), "label": integers()}
)
class Recommender(nn.Module):
    """Embedding bags and a factorisation machine."""

    def __init__(self):
        super().__init__()
        self.user, self.item, self.bag = nn.Embedding(50, 8), nn.Embedding(50, 8), nn.EmbeddingBag(50, 8, mode="mean")
        self.head = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, users, items, bag, label):
        fields = torch.cat([self.user(users)[:, None], self.item(items), self.bag(bag)[:, None]], dim=1)
        pairs = 0.5 * (fields.sum(1) ** 2 - (fields**2).sum(1)).sum(-1, keepdim=True)
        return F.cross_entropy(self.head(torch.cat([fields.mean(1), pairs], -1)), label)


@attention({"x": normal(6, 8), "edges": integers(2, 10, high=6), "label": integers(high=4)})
class GraphNetwork(nn.Module):
    """Messages along edges by gather and scatter_add."""

    def __init__(self):
        super().__init__()
        self.message, self.update, self.head = nn.Linear(16, 8), nn.GRUCell(8, 8), nn.Linear(8, 4)

    def forward(self, x, edges, label):
        for _ in range(2):
            source = x.gather(1, edges[:, 0, :, None].expand(-1, -1, 8))
            target = x.gather(1, edges[:, 1, :, None].expand(-1, -1, 8))
            messages = F.relu(self.message(torch.cat([source, target], -1)))
            summed = torch.zeros_like(x).scatter_add(1, edges[:, 1, :, None].expand_as(messages), messages)
            x = self.update(summed.flatten(0, 1), x.flatten(0, 1)).view_as(x)
        return F.cross_entropy(self.head(x.sum(1)), label)


@attention(FEATURES)
class DeepEquilibrium(nn.Module):
    """A fixed number of iterations without gradients, then one with."""

    def __init__(self):
        super().__init__()
        self.into, self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, label):
        start = self.into(x)
        with torch.no_grad():
            z = torch.zeros_like(start)
            for _ in range(5):
                z = torch.tanh(0.5 * self.inner(z) + start)
        return F.cross_entropy(self.head(torch.tanh(0.5 * self.inner(z) + start)), label)


@attention(FEATURES, only_refused="how often the loop runs depends on the data")
class UntilConvergence(nn.Module):
    """Iterates until the change is small."""

    def __init__(self):
        super().__init__()
        self.into, self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, label):
        z = start = self.into(x)
        for _ in range(20):
            new = torch.tanh(0.1 * self.inner(z) + start)
            if (new - z).abs().max() < 1e-3:
                break
            z = new
        return F.cross_entropy(self.head(z), label)
