"""A mask is dropped exactly where all its elements allow it, and attention gives the same result without it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from math import ceil, prod

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from auto3d.capture import export as exporting
from auto3d.capture import fixed_values, pointwise
from auto3d.capture.fixed_values import MOST_HELD, value_of
from auto3d.capture.masks import ATTENTION, MASK, leave_masks_to_kernel
from auto3d.capture.pointwise import (
    BLOCKS,
    STRIP_ELEMENTS,
    Pointwise,
    UndecidedError,
    aten,
    bounded,
    elements,
    is_false,
)
from tests.models import MODELS, SIZES
from tests.soak import soak

LENGTH = 6


class Attention(nn.Module):
    """Makes its mask without data."""

    def __init__(self, make_mask: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._make_mask = make_mask

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, key, self._make_mask(), scale=0.5)


class Given(nn.Module):
    def forward(self, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(value, value, value, mask)


def exported_attention(make_mask: Callable[[], torch.Tensor], *tensors: torch.Tensor) -> fx.GraphModule:
    return torch.export.export(Attention(make_mask), tensors, strict=False).graph_module


def decisions(program: fx.Graph) -> list[str]:
    """For each attention: "mask" if its mask stayed, else "causal" or "none"."""
    decided = []
    for attention in program.find_nodes(op="call_function", target=ATTENTION):
        if len(attention.args) > MASK and attention.args[MASK] is not None:
            decided.append("mask")
        else:
            decided.append("causal" if attention.kwargs.get("is_causal") else "none")
    return decided


def right_decision(mask: torch.Tensor, rows: int, columns: int) -> str:
    seen = mask.expand(torch.broadcast_shapes(mask.shape, (rows, columns)))
    if torch.equal(seen, torch.ones_like(seen).tril()):
        return "causal"
    return "none" if seen.all() else "mask"


def nodes_of(mask: fx.Node) -> list[fx.Node]:
    used, pending = set(), [mask]
    while pending:
        node = pending.pop()
        if node not in used:
            used.add(node)
            pending += node.all_input_nodes
    return [node for node in mask.graph.nodes if node in used]


def computed(mask: fx.Node) -> torch.Tensor:
    """The value of the mask, computed by running all operations that make it."""
    values = {}
    for node in nodes_of(mask):
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
        values[node] = node.target(*args, **kwargs)
    return values[mask]


@pytest.mark.parametrize(("distance", "is_causal"), [(LENGTH, True), (3, False)])
def test_a_mask_is_dropped_where_it_is_causal(distance, is_causal):
    def make_mask():
        position = torch.arange(LENGTH)
        before = position[:, None] - position
        return ((before >= 0) & (before < distance)).expand(2, 1, LENGTH, LENGTH)

    value = torch.randn(2, 3, LENGTH, 4, requires_grad=True)
    exported = exported_attention(make_mask, value, value)
    (expected,) = exported(value, value)
    (wanted,) = torch.autograd.grad(expected.square().sum(), value)
    leave_masks_to_kernel(exported.graph)
    exported.graph.eliminate_dead_code()
    exported.recompile()
    (result,) = exported(value, value)
    (gradient,) = torch.autograd.grad(result.square().sum(), value)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(gradient, wanted)
    (attention,) = exported.graph.find_nodes(op="call_function", target=ATTENTION)
    assert (attention.args[MASK] is None) == attention.kwargs.get("is_causal", False) == is_causal
    assert (sum(node.op == "call_function" for node in exported.graph.nodes) == 1) == is_causal, "what made it is gone"


def test_a_mask_that_depends_on_data_stays():
    arguments = (torch.randn(1, 1, LENGTH, 4), torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    exported = torch.export.export(Given(), arguments, strict=False).graph_module
    leave_masks_to_kernel(exported.graph)
    (attention,) = exported.graph.find_nodes(op="call_function", target=ATTENTION)
    assert attention.args[MASK] is not None


@pytest.mark.parametrize("shape", [(1, LENGTH), (LENGTH, 1), (2, 1, 1, LENGTH)])
def test_a_mask_of_one_row_or_column_is_compared_as_the_kernel_broadcasts_it(shape):
    """One row that sees only the first key is causal, but broadcast to more rows it hides keys that they must see."""

    def make_mask():
        return (torch.arange(prod(shape)) < 1).view(-1)[: prod(shape)].view(shape)

    def make_open():
        return torch.ones(shape, dtype=torch.bool)

    value = torch.randn(2, 3, LENGTH, 4)
    for make, wanted in ((make_mask, "mask"), (make_open, "none")):
        exported = exported_attention(make, value, value)
        leave_masks_to_kernel(exported.graph)
        assert decisions(exported.graph) == [wanted]


# Ways to write a mask for B samples, H heads, L queries and S keys. Each may be larger than the limit MOST_HELD.


def comparison(rows: torch.Tensor, columns: torch.Tensor, how: str) -> torch.Tensor:
    (length, keys) = rows.numel(), columns.numel()
    match how:
        case "le":
            return columns <= rows
        case "gt":
            return ~(columns > rows)
        case "distance":
            return (rows - columns) >= 0
        case "tril":
            return torch.ones(length, keys, dtype=torch.bool).tril()
        case "float tril":
            return torch.tril(torch.ones(1, length, keys)) > 0
        case "triu":
            return torch.triu(torch.ones(length, keys), diagonal=1) == 0
        case "triu of integers":
            return torch.triu(torch.full((length, keys), 1), 1).bool().logical_not()
        case "infinity":
            later = torch.full((length, keys), float("-inf")).triu(1)
            return later == torch.zeros(())
        case "nan":
            return torch.where(columns > rows, float("nan"), 0.0) <= 0
        case "one nan":  # not causal
            return ~(torch.where(columns == 1, float("nan"), columns.float()) > rows)
        case "truth of numbers":  # causal except for one row
            return (columns <= rows) & torch.logical_and(rows - 4, columns + 1)
        case "cumsum":
            return torch.ones(keys, dtype=torch.int64).cumsum(0) <= rows + 1
        case "indexed":
            table = torch.arange(max(length, keys)).expand(3, -1)
            sample = torch.arange(3)[:, None, None, None]
            return (table[sample, columns.view(1, 1, 1, -1)] <= table[sample, rows.view(1, 1, -1, 1)])[:1]
        case "transposed":
            return (columns.view(-1, 1) <= rows.view(1, -1)).transpose(0, 1)
        case "where":
            return torch.where(columns <= rows, 1.0, float("-inf")) > 0
        case "masked fill":
            return torch.zeros(length, keys).masked_fill(columns > rows, -1e9) == 0
        case "overflow":
            return (rows.to(torch.uint8) - columns.to(torch.uint8)) < 128
        case "overflow of a copy":
            return (rows - columns + 256).to(torch.uint8) < 128
        case "repeated":
            return (columns.repeat(2, 1, 1, 1) <= rows.repeat(2, 1, 1, 1))[1:]
        case "reversed":
            return (columns.flip(-1) <= rows).flip(-1)
        case "joined":
            return torch.cat([columns[:, :1] <= rows, columns[:, 1:] <= rows], 1)
        case "slice":
            return (torch.arange(keys + 2) <= torch.arange(length + 2)[:, None])[:length, :keys]
        case "select":
            return torch.stack([columns > rows, columns <= rows])[1]
    raise AssertionError(how)


HOW = (
    "le", "gt", "distance", "tril", "float tril", "triu", "triu of integers", "infinity", "nan", "cumsum", "indexed",
    "transposed", "where", "masked fill", "repeated", "reversed", "slice",
)  # fmt: skip
TRAPS = ("one nan", "truth of numbers", "overflow", "overflow of a copy", "joined", "select")


def further(rows: torch.Tensor, columns: torch.Tensor, kind: str, number: int, batch: int, heads: int) -> torch.Tensor:
    """A further condition on the visible keys; with a large ``number``, most conditions hide nothing."""
    sample, head = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(1, -1, 1, 1)
    match kind:
        case "window":
            return columns > rows - number
        case "distance":
            return (rows - columns).abs() < number
        case "chunks":
            return rows // number == columns // number
        case "documents":
            return torch.eq(*((torch.cumsum(p % number == 0, axis) for p, axis in ((rows, 0), (columns, 1)))))
        case "all but one":
            return (rows != number // 3) | (columns != number % 3)
        case "samples":
            return columns < number + sample
        case "one sample":
            return (sample != batch - 1) | (columns <= rows) | (columns != number)
        case "heads":
            return rows - columns < number - head
        case "padding":
            return columns < torch.full((batch,), number).view(-1, 1, 1, 1)
        case "diagonal":
            return (rows != columns) | (rows < number)
    raise AssertionError(kind)


FURTHER = (
    "window", "distance", "chunks", "documents", "all but one", "samples", "one sample", "heads", "padding", "diagonal",
)  # fmt: skip


@st.composite
def masks(draw):
    """Sizes (batch, heads, queries, keys) and code that makes a mask for them, mostly a causal or nearly causal one."""
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    length = draw(st.integers(1, 9))
    keys = draw(st.one_of(st.just(length), st.integers(1, 9)))
    how = draw(st.sampled_from(HOW + TRAPS))
    number = st.one_of(st.integers(1, 12), st.just(max(length, keys) + 2))
    others = draw(st.lists(st.tuples(st.sampled_from(FURTHER), number, st.sampled_from("&&&|^")), max_size=2))
    prefix = draw(st.integers(0, 1)) * draw(st.integers(0, 3))
    finish = draw(st.sampled_from(["as it is", "expand", "view", "to", "write", "negated twice", "clone"]))

    def make_mask():
        rows, columns = torch.arange(length)[:, None], torch.arange(keys)[None]
        mask = comparison(rows, columns, how)
        for kind, size, junction in others:
            other = further(rows, columns, kind, size, batch, heads)
            mask = mask & other if junction == "&" else mask | other if junction == "|" else mask ^ other
        if prefix:
            mask = mask | (columns < prefix)
        match finish:
            case "expand":
                mask = mask.expand(batch, heads, length, keys)
            case "view":
                mask = mask.view(*(1,) * (4 - mask.dim()), *mask.shape)
            case "to":
                mask = mask.to(torch.float64).to(torch.bool)
            case "write":
                mask = mask.expand(batch, heads, length, keys).clone()
                mask = mask.slice_scatter(mask[:, :, :, :1] | True, 3, 0, 1)
            case "negated twice":
                mask = mask.logical_not().bitwise_not()
            case "clone":
                mask = mask.clone().contiguous()
        return mask

    return (batch, heads, length, keys), make_mask


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    masks(),
    st.sampled_from([MOST_HELD, 30, 12]),
    st.sampled_from([BLOCKS, 3, 2, 1]),
    st.sampled_from([STRIP_ELEMENTS, 400]),
)
def test_a_mask_is_dropped_exactly_where_all_its_elements_allow(mask, most_held, blocks, strip_elements):
    """At the real limits, and at limits so low that even these small masks become expressions in blocks."""
    (batch, heads, length, keys), make_mask = mask
    small_limits = (most_held, strip_elements) != (MOST_HELD, STRIP_ELEMENTS)
    query, key = torch.randn(batch, heads, length, 4), torch.randn(batch, heads, keys, 4)
    program = exported_attention(make_mask, query, key).graph
    value = make_mask()
    (attention,) = program.find_nodes(op="call_function", target=ATTENTION)
    with pytest.MonkeyPatch.context() as limits:
        limits.setattr(fixed_values, "MOST_HELD", most_held)
        limits.setattr(pointwise, "BLOCKS", blocks)
        limits.setattr(pointwise, "STRIP_ELEMENTS", strip_elements)
        try:
            actual = elements(value_of(nodes_of(attention.args[MASK]))).expand(value.shape)
        except UndecidedError:
            assert most_held != MOST_HELD, "so small a mask can be computed whole"
        else:
            assert torch.equal(actual, value)
        leave_masks_to_kernel(program)
    right = right_decision(value, length, keys)
    assert decisions(program)[0] == right or (decisions(program)[0] == "mask" and small_limits)


ANY = torch.tensor([0, 1, 2, -1, 3, 255, 5, -3, 100, 4])
NUMBERS = [  # compact tensors of ten rows and ten columns, and of two samples
    torch.arange(10).view(1, 10, 1),
    torch.arange(10).view(1, 1, 10),
    ANY.view(1, 1, 10),
    ANY.view(1, 10, 1).to(torch.uint8),
    torch.arange(10, dtype=torch.uint8).view(1, 1, 10),
    ANY.view(1, 10, 1) / 3,
    torch.where(ANY == 5, float("nan"), ANY / 7).view(1, 1, 10),
    torch.where(ANY == 3, float("inf"), ANY.float()).view(1, 10, 1),
    torch.arange(20).view(2, 1, 10),
    torch.tensor(2),
]
ORDERS = [aten.le, aten.lt, aten.ge, aten.gt, aten.eq, aten.ne]
JUNCTIONS = [aten.__and__, aten.__or__, aten.bitwise_and, aten.bitwise_or, aten.logical_and, aten.logical_or]
FILL = st.sampled_from([0, 1, 2, float("nan"), float("-inf"), 0.1])


@st.composite
def expressions(draw, depth: int, boolean: bool):
    def of_kind(boolean: bool):
        return draw(expressions(depth - 1, boolean))

    def call(target, *args):
        value = target(*(elements(argument) if isinstance(argument, Pointwise) else argument for argument in args))
        return Pointwise(target, args, {}, value.dtype)

    if boolean:
        kinds = ["order", "order", "number", "and", "truth", "not", "to", "not of numbers", "where"]
        match draw(st.sampled_from(kinds)) if depth else "order":
            case "order":
                return call(draw(st.sampled_from(ORDERS)).Tensor, of_kind(False), of_kind(False))
            case "number":
                return call(draw(st.sampled_from(ORDERS)).Scalar, of_kind(False), draw(FILL))
            case "and":
                junction = draw(st.sampled_from(JUNCTIONS))
                overload = "Tensor" if "Tensor" in junction.overloads() else "default"
                return call(getattr(junction, overload), of_kind(True), of_kind(True))
            case "truth":
                junction = draw(st.sampled_from([aten.logical_and, aten.logical_or]))
                return call(junction.default, of_kind(False), of_kind(False))
            case "not":
                return call(draw(st.sampled_from([aten.bitwise_not, aten.logical_not])).default, of_kind(True))
            case "to":
                return call(aten.to.dtype, of_kind(False), torch.bool)
            case "not of numbers":
                return call(aten.logical_not.default, of_kind(False))
            case "where":
                return call(aten.where.self, of_kind(True), of_kind(True), of_kind(True))
    match draw(st.sampled_from(["leaf", "add", "to", "where", "fill", "abs"])) if depth else "leaf":
        case "leaf":
            return draw(st.sampled_from(NUMBERS))
        case "add":
            return call(draw(st.sampled_from([aten.add, aten.sub])).Tensor, of_kind(False), of_kind(False))
        case "to":
            dtype = draw(st.sampled_from([torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16]))
            return call(aten.to.dtype, of_kind(draw(st.booleans())), dtype)
        case "where":
            return call(aten.where.self, of_kind(True), of_kind(False), of_kind(False))
        case "fill":
            numbers = call(aten.to.dtype, of_kind(False), torch.float32)
            return call(aten.masked_fill.Scalar, numbers, of_kind(True), draw(FILL))
        case "abs":
            return call(aten.abs.default, of_kind(False))


ROWS, COLUMNS, _, BYTES, COLUMN_BYTES, _, SOME_NAN, *_ = NUMBERS
DISTANCE = Pointwise(aten.sub.Tensor, (ROWS, COLUMNS), {}, torch.int64)
LATER = Pointwise(aten.gt.Tensor, (COLUMNS, ROWS), {}, torch.bool)
TRAPS_OF_BOUNDS = [
    Pointwise(
        aten.lt.Scalar, (Pointwise(aten.sub.Tensor, (BYTES, COLUMN_BYTES), {}, torch.uint8), 128), {}, torch.bool
    ),
    Pointwise(
        aten.lt.Scalar, (Pointwise(aten.to.dtype, (DISTANCE, torch.uint8), {}, torch.uint8), 128), {}, torch.bool
    ),
    Pointwise(aten.to.dtype, (DISTANCE, torch.bool), {}, torch.bool),
    Pointwise(aten.logical_and.default, (DISTANCE, ROWS), {}, torch.bool),
    Pointwise(aten.gt.Tensor, (SOME_NAN, ROWS), {}, torch.bool),
    Pointwise(
        aten.le.Scalar,
        (Pointwise(aten.masked_fill.Scalar, (ROWS.float(), LATER, float("nan")), {}, torch.float32), 9),
        {},
        torch.bool,
    ),
]


@pytest.mark.parametrize("expression", TRAPS_OF_BOUNDS)
@pytest.mark.parametrize("block", [3, 10])
def test_bounds_hold_in_spite_of_overflow_and_nan(expression, block):
    check_bounds(expression, block)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(expressions(2, True), st.sampled_from([1, 2, 3, 10]))
def test_bounds_hold_for_every_element(expression, block):
    """No bound is too narrow, with integers that overflow, nan, or mixed dtypes."""
    check_bounds(expression, block)


def check_bounds(expression: Pointwise, block: int) -> None:
    value = elements(expression).expand(2, 10, 10)
    blocks = ceil(10 / block)
    surely, possibly = (
        bound.expand(1, blocks, blocks).repeat_interleave(block, -2).repeat_interleave(block, -1)[:, :10, :10]
        for bound in bounded(expression, block)
    )
    assert not (surely & ~value).any()
    assert not (value & ~possibly).any()
    with pytest.MonkeyPatch.context() as limits:
        limits.setattr(pointwise, "BLOCKS", 10 // block)
        assert is_false(expression, 10, 10) == (not value.any())


@pytest.mark.parametrize("how", HOW)
def test_a_causal_mask_too_large_to_hold_is_known(how):
    """The mask is decided for every way to write it, at 2,048 positions and 64 samples."""
    length, batch = 2048, 64

    def make_mask():
        rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
        return comparison(rows, columns, how).expand(batch, 1, length, length)

    def make_nearly():
        rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
        return (comparison(rows, columns, how) & ((rows != 1234) | (columns != 777))).expand(batch, 1, length, length)

    query = torch.empty(batch, 1, length, 1, device="meta")
    for make, wanted in ((make_mask, "causal"), (make_nearly, "mask")):
        with torch.device("meta"):
            program = exported_attention(make, query, query).graph
        leave_masks_to_kernel(program)
        assert decisions(program) == [wanted]


def causal_model(name: str, **config: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        architecture = getattr(transformers, name)
        sizes = {"vocab_size": 256, "use_cache": False, "num_key_value_heads": 2, "pad_token_id": 0} | SIZES
        return architecture(architecture.config_class(**sizes | config))

    return build


WINDOW = {"sliding_window": 8, "head_dim": 16}
ZOO = {
    **{
        name: (MODELS[name][0], MODELS[name][1].input_specs())
        for name in ("gpt2-dropout", "bert", "llama", "t5", "vit", "swin")
    },
    **{
        name: (causal_model(name, **config), MODELS["llama"][1].input_specs())
        for name, config in {
            "MistralForCausalLM": WINDOW,
            "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            "Qwen3ForCausalLM": {},
            "Gemma2ForCausalLM": WINDOW,
            "Gemma3ForCausalLM": WINDOW | {"num_hidden_layers": 6},
            "Phi3ForCausalLM": WINDOW,
            "GPTNeoXForCausalLM": {},
            "OPTForCausalLM": {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
            "BloomForCausalLM": {"n_head": 2, "n_layer": 2},
            "StableLmForCausalLM": {},
            "CohereForCausalLM": {},
            "Llama4ForCausalLM": {
                "attention_chunk_size": 8, "head_dim": 16, "intermediate_size_mlp": 64, "num_local_experts": 2,
            },
        }.items()
    },
}  # fmt: skip


SET, LOW = "that are set", "so low that masks are not held"
KINDS_OF_MASKS = ("gpt2-dropout", "bert", "t5", "swin", "MistralForCausalLM", "BloomForCausalLM", "Llama4ForCausalLM")
MASKED = [
    *((model, SET) for model in (*KINDS_OF_MASKS, "Gemma3ForCausalLM")),
    *((model, LOW) for model in ("t5", "MistralForCausalLM", "Llama4ForCausalLM")),
]


@pytest.mark.parametrize(
    ("model", "limits"), [*MASKED, *soak(*(case for case in product(ZOO, (SET, LOW)) if case not in MASKED))]
)
def test_masks_of_models_are_dropped_where_their_elements_allow(model, limits, monkeypatch):
    right = []

    def leave_and_compare(program: fx.Graph) -> None:
        for attention in program.find_nodes(op="call_function", target=ATTENTION):
            mask = attention.args[MASK] if len(attention.args) > MASK else None
            rows, columns = (attention.args[operand].meta["val"].shape[-2] for operand in (0, 1))
            if mask is None:
                right.append("causal" if attention.kwargs.get("is_causal") else "none")
            elif mask.meta["val"].dtype is torch.bool and all(node.op == "call_function" for node in nodes_of(mask)):
                right.append(right_decision(computed(mask), rows, columns))
            else:
                right.append("mask")
        leave_masks_to_kernel(program)
        assert decisions(program) == right

    if limits == LOW:
        monkeypatch.setattr(fixed_values, "MOST_HELD", 100)
        monkeypatch.setattr(pointwise, "BLOCKS", 5)
    monkeypatch.setattr(exporting, "leave_masks_to_kernel", leave_and_compare)
    build, inputs = ZOO[model]
    exporting.export(build, inputs, 3)


LONG = """
import json, resource, time
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # fail instead of using all memory of the machine
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from auto3d.capture.export import InputSpec
from auto3d.capture.masks import ATTENTION
from auto3d.capture.model import capture
from auto3d.process_memory import status_bytes

