"""Capture holds no weights, counts FLOPs and bytes as torch does, and names the line of a model that it refuses."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.capture.errors import CaptureError
from auto3d.capture.export import InputSpec
from auto3d.capture.interpolate import interpolate
from auto3d.capture.model import capture
from auto3d.data import Batches
from auto3d.partition.stage import cut
from auto3d.plan import stages_between
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.build import build_stage
from auto3d.runtime.stage.program import ProgramOfStage
from auto3d.runtime.watch.peak_memory import PeakMemory
from tests.models import KINDS, MODELS, OTHERS, captured
from tests.soak import soak


@pytest.mark.parametrize("model", ["gpt2", "bert", "llama", "vit", "t5", "residual"])
@pytest.mark.parametrize("micro_batch_size", [2, *soak(3)])
def test_flops_agree_with_torch(model, micro_batch_size):
    build, data = MODELS[model]
    batch = Batches(data, seed=1, global_batch=8, micro_batch_size=micro_batch_size).micro_batch(
        0, 0, tuple(data.inputs)
    )
    # Torch has no formula for the CPU's fused attention and counts it as zero; unfused attention has the same FLOPs.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        build()(**batch)
    graph = captured(model, micro_batch_size).graph
    assert sum(node.flops for node in graph.nodes) == counter.get_total_flops()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("micro_batch_size", [2, *soak(3)])
def test_saved_bytes_are_those_that_autograd_keeps(model, micro_batch_size):
    """Measured on the captured program, since models of transformers in eager mode may drop the attention mask."""
    build, data = MODELS[model]
    module = build()
    state = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    model_captured = captured(model, micro_batch_size)
    graph = model_captured.graph
    (stage,) = cut(graph, stages_between([0, len(graph.nodes)]))
    cpu = torch.device("cpu")
    randomness = Randomness(1, first_micro_batch=0, micro_batches=1, device=cpu)
    running = build_stage(
        [ProgramOfStage(stage, model_captured)],
        {**model_captured.exported.constants, **state},
        loss_weight=1.0,
        randomness=randomness,
    )
    batches = Batches(data, seed=1, global_batch=8, micro_batch_size=micro_batch_size)
    batch = batches.micro_batch(0, 0, tuple(data.inputs))
    saved: list[dict[int, torch.UntypedStorage]] = [{}, {}]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[micro_batch][storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for micro_batch in (0, 1):
            running.forward(micro_batch, {}, {name: value.clone() for name, value in batch.items()})
    per_micro_batch = saved[1].keys() - saved[0].keys()  # leaves out weights and values that are computed once
    values = {value.name: value.bytes for node in graph.nodes for value in node.outputs}
    values |= {name: value.bytes for name, value in graph.inputs.items()}
    expected = sum(values[name] for name in {name for node in graph.nodes for name in node.saves})
    expected += sum(node.saved_bytes for node in graph.nodes)
    assert expected == pytest.approx(sum(saved[1][key].nbytes() for key in per_micro_batch), rel=0.01, abs=128)


def test_parameters_are_those_of_the_model_and_tied_ones_appear_once():
    for model, (build, _) in MODELS.items():
        expected = {name: tuple(p.shape) for name, p in build().named_parameters()}
        assert {name: v.shape for name, v in captured(model, 2).graph.parameters.items()} == expected


OF_TWO_SIZES = tuple(model for model in KINDS if model != "swin")  # whose other sizes no other test of the suite has


@pytest.mark.parametrize("of_two_sizes", [OF_TWO_SIZES, *soak((tuple(MODELS),))], ids=len)
def test_fingerprint_tells_models_and_micro_batch_sizes_apart(of_two_sizes):
    cases = [*((model, 2) for model in MODELS), *((model, 3) for model in of_two_sizes)]
    assert len({captured(model, size).graph.fingerprint for model, size in cases}) == len(cases)


ROWS = {"x": InputSpec(shape=(4,), dtype=torch.float32)}


class Repeats(nn.Module):
    """The same operations on the same parameters for any ``times`` and ``scale``, which are only arguments."""

    def __init__(self, times: int, scale: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.times, self.scale = times, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x[:, None].expand(-1, self.times, -1)) * self.scale).sum()


@pytest.mark.soak
def test_fingerprint_tells_arguments_apart_and_is_the_same_in_another_process():
    def fingerprint(*arguments) -> str:
        return capture(lambda: Repeats(*arguments), ROWS, 2).graph.fingerprint

    assert len({fingerprint(2), fingerprint(3), fingerprint(2, 2.0)}) == 3
    code = "from tests.models import captured; print(captured('t5', 2).graph.fingerprint)"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert other.stdout.strip() == captured("t5", 2).graph.fingerprint


def test_a_model_of_billions_is_captured_without_memory():
    config = GPT2Config(n_layer=12, n_embd=8192, n_head=64, n_positions=1024, use_cache=False)
    specs = {name: InputSpec(shape=(1024,), dtype=torch.int64) for name in ("input_ids", "labels")}
    memory = PeakMemory(torch.device("cpu"))
    graph = capture(lambda: GPT2LMHeadModel(config), specs, 4).graph
    weights = sum(value.bytes for value in graph.parameters.values())
    assert weights > 35e9
    assert memory.bytes() < 1e9


def test_batch_statistics_stay_in_place_and_nothing_else():
    program = captured("residual", 2).exported.program
    written = [
        node.args[0].name
        for node in program.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    ]
    assert written == ["b_normal_num_batches_tracked"]
    assert "aten.relu.default" in {str(node.target) for node in program.nodes}


class DecidesByBatch(nn.Module):
    """A branch on the batch size, and a number that depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.more = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x).tanh() if x.shape[0] == 1 else self.more(x)
        return hidden.sum() / (x.shape[0] + 1)


