"""Operators without torch.autocast do what they do under it, on the CPU and on a GPU, which has other rules.

A GPU's tensors are fake here: what is compared are the operators that run, and the dtypes that they read and write.
"""

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from auto3d.capture.autocast import TO_COPY, Autocast, active
from auto3d.capture.regions import inline_regions

# Functions of x in float32 and h in low precision, both [4, 16], of v in float32, [16], and of y, four classes of 16. A
# GPU's fake tensors cannot be indexed by [] where torch has no CUDA.
OPERATORS = {
    "cross entropy": lambda x, h, v, y: nn.cross_entropy(h, y),
    "cross entropy, float32": lambda x, h, v, y: nn.cross_entropy(x, y),
    "cross entropy, smooth": lambda x, h, v, y: nn.cross_entropy(h, y, label_smoothing=0.1),
    "cross entropy, weights": lambda x, h, v, y: nn.cross_entropy(h, y, weight=v),
    "cross entropy, sum": lambda x, h, v, y: nn.cross_entropy(h, y, reduction="sum", ignore_index=3),
    "cross entropy, each": lambda x, h, v, y: nn.cross_entropy(h, y, reduction="none"),
    "cross entropy, probabilities": lambda x, h, v, y: nn.cross_entropy(h, nn.softmax(h, -1)),
    "cross entropy, images": lambda x, h, v, y: nn.cross_entropy(h.view(4, 4, 2, 2), y.view(4, 1, 1).expand(4, 2, 2)),
    "nll": lambda x, h, v, y: nn.nll_loss(nn.log_softmax(h, -1), y),
    "binary cross entropy": lambda x, h, v, y: nn.binary_cross_entropy_with_logits(h, torch.zeros_like(h)),
    "kl": lambda x, h, v, y: nn.kl_div(nn.log_softmax(h, -1), nn.softmax(h, -1), reduction="batchmean"),
    "mse": lambda x, h, v, y: nn.mse_loss(h, x),
    "smooth l1": lambda x, h, v, y: nn.smooth_l1_loss(h, torch.ones_like(h)),
    "cosine similarity": lambda x, h, v, y: nn.cosine_similarity(h, x),
    "triplet": lambda x, h, v, y: nn.triplet_margin_loss(h, h * 2, h * 3),
    "margin": lambda x, h, v, y: nn.multi_margin_loss(h, y),
    "normalize": lambda x, h, v, y: nn.normalize(h),
    "norm": lambda x, h, v, y: h.norm(dim=-1),
    "group norm": lambda x, h, v, y: nn.group_norm(h, 2, v, v),
    "instance norm": lambda x, h, v, y: nn.instance_norm(h.view(4, 2, 8)),
    "layer norm": lambda x, h, v, y: nn.layer_norm(h, (16,), v, v),
    "rms norm": lambda x, h, v, y: nn.rms_norm(h, (16,), v),
    "softmax": lambda x, h, v, y: nn.softmax(h, -1),
    "softplus": lambda x, h, v, y: nn.softplus(h),
    "gelu": lambda x, h, v, y: nn.gelu(h),
    "linear": lambda x, h, v, y: nn.linear(h, x, v.narrow(0, 0, 4)),
    "linear of itself": lambda x, h, v, y: nn.linear(x, x),
    "einsum": lambda x, h, v, y: torch.einsum("bi,cj->bcij", x, h).sum(),
    "baddbmm": lambda x, h, v, y: torch.baddbmm(h.unsqueeze(2), h.unsqueeze(2), x.narrow(1, 0, 1).unsqueeze(2)),
    "convolution": lambda x, h, v, y: nn.conv1d(h.unsqueeze(1), x.narrow(1, 0, 3).unsqueeze(1), v.narrow(0, 0, 4)),
    "prelu": lambda x, h, v, y: nn.prelu(h, v),
    "sum": lambda x, h, v, y: h.sum(),
    "sum, dim": lambda x, h, v, y: h.sum(-1, keepdim=True),
    "sum, dtype": lambda x, h, v, y: h.sum(dtype=torch.float64),
    "mean": lambda x, h, v, y: h.mean(),
    "cumsum": lambda x, h, v, y: h.cumsum(-1),
    "prod": lambda x, h, v, y: h.prod(-1),
    "std": lambda x, h, v, y: h.std(-1),
    "logsumexp": lambda x, h, v, y: h.logsumexp(-1),
    "pow": lambda x, h, v, y: h.pow(2),
    "addcdiv": lambda x, h, v, y: torch.addcdiv(h, h, x),
    "bilinear": lambda x, h, v, y: nn.bilinear(h, h, h.view(1, 4, 16).repeat(1, 4, 1)),
    "dot": lambda x, h, v, y: torch.dot(h.view(-1), h.view(-1)),
    "cross": lambda x, h, v, y: torch.cross(h.narrow(1, 0, 3), h.narrow(1, 3, 3), dim=-1),
    "cat": lambda x, h, v, y: torch.cat([h, x]),
    "stack": lambda x, h, v, y: torch.stack([h, x]),
    "index_put": lambda x, h, v, y: torch.index_put(torch.zeros_like(h), (y % 2,), h, accumulate=True),
    "scatter_add": lambda x, h, v, y: torch.zeros_like(h).scatter_add(0, y.view(4, 1).expand(4, 16) % 2, h),
    "attention": lambda x, h, v, y: nn.scaled_dot_product_attention(
        *(each.view(1, 4, 2, 8).transpose(1, 2) for each in (h, h, x))
    ),
}


class Ran(TorchDispatchMode):
    """The operators that run, with the dtypes of what they read and write, in which their casts show."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, list[torch.dtype], list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not TO_COPY and func.namespace != "prim":
            self.operators.append((str(func), dtypes(args), dtypes(result)))
        return result


def dtypes(values: Any) -> list[torch.dtype]:
    return [value.dtype for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_does_what_it_does_under_autocast(name, device):
    mode, precision = FakeTensorMode(), torch.bfloat16
    with mode:
        x, h = torch.empty(4, 16, device=device), torch.empty(4, 16, dtype=precision, device=device)
        values = x, h, torch.empty(16, device=device), torch.zeros(4, dtype=torch.long, device=device)
    with mode, torch.no_grad():
        with active(device, precision):
            program = make_fx(OPERATORS[name], pre_dispatch=True)(*values)  # the operators without their casts
            with Ran() as expected:
                result = OPERATORS[name](*values)
        inline_regions(program, mode, (), Autocast(device, precision))
        with Ran() as found:
            again = fx.Interpreter(program).run(*values)
    assert found.operators == expected.operators
    assert dtypes(again) == dtypes(result)
