"""A capture that copies repeated blocks gives the program of the capture that traces each of them."""

import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.fx import graph_module
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves

from auto3d.capture.describe import describe
from auto3d.capture.export import TRAINING, ExportedModel, InputSpec, Mode, export, export_with
from auto3d.capture.model import capture
from auto3d.errors import InputError
from auto3d.garbage import garbage_collection_paused
from tests.soak import soak
from tests.zoo import transformers_classes
from tests.zoo.__main__ import ENTRIES
from tests.zoo.transformers_classes import T5, TINY, VISION, build

LAYERS, WIDTH = 5, 8
SEQUENCES = {"x": InputSpec(shape=(4, WIDTH), dtype=torch.float32)}
TOKENS = {name: InputSpec(shape=(16,), dtype=torch.int64) for name in ("input_ids", "labels")}
PICTURES = {
    "pixel_values": InputSpec(shape=(3, 32, 32), dtype=torch.float32),
    "labels": InputSpec(shape=(), dtype=torch.int64),
}


@pytest.fixture(autouse=True)
def as_in_a_capture():
    """A capture pauses garbage collection; what other tests have hooked to it would run in the trace."""
    with garbage_collection_paused():
        yield


def written(exported: ExportedModel) -> list[tuple]:
    """The program with all that a user of it can see."""
    return [
        (
            node.op,
            node.name,
            str(node.target),
            str(node.args),
            str(node.kwargs),
            [
                (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device)
                if isinstance(value, torch.Tensor)
                else value
                for value in tree_leaves(node.meta.get("val"))
            ],
            list((node.meta.get("nn_module_stack") or {}).values()),
            node.meta.get("stack_trace"),
        )
        for node in exported.program.nodes
    ]


def state(exported: ExportedModel) -> tuple:
    return (
        exported.parameters,
        exported.trained,
        exported.buffers,
        exported.written_buffers,
        exported.loss,
        exported.outputs,
        exported.copies,
        list(exported.constants),
    )


def check(
    make: Callable[[], nn.Module],
    inputs: Mapping[str, InputSpec],
    *,
    precision: str = "float32",
    device: str = "cpu",
    mode: Mode = TRAINING,
) -> int:
    """Compare the two captures; returns the number of calls that were copied."""
    results: list[Any] = []
    for copy_repeats in (True, False):
        try:
            results.append(export_with(make, inputs, 2, device, precision, mode, copy_repeats=copy_repeats))
        except InputError as error:
            results.append(str(error))
    copied, traced = results
    if isinstance(copied, str) or isinstance(traced, str):
        assert copied == traced
        return 0
    assert traced.repeated_blocks == 0
    assert written(copied) == written(traced)
    assert state(copied) == state(traced)
    assert copied.fingerprint == traced.fingerprint
    assert describe(copied) == describe(traced)
    return copied.repeated_blocks


FAMILIES = {  # class -> (inputs, configuration, number of copied blocks)
    "GPT2LMHeadModel": (TOKENS, TINY, 3),
    "LlamaForCausalLM": (TOKENS, TINY, 3),
    "BertLMHeadModel": (TOKENS, TINY, 3),
    "T5ForConditionalGeneration": (TOKENS, {**T5, "num_layers": 4, "num_decoder_layers": 4}, 4),
    "ViTForImageClassification": (PICTURES, VISION, 3),
    "MixtralForCausalLM": (TOKENS, {**TINY, "num_local_experts": 4}, 3),
    "Gemma2ForCausalLM": (TOKENS, TINY, 2),  # every second layer has a sliding window
    "Gemma3ForCausalLM": (TOKENS, {**TINY, "sliding_window_pattern": 2}, 2),
    "AlbertForMaskedLM": (TOKENS, {**TINY, "embedding_size": 16}, 2),  # one module, called 4 times: known at the second
    "WhisperForAudioClassification": (
        {
            "input_features": InputSpec(shape=(80, 32), dtype=torch.float32),
            "labels": InputSpec(shape=(), dtype=torch.int64),
        },
        {
            "d_model": 32,
            "encoder_layers": 4,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "max_source_positions": 16,
        },
        3,
    ),
    "SwinForImageClassification": (
        PICTURES,
        {"image_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": [2, 4], "num_heads": [1, 2]},
        2,  # every second layer of a stage shifts its windows
    ),
    "ResNetForImageClassification": (PICTURES, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [4, 4]}, 5),
}


