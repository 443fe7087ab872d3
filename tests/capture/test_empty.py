"""Models are captured for the device that runs them, with the real values of tensors that they hold or make."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

from auto3d.capture.errors import CaptureError
from auto3d.capture.held import buffers_of, moved
from auto3d.capture.model import capture
from auto3d.capture.skeleton import skeleton
from tests.capture.one_stage import assert_equal_to_eager
from tests.capture.test_in_place import SPECS, WIDTH, Layers, X
from tests.models import MODELS, captured

TOKENS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {**SIZES, "vocab_size": 256, "use_cache": False}


def branches_on_device(self, x, h):
    return self.second(h) if h.device.type == "cpu" else self.first(h)


def makes_tensors(self, x, h):
    offset = torch.zeros(WIDTH) + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device=x.device)
    return self.second(h + offset) * torch.from_numpy(np.arange(WIDTH)).float() + torch.tensor(0.5)


def reads_values_without_data(self, x, h):
    mask = nn.Transformer.generate_square_subsequent_mask(WIDTH)
    mask[0] = 0
    if torch.equal(mask, torch.zeros(WIDTH, WIDTH)) or not mask.isinf().any():
        return h
    return self.second(h) * int(mask.isinf().sum()) + torch.arange(3.0).max().item()


def asks_whether_it_is_traced(self, x, h):
    return h if torch.compiler.is_compiling() or torch.compiler.is_exporting() else self.second(h)


def converts_without_a_change(self, x, h):
    return self.second.to(torch.float32).to("cpu")(h)


@pytest.mark.parametrize(
    "between",
    [
        branches_on_device,
        makes_tensors,
        reads_values_without_data,
        asks_whether_it_is_traced,
        converts_without_a_change,
    ],
    ids=lambda function: function.__name__,
)
def test_tensors_made_in_forward_and_branches_on_the_device(between):
    assert_equal_to_eager(type("Model", (Layers,), {"between": between}), X)


def test_the_program_does_not_depend_on_the_attention_kernel():
    """The results of two kernels have different memory layouts, so that contiguous() copies after only one of them."""
    build, data = MODELS["gpt2"]
    with sdpa_kernel(SDPBackend.MATH):
        other = capture(build, data.input_specs(), 2)
    assert other.graph.fingerprint == captured("gpt2", 2).graph.fingerprint


class Keeps(Layers):
    """Plain tensors in attributes and containers: drawn at random, computed from a parameter, and written to."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.arange(float(WIDTH))
        self.many = [torch.full((WIDTH,), 2.0), {"three": torch.full((WIDTH,), 3.0)}, (torch.ones(WIDTH),)]
        self.noise = torch.randn(WIDTH)
        self.of_weight = self.first.weight.detach().abs().mean(0)
        self.count = torch.zeros(WIDTH)

    def between(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        self.count += 1
        h = h * self.positions + self.many[0] * self.many[1]["three"] + self.many[2][0]
        return self.second(h) + self.noise * self.of_weight + self.count


def test_plain_tensors_that_a_module_holds():
    assert_equal_to_eager(Keeps, X)


def test_plain_tensors_move_with_their_module():
    model = moved(Keeps(), torch.device("meta"))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *buffers_of(model).values()))


class ReadsValues(Layers):
    """A constructor that reads values of tensors, and a parametrization that reads those of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.second = nn.utils.parametrizations.orthogonal(self.second)

    def between(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.second(h) * self.rates[1]


def test_constructors_that_read_values():
    assert_equal_to_eager(ReadsValues, X)
    with_rates = type("Rates", (nn.Linear,), {"__init__": _linear_that_reads_a_value})
    assert skeleton(with_rates).model.weight.is_meta


class ReadsValuesAndHooks(ReadsValues):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient * 2)


def test_gradient_hooks_are_refused_also_where_a_constructor_reads_values():
    with pytest.raises(CaptureError, match=r"parameter first\.weight of ReadsValuesAndHooks has a gradient hook"):
        capture(ReadsValuesAndHooks, SPECS, 4)


def _linear_that_reads_a_value(self: nn.Linear) -> None:
    nn.Linear.__init__(self, 2, 2)
    torch.ones(()).item()


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_mixture_of_experts_with_its_auxiliary_loss(experts):
    def build() -> MixtralForCausalLM:
        config = MixtralConfig(num_key_value_heads=2, num_local_experts=8, output_router_logits=True, **TEXT)
        config._experts_implementation = experts
        return MixtralForCausalLM(config)

    graph = assert_equal_to_eager(build, {"input_ids": TOKENS, "labels": TOKENS}).graph
    visited = sum(n.flops for n in graph.nodes if "_mlp_experts" in n.name)
    tokens, experts_per_token, matrices = TOKENS.numel(), 2, 3
    assert visited == SIZES["num_hidden_layers"] * tokens * experts_per_token * matrices * 2 * 32 * 64


def test_value_heads_narrower_than_query_heads():
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    config = DeepseekV3Config(num_key_value_heads=2, n_group=1, topk_group=1, **latent, **experts, **TEXT)
    assert_equal_to_eager(lambda: DeepseekV3ForCausalLM(config), {"input_ids": TOKENS, "labels": TOKENS})


def test_an_initialisation_that_has_no_values_runs_once_for_equal_tensors(monkeypatch):
    ran: list[tuple[int, ...]] = []
    fill = torch.nn.init._no_grad_normal_

    def counted(tensor: torch.Tensor, *options: object) -> torch.Tensor:
        ran.append(tuple(tensor.shape))
        return fill(tensor, *options)

    monkeypatch.setattr(torch.nn.init, "_no_grad_normal_", counted)
    skeleton(lambda: nn.ModuleList([nn.Embedding(rows, 3) for rows in (4, 4, 5, 4)]))
    assert ran == [(4, 3), (5, 3)]


class KeepsParametersInLists(Layers):
    """Parameters that a list, a dict and an attribute have too, beside the module that registered them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.many = [self.scale, {"bias": self.second.bias}]
        self.__dict__["aside"] = self.first.weight

    def between(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.second(h) * self.many[0] + self.many[1]["bias"] + h @ self.aside


def test_registered_parameters_in_containers():
    graph = assert_equal_to_eager(KeepsParametersInLists, X).graph
    assert {"scale", "second.bias", "first.weight"} <= graph.trained


@torch.jit.script
def snake(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(x.shape[0], x.shape[1], -1)
    return (flat + (alpha + 1e-9).reciprocal() * torch.sin(alpha * flat).pow(2)).reshape(x.shape)


class Scripted(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((WIDTH, 1), 0.5))

    def between(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        first = snake(x, self.alpha)  # without a gradient for x, for which the compiler makes a version of its own
        for _ in range(3):
            h = snake(self.second(h), self.alpha)
        return first + h


def test_gradients_pass_through_functions_that_torch_compiled():
    assert {"first.weight", "alpha"} <= assert_equal_to_eager(Scripted, X).graph.trained