@pytest.mark.parametrize(("size", "used"), [(1, "one"), (2, "more"), (5, "more")])
def test_branches_on_the_batch_size_are_captured(size, used):
    model = capture(DecidesByBatch, ROWS, 2).at(size)
    assert {name for node in model.graph.nodes for name in node.state} == {f"{used}.weight", f"{used}.bias"}
    module, x = DecidesByBatch(), torch.rand(size, 4)
    (stage,) = cut(model.graph, stages_between([0, len(model.graph.nodes)]))
    cpu = torch.device("cpu")
    randomness = Randomness(1, first_micro_batch=0, micro_batches=1, device=cpu)
    running = build_stage(
        [ProgramOfStage(stage, model)],
        dict(module.named_parameters()),
        loss_weight=1.0,
        randomness=randomness,
    )
    running.forward(0, {}, {"x": x})
    assert running.losses[0] == module(x)


@pytest.mark.parametrize("model", [*KINDS, *soak(*OTHERS)])
def test_micro_batch_sizes_differ_only_in_operations_on_inputs(model):
    sizes = [2, 3] if model in ("resnet", "residual", "averaging") else [1, 2, 3]  # these three need two samples
    first, *others = (captured(model, size).graph for size in sizes)
    assert all(first.same_operations(other) for other in others)


@pytest.mark.parametrize("model", [*KINDS, *soak(*OTHERS)])
def test_two_micro_batch_sizes_determine_a_third(model):
    interpolated = interpolate(captured(model, 2).graph, captured(model, 3).graph, 4)
    expected = captured(model, 4).graph
    assert replace(interpolated, fingerprint=expected.fingerprint) == expected


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class KeepsTensorElsewhere(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.settings = SimpleNamespace(positions=torch.arange(4.0))

    def forward(self, x):
        return self.layer(x + self.settings.positions).sum()


class KeepsView(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.rows = [self.layer.weight.detach()[1:]]

    def forward(self, x):
        return (self.layer(x) @ self.rows[0].T).sum()


class CannotBeBuilt(nn.Module):
    def __init__(self) -> None:
        raise ValueError("width must be a multiple of 3")


class HasNoLoss(Broken):
    def forward(self, x):
        return self.layer(x)


class FixesBatch(Broken):
    def forward(self, x):
        return self.layer(x.reshape(2, 4)).sum()


class SelectsByData(Broken):
    def forward(self, x):
        return self.layer(x)[x > 0].sum()


class LooksAtData(Broken):
    def forward(self, x):
        return self.layer(x).sum() if x.sum() > 0 else self.layer(-x).sum()


def _looks(x: torch.Tensor) -> torch.Tensor:
    return x if x.max() > 0 else -x


class CallsAHelperThatLooks(Broken):
    def forward(self, x):
        return _looks(self.layer(x)).sum()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (KeepsTensorElsewhere, ["it uses a tensor that no module holds as an attribute", "test_capture.py"]),
        (KeepsView, ["KeepsView uses rows.0 in its forward, a view of the parameter layer.weight"]),
        (CannotBeBuilt, ["cannot be built: width must be a multiple of 3", "test_capture.py"]),
        (HasNoLoss, ["HasNoLoss returns no loss", "scalar"]),
        (FixesBatch, ["FixesBatch cannot be captured at micro-batch size 3: shape '[2, 4]' is inv", "test_capture.py"]),
        (SelectsByData, ["a size or a number that depends on data", "test_capture.py", "torch.where"]),
        (LooksAtData, ["LooksAtData cannot be captured", "branches on the values of tensors", "test_capture.py"]),
        (CallsAHelperThatLooks, ["branches on the values of tensors", "line {helper}"]),
    ],
)
def test_a_refusal_names_the_cause_and_the_line(model, words, capfd):
    with pytest.raises(CaptureError) as caught:
        capture(model, ROWS, 3)
    message = str(caught.value)
    for word in words:
        assert word.format(helper=_looks.__code__.co_firstlineno + 1) in message
    assert "\n" not in message
    for jargon in ("guard", "FakeTensor", "file an issue", "aten", "u0"):
        assert jargon not in message
    assert capfd.readouterr() == ("", "")


def test_a_graph_names_each_operation_and_value_once():
    graph = captured("gpt2", 2).graph
    first, second, *others = graph.nodes
    with pytest.raises(ValueError, match=first.name):
        replace(graph, nodes=(first, replace(second, name=first.name), *others))
    with pytest.raises(ValueError, match=first.outputs[0].name):
        replace(graph, nodes=(first, replace(second, outputs=first.outputs), *others))