def of_family(name: str) -> tuple[Callable[[], nn.Module], Mapping[str, InputSpec], int]:
    inputs, config, copied = FAMILIES[name]
    return partial(build, name, {**config, "num_hidden_layers": 4}), inputs, copied


LONGER = ("Gemma2ForCausalLM", "SwinForImageClassification")  # a pattern of layers like that of another family


@pytest.mark.parametrize("name", [*(name for name in FAMILIES if name not in LONGER), *soak(*LONGER)])
def test_families(name):
    make, inputs, copied = of_family(name)
    assert check(make, inputs) == copied


@pytest.mark.parametrize("precision", ["bfloat16", *soak("float16")])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "AlbertForMaskedLM"])
def test_precision(name, precision):
    make, inputs, copied = of_family(name)
    assert check(make, inputs, precision=precision, device="cuda") == copied


def test_evaluation():
    make, inputs, copied = of_family("LlamaForCausalLM")
    assert check(make, inputs, mode=Mode(training=False, outputs=("logits",), loss=False)) == copied


def test_a_deep_model_traces_one_block():
    config = {**TINY, "num_hidden_layers": 8}
    assert check(partial(build, "GPT2LMHeadModel", config), TOKENS) == 7


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.inner(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(index) for index in range(LAYERS))
        self.seen: list[torch.Tensor] = []

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class BranchingParent(Stack):
    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x * 2 if index == 2 else x)
        return x.square().mean()


