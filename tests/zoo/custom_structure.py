"""Modules built in unusual ways: ties, containers, shared, compiled and scripted parts."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.zoo.entry import TEXT, TOKENS, Collection, integers
from tests.zoo.two_layers import TwoLayers

structure = Collection("own: structure")


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
class ScalarsAndEmpty(TwoLayers):
    """Parameters without dimensions and without elements."""

    def __init__(self):
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0))

    def between(self, x):
        return torch.tanh(x) * self.scale + self.empty.sum()


@structure()
class LazyLayers(nn.Module):
    """Lazy layers, which learn their sizes in the first forward."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.LazyLinear(16), nn.LazyLinear(4)

    def forward(self, x, label):
        return F.cross_entropy(self.head(torch.tanh(self.first(x))), label)


@structure()
class CompiledSubmodule(TwoLayers):
    def __init__(self):
        super().__init__()
        self.inner = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.GELU()), backend="eager")

    def between(self, x):
        return self.inner(x)


@structure()
class ScriptedSubmodule(TwoLayers):
    def __init__(self):
        super().__init__()
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))

    def between(self, x):
        return self.inner(x)


@structure()
class TracedFunction(TwoLayers):
    """A function of torch.jit.script in forward."""

    def between(self, x):
        return _scripted(x)


@torch.jit.script
def _scripted(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


@structure()
class FunctionalCall(TwoLayers):
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
class LossTuple(TwoLayers):
    """Returns the loss first, then logits."""

    def forward(self, x, label):
        logits = self.head(torch.tanh(self.first(x)))
        return F.cross_entropy(logits, label), logits


@structure()
class SeveralLosses(nn.Module):
    """Heads at several depths, with learned weights of their losses."""

    def __init__(self):
        super().__init__()
        self.layers, self.heads = (
            nn.ModuleList(nn.Linear(16, 16) for _ in range(3)),
            nn.ModuleList(nn.Linear(16, 4) for _ in range(3)),
        )
        self.log_variance = nn.Parameter(torch.zeros(3))

    def forward(self, x, label):
        losses = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = torch.tanh(layer(x))
            losses.append(F.cross_entropy(head(x), label))
        return {
            "loss": (torch.stack(losses) * torch.exp(-self.log_variance) + self.log_variance).sum(),
            "parts": losses,
        }
