"""The bytes that attention keeps for its backward on CPUs and GPUs, as they follow from the kernels' definitions."""

from functools import cache

import pytest
import torch

from auto3d.capture.describe import describe
from auto3d.capture.model import CapturedModel, capture
from auto3d.capture.operation_cost import OperationCosts
from tests.models import MODELS, captured

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
BATCH, HEADS, ROWS, HEAD = 2, 4, 33, 16
MATRIX = BATCH * HEADS * ROWS * ROWS


def kept_beside_arguments(device: str, dtype=torch.float32, *, heads=HEADS, head=HEAD, value_head=None, **arguments):
    """Bytes that autograd keeps in addition to the result and the arguments: query, key, value and the mask, if any."""

    def tensor(heads: int, head: int) -> torch.Tensor:
        return torch.empty(BATCH, heads, ROWS, head, dtype=dtype, device="meta", requires_grad=True)

    operands = tensor(HEADS, head), tensor(heads, head), tensor(heads, value_head or head)
    with torch.no_grad():
        result = torch.nn.functional.scaled_dot_product_attention(*operands, **arguments)
    cost = OperationCosts(device)(ATTENTION, operands, arguments, result)
    assert (cost.results[0].shape, cost.results[0].dtype) == (result.shape, dtype)
    return cost.saved_bytes


ROW_SUMS = 4 * BATCH * HEADS * ROWS
PADDED_ROW_SUMS = 4 * BATCH * HEADS * 64  # memory-efficient attention pads the rows to a multiple of 32
MASK = torch.empty(BATCH, 1, ROWS, ROWS, dtype=torch.bool, device="meta")
ADDED_MASK = BATCH * ROWS * 48  # elements; rows are padded to a multiple of 16

CASES = [  # device, dtype, arguments, bytes
    ("cpu", torch.float32, {}, ROW_SUMS),
    ("cuda", torch.float32, {}, PADDED_ROW_SUMS),
    ("cuda", torch.float32, {"is_causal": True, "scale": 0.5}, PADDED_ROW_SUMS),
    ("cuda", torch.float32, {"dropout_p": 0.1}, PADDED_ROW_SUMS),
    ("cuda", torch.float32, {"attn_mask": MASK}, PADDED_ROW_SUMS + 4 * ADDED_MASK),
    ("cuda", torch.float32, {"value_head": 8}, PADDED_ROW_SUMS),
    ("cuda", torch.bfloat16, {}, ROW_SUMS),
    ("cuda", torch.bfloat16, {"dropout_p": 0.1, "is_causal": True}, ROW_SUMS),
    ("cuda", torch.float16, {"heads": 2, "enable_gqa": True}, ROW_SUMS),
    ("cuda", torch.float16, {"attn_mask": MASK}, PADDED_ROW_SUMS + 2 * ADDED_MASK),
]


@pytest.mark.parametrize(("device", "dtype", "arguments", "expected"), CASES)
def test_fused_kernels_keep_a_number_for_each_row(device, dtype, arguments, expected):
    assert kept_beside_arguments(device, dtype, **arguments) == pytest.approx(expected, abs=32)


@pytest.mark.parametrize(
    ("device", "dtype", "arguments"),
    [
        ("cpu", torch.float32, {"dropout_p": 0.1}),
        ("cpu", torch.float32, {"value_head": 8}),
        ("cuda", torch.float64, {}),
        ("cuda", torch.float32, {"head": 18}),  # 18 is not a multiple of 4
        ("cuda", torch.float16, {"head": 12, "attn_mask": MASK}),  # 12 is not a multiple of 8
        ("cuda", torch.float32, {"heads": 2, "enable_gqa": True}),
    ],
)
def test_without_a_fitting_kernel_the_matrix_is_kept(device, dtype, arguments):
    assert kept_beside_arguments(device, dtype, **arguments) > MATRIX * dtype.itemsize


@cache
def gpt2_on(device: str) -> CapturedModel:
    build, data = MODELS["gpt2-dropout"]
    return captured("gpt2-dropout", 2) if device == "cpu" else capture(build, data.input_specs(), 2, device=device)


def test_a_capture_for_gpus_assumes_their_kernels():
    """Also if torch was built without CUDA. GPT-2's attention with dropout keeps its matrix only on a CPU."""
    saved = {}
    for device in ("cpu", "cuda"):
        graph = gpt2_on(device).graph
        (first, *_) = [node for node in graph.nodes if "scaled_dot_product_attention" in node.operator]
        saved[device] = first.saved_bytes
        heads, rows = next(value for value in first.outputs).shape[1:3]
    matrix, row_sums = 4 * 2 * heads * rows * rows, 4 * 2 * heads * (rows + -rows % 32)
    assert saved["cpu"] > matrix
    assert saved["cuda"] == pytest.approx(row_sums, abs=32)


def test_a_program_described_with_unfused_attention_keeps_the_matrix_and_its_fingerprint():
    """Whatever the device of the capture: it is another system whose costs are wanted."""
    models = [gpt2_on(device) for device in ("cpu", "cuda")]
    usual = [one.graph for one in models]
    cpu, cuda = (describe(one.exported, fused_attention=False) for one in models)
    assert [node.saved_bytes for node in cuda.nodes] == [node.saved_bytes for node in cpu.nodes]
    assert cuda.fingerprint == usual[1].fingerprint
    for node, before in zip(cuda.nodes, usual[1].nodes, strict=True):
        if "scaled_dot_product_attention" in node.operator:
            heads, rows = node.outputs[0].shape[1:3]
            assert node.saved_bytes > 4 * 2 * heads * rows * rows > before.saved_bytes
            assert node.flops == before.flops
    assert [describe(one.exported) for one in models] == usual