class DropPath(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.rate = 0.1 * (index // 3)

    def forward(self, x):
        return x + F.dropout(self.inner(x), self.rate, self.training)


class ReadsIndex(Block):
    def forward(self, x):
        return super().forward(x) / (self.index + 1)


class ReadsIndexIndirectly(Block):
    def forward(self, x):
        return super().forward(x) / (vars(self)["index"] + 1)


class AsksForAnAttribute(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        if index % 2:
            self.scale = 2.0

    def forward(self, x):
        return super().forward(x) * (3.0 if hasattr(self, "scale") else 1.0)


class Function(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale = lambda x: x * index

    def forward(self, x):
        return super().forward(self.scale(x))


class Settings(Block):
    """Equal settings in different objects."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.settings = {"power": 2, "names": ["tanh", torch.tanh]}

    def forward(self, x):
        return super().forward(x) ** self.settings["power"]


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            block.inner.weight = self.blocks[0].inner.weight


class TiedElsewhere(Stack):
    """The weight of one block is used by the model too, before the blocks and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.blocks[3].inner.weight

    def forward(self, x):
        return self.head(super().forward(self.head(x)).expand(1, WIDTH)).sum()


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class WithoutGradient(Stack):
    def forward(self, x):
        with torch.no_grad():
            for block in self.blocks[:2]:
                x = block(x)
        for block in self.blocks[2:]:
            x = block(x)
        return x.square().mean()


class Normalised(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(4)


class Counting(Stack):
    """Reads a buffer that its blocks write to."""

    def forward(self, x):
        loss = super().forward(x)
        return loss / self.blocks[2].norm.num_batches_tracked


class WritesArgument(Block):
    def forward(self, x):
        x[:, 0] = 0
        return super().forward(x)


class WritesResult(Stack):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x[:, 0] += 1
            x.mul_(2)
        return x.square().mean()


class Halves(Block):
    """Returns two views of one tensor and its argument."""

    def forward(self, x):
        first, second = self.inner(x).chunk(2, dim=-1)
        return {"halves": (first, [second, None]), "given": x, "number": 3}


class Joins(Stack):
    def forward(self, x):
        for block in self.blocks:
            made = block(x)
            first, (second, _) = made["halves"]
            x = torch.cat([second + 1, first], dim=-1) + made["given"] * made["number"]
        return x.square().mean()


class Collects(Block):
    """Appends to a list that it gets."""

    def forward(self, x, seen):
        seen.append(torch.tanh(x))
        return super().forward(x)


class GivesList(Stack):
    def forward(self, x):
        seen: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, seen)
        return torch.stack(seen).mean() + x.square().mean()


HIDDEN = threading.local()
LAYER: ContextVar[int] = ContextVar("layer", default=0)
GLOBAL = {"layer": 0}


class Hides(Block):
    def forward(self, x):
        HIDDEN.seen.append(torch.tanh(x))
        return super().forward(x)


class Finds(Stack):
    def forward(self, x):
        HIDDEN.seen = []
        loss = super().forward(x)
        return loss + torch.stack(HIDDEN.seen).mean()


class HidesInTorch(Block):
    def forward(self, x):
        torch.seen.append(torch.tanh(x))
        return super().forward(x)


class FindsInTorch(Stack):
    """Its blocks pass tensors on where no comparison of state looks."""

    def forward(self, x):
        torch.seen = []
        loss = super().forward(x) + torch.stack(torch.seen).mean()
        del torch.seen
        return loss


class Marks(Block):
    def forward(self, x):
        x.seen = torch.tanh(x)
        return super().forward(x)


class FindsMarks(Stack):
    def forward(self, x):
        seen = []
        for block in self.blocks:
            before, x = x, block(x)
            seen.append(before.seen)
        return torch.stack(seen).mean()


class ReadsContext(Block):
    def forward(self, x):
        return super().forward(x) * (LAYER.get() + 1)


class SetsContext(Stack):
    def forward(self, x):
        for index, block in enumerate(self.blocks):
            token = LAYER.set(index)
            x = block(x)
            LAYER.reset(token)
        return x.square().mean()


class ReadsGlobal(Block):
    def forward(self, x):
        return super().forward(x) * (GLOBAL["layer"] + 1)


class SetsGlobal(Stack):
    def forward(self, x):
        for index, block in enumerate(self.blocks):
            GLOBAL["layer"] = index
            x = block(x)
        GLOBAL["layer"] = 0
        return x.square().mean()


class ReadsObject(Block):
    def __init__(self, index: int, shared: Any) -> None:
        super().__init__(index)
        self.shared = shared

    def forward(self, x):
        return super().forward(x) * self.shared.scale


class SetsObject(Stack):
    """All blocks hold one object, which holds another number or another tensor for each block."""

    def __init__(self, *, tensor: bool) -> None:
        self_shared = SimpleNamespace(scale=1)
        super().__init__(lambda index: ReadsObject(index, self_shared))
        self.shared, self.tensor = self_shared, tensor

    def forward(self, x):
        start = x
        for index, block in enumerate(self.blocks):
            self.shared.scale = start + index if self.tensor else index + 2
            x = block(x)
        self.shared.scale = 1
        return x.square().mean()


class ReadsMask(Block):
    """Branches on the values of a mask, which is made of numbers in the code."""

    def forward(self, x, mask):
        return super().forward(x) * 2 if mask.any() else super().forward(x)


class Masks(Stack):
    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x, torch.arange(4) > index + 1)
        return x.square().mean()


class Constant(Block):
    def forward(self, x):
        return super().forward(x) * torch.tensor([1.0, 2.0] * (WIDTH // 2))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Custom(Block):
    def forward(self, x):
        return super().forward(Double.apply(x))


class Repeated(nn.Module):
    """Calls one module several times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(0)

    def forward(self, x):
        for _ in range(LAYERS):
            x = self.block(x)
        return x.square().mean()


class Hooked(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].inner.register_forward_hook(lambda module, args, result: result * 2)


class Uncast(Block):
    """A cast that changes nothing gives its argument, which the model uses after the block."""

    def forward(self, x, y):
        return super().forward(x.to(torch.float32)) + y.to(torch.float32)


class Casts(Stack):
    def forward(self, x):
        first, scale = x, torch.arange(WIDTH, dtype=torch.float32)
        for block in self.blocks:
            x = block(x, scale) + first * scale
        return x.square().mean()


class Attention(Block):
    """Parts of one kind inside of a block, and one part that all blocks share."""

    def __init__(self, index: int, shared: nn.Module) -> None:
        super().__init__(index)
        self.experts, self.shared = nn.ModuleList(Block(index) for index in range(3)), shared

    def forward(self, x):
        return super().forward(x) + sum(expert(self.shared(x)) for expert in self.experts)


class Sharing(Stack):
    def __init__(self) -> None:
        shared = Block(9)
        super().__init__(lambda index: Attention(index, shared))


class BranchesOnData(Stack):
    """Reads data after its blocks, unless it knows that it is traced."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if not torch.compiler.is_compiling() and x.isnan().any():
            raise ValueError
        return x.square().mean()


# The input of block 0 requires no gradient, so block 1 is traced too; blocks 2 to 4 can be copies.
HAND_WRITTEN: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (Stack, 3),
    "branching parent": (BranchingParent, 3),
    "drop path": (lambda: Stack(DropPath), 2),  # block 2 is like block 1, and block 4 like block 3
    "reads its index": (lambda: Stack(ReadsIndex), 0),
    "reads its index indirectly": (lambda: Stack(ReadsIndexIndirectly), 0),
    "asks for an attribute": (lambda: Stack(AsksForAnAttribute), 2),
    "function": (lambda: Stack(Function), 0),
    "settings": (lambda: Stack(Settings), 3),
    "tied": (Tied, 3),
    "tied elsewhere": (TiedElsewhere, 4),
    "frozen": (Frozen, 2),  # blocks 1 and 4
    "without gradient": (WithoutGradient, 1),
    "batch norm": (lambda: Stack(Normalised), 3),
    "Counting": (lambda: Counting(Normalised), 3),
    "writes its argument": (lambda: Stack(WritesArgument), 0),
    "writes a result": (WritesResult, 3),
    "halves": (lambda: Joins(Halves), 3),
    "collects": (lambda: GivesList(Collects), 0),
    "hides": (lambda: Finds(Hides), 0),
    "hides in torch": (lambda: FindsInTorch(HidesInTorch), 0),
    "marks": (lambda: FindsMarks(Marks), 0),
    "context": (lambda: SetsContext(ReadsContext), 0),
    "global": (lambda: SetsGlobal(ReadsGlobal), 0),
    "object": (lambda: SetsObject(tensor=False), 0),
    "object with a tensor": (lambda: SetsObject(tensor=True), 0),
    "mask": (lambda: Masks(ReadsMask), 0),
    "constant": (lambda: Stack(Constant), 0),
    "autograd function": (lambda: Stack(Custom), 0),
    "called again": (Repeated, 3),
    "hook": (Hooked, 2),
    "casts": (lambda: Casts(Uncast), 3),
    "parts": (Sharing, 3),
    "branches on data": (BranchesOnData, 3),
}


@pytest.mark.parametrize("precision", ["float32", *soak("bfloat16")])
@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_hand_written(name, precision):
    make, copied = HAND_WRITTEN[name]
    assert check(make, SEQUENCES, precision=precision) == copied


def test_a_failed_try_is_not_repeated_without_copies_where_a_function_may_have_misled_it():
    with patch.object(torch.export, "export", wraps=torch.export.export) as traced:
        exported = export(BranchesOnData, SEQUENCES, 2)
    assert traced.call_count == 2, "once as eager mode, and once with the truth"
    assert exported.repeated_blocks == 3


DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")


CHANGING = ("TracedFunction",)  # torch records a traced function in another way after its first call


@pytest.mark.soak
@pytest.mark.parametrize("entry", [each for each in ENTRIES if each.name not in CHANGING], ids=lambda entry: entry.name)
def test_zoo(entry, monkeypatch):
    def deeper(name: str, config: Mapping[str, Any]) -> nn.Module:
        try:
            return build(name, {key: 4 if key in DEPTHS and value == 2 else value for key, value in config.items()})
        except Exception:  # another key of the configuration lists the layers
            return build(name, config)

    monkeypatch.setattr(transformers_classes, "build", deeper)
    for precision in ("float32", "bfloat16"):
        check(entry.build, entry.data.input_specs(), precision=precision)


def test_a_capture_at_another_size_knows_what_the_first_found_out():
    first = capture(BranchesOnData, SEQUENCES, 2)
    with patch.object(torch.export, "export", wraps=torch.export.export) as traced:
        other = first.at(3)
    assert traced.call_count == 1
    assert other.graph.fingerprint == capture(BranchesOnData, SEQUENCES, 3).graph.fingerprint


def test_an_export_writes_only_its_result_as_code():
    with patch.object(graph_module, "_exec_with_source", wraps=graph_module._exec_with_source) as written:
        export(Stack, SEQUENCES, 2)
    assert written.call_count == 1
