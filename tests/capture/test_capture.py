"""Capture holds no weights, counts as torch does, and says where a model cannot be captured."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.capture.errors import CaptureError
from auto3d.capture.export import InputSpec, export
from auto3d.capture.specialize import specialize
from auto3d.partition.stage import cut
from auto3d.plan import stages_between
from auto3d.runtime.data import Batches
from auto3d.runtime.memory import PeakMemory
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage import StageModule
from tests.models import MODELS, captured, exported


@pytest.mark.parametrize("model", ["gpt2", "bert", "llama", "vit", "t5", "residual"])
@pytest.mark.parametrize("micro_batch_size", [2, 3])
def test_flops_agree_with_torch(model, micro_batch_size):
    build, data = MODELS[model]
    batch = Batches(data, seed=1, global_batch=8, micro_batch_size=micro_batch_size).micro_batch(
        0, 0, tuple(data.inputs)
    )
    # Torch has no formula for the CPU's fused attention and counts it as nothing; the plain one has the same FLOPs.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        build()(**batch)
    graph = captured(model, micro_batch_size).graph
    assert sum(node.flops for node in graph.nodes) == counter.get_total_flops()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("micro_batch_size", [2, 3])
def test_saved_bytes_are_those_that_autograd_keeps(model, micro_batch_size):
    """Measured on the captured program: a model of transformers run by itself may leave out the attention mask."""
    build, data = MODELS[model]
    module = build()
    state = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    model_captured = captured(model, micro_batch_size)
    graph = model_captured.graph
    (stage,) = cut(graph, stages_between([0, len(graph.nodes)]))
    cpu = torch.device("cpu")
    randomness = Randomness(1, first_micro_batch=0, device=cpu)
    running = StageModule(
        stage,
        model_captured,
        {**model_captured.exported.constants, **state},
        loss_weight=1.0,
        randomness=randomness,
        device=cpu,
    )
    batches = Batches(data, seed=1, global_batch=8, micro_batch_size=micro_batch_size)
    batch = batches.micro_batch(0, 0, tuple(data.inputs))
    held = {tensor.untyped_storage()._cdata for tensor in state.values()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        running.forward(0, {}, batch)
    values = {value.name: value.bytes for node in graph.nodes for value in node.outputs}
    values |= {name: value.bytes for name, value in graph.inputs.items()}
    expected = sum(values[name] for name in {name for node in graph.nodes for name in node.saves})
    expected += sum(node.saved_bytes for node in graph.nodes)
    assert expected == pytest.approx(sum(storage.nbytes() for storage in saved.values()), rel=0.01, abs=128)


def test_parameters_are_those_of_the_model_and_tied_ones_appear_once():
    for model, (build, _) in MODELS.items():
        expected = {name: tuple(p.shape) for name, p in build().named_parameters()}
        assert {name: v.shape for name, v in captured(model, 2).graph.parameters.items()} == expected


def test_fingerprint_tells_models_apart_but_not_micro_batch_sizes():
    assert captured("gpt2", 1).graph.fingerprint == captured("gpt2", 4).graph.fingerprint
    fingerprints = {captured(model, 2).graph.fingerprint for model in MODELS}
    assert len(fingerprints) == len(MODELS)


class Repeats(nn.Module):
    """The same operations on the same parameters; ``times`` and ``scale`` are no more than arguments."""

    def __init__(self, times: int, scale: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.times, self.scale = times, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x[:, None].expand(-1, self.times, -1)) * self.scale).sum()


def test_fingerprint_tells_arguments_apart_and_is_the_same_in_another_process():
    def fingerprint(*arguments) -> str:
        return export(lambda: Repeats(*arguments), {"x": InputSpec(shape=(4,), dtype=torch.float32)}).fingerprint

    assert len({fingerprint(2), fingerprint(3), fingerprint(2, 2.0)}) == 3
    code = "from tests.models import captured; print(captured('t5', 2).graph.fingerprint)"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert other.stdout.strip() == captured("t5", 2).graph.fingerprint


def test_a_model_of_billions_is_captured_without_memory():
    config = GPT2Config(n_layer=12, n_embd=8192, n_head=64, n_positions=1024, use_cache=False)
    specs = {name: InputSpec(shape=(1024,), dtype=torch.int64) for name in ("input_ids", "labels")}
    memory = PeakMemory(torch.device("cpu"))
    graph = specialize(export(lambda: GPT2LMHeadModel(config), specs), 4).graph
    weights = sum(value.bytes for value in graph.parameters.values())
    assert weights > 35e9
    assert memory.bytes() < 1e9


def test_batch_statistics_stay_in_place_and_nothing_else():
    program = exported("residual").program
    written = [
        node.args[0].name
        for node in program.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    ]
    assert written == ["b_normal_num_batches_tracked"]
    assert "aten.relu.default" in {str(node.target) for node in program.nodes}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class WritesToView(Broken):
    def forward(self, x):
        hidden = self.layer(x)
        hidden.t().mul_(2)
        return hidden.sum()


class WritesToInput(Broken):
    def forward(self, x):
        x.mul_(2)
        return self.layer(x).sum()


class MixesPrecision(Broken):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.layer(x)
        return hidden.sum()


class KeepsTensor(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.arange(4.0)

    def forward(self, x):
        return self.layer(x + self.positions).sum()


class CannotBeBuilt(nn.Module):
    def __init__(self) -> None:
        raise ValueError("width must be a multiple of 3")


class HasNoLoss(Broken):
    def forward(self, x):
        return self.layer(x)


class FixesBatch(Broken):
    def forward(self, x):
        return self.layer(x.reshape(2, 4)).sum()


class LooksAtData(Broken):
    def forward(self, x):
        return self.layer(x).sum() if x.sum() > 0 else self.layer(-x).sum()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (WritesToView, ["mul_", "writes in place", "test_capture.py"]),
        (WritesToInput, ["mul_", "writes in place to a parameter, a buffer's part or an input", "test_capture.py"]),
        (MixesPrecision, ["autocast", "cannot be cut", "test_capture.py"]),
        (KeepsTensor, ["keeps the tensor positions", "register_buffer"]),
        (CannotBeBuilt, ["cannot be built: width must be a multiple of 3", "test_capture.py"]),
        (HasNoLoss, ["HasNoLoss returns no loss", "scalar"]),
        (FixesBatch, ["FixesBatch", "batch"]),
        (LooksAtData, ["LooksAtData cannot be captured", "test_capture.py"]),
    ],
)
def test_what_cannot_be_captured_is_refused_with_the_place(model, words):
    with pytest.raises(CaptureError) as caught:
        export(model, {"x": InputSpec(shape=(4,), dtype=torch.float32)})
    for word in words:
        assert word in str(caught.value)