LENGTH = 32768
SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 64, "use_cache": False, "max_position_embeddings": LENGTH}
TOKENS = InputSpec(shape=(LENGTH,), dtype=torch.int64)
builds = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "window": lambda: MistralForCausalLM(MistralConfig(sliding_window=4096, **SIZES)),
    "all but one": lambda: MistralForCausalLM(MistralConfig(sliding_window=LENGTH - 1, **SIZES)),
}
for name, build in builds.items():
    for micro_batch in (256, 1) if name == "llama" else (256,):
        program = capture(build, {"input_ids": TOKENS, "labels": TOKENS}, micro_batch).exported.program
        attentions = program.find_nodes(op="call_function", target=ATTENTION)
        causal = [attention.kwargs.get("is_causal") or True in attention.args[5:6] for attention in attentions]
        peak_bytes = status_bytes("VmHWM")
        print(json.dumps([name, micro_batch, causal, peak_bytes, time.process_time()]))
"""


@pytest.mark.soak
def test_long_sequences_are_captured_in_less_than_a_gigabyte_at_any_micro_batch_size():
    """Four captures at 32,768 positions, including imports, stay together within the limits of one."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LONG]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(name, size, all(causal)) for name, size, causal, _, _ in rows] == [
        ("llama", 256, True), ("llama", 1, True), ("window", 256, False),
        ("all but one", 256, False),
    ]  # fmt: skip
    assert rows[-1][3] < 10**9, "bytes at the peak"
    assert rows[-1][4] < 15, "seconds of processor time"
