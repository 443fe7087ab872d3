"""The fastest calls of a program's operators dispatch to the same operators, and give equal bits."""

from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from auto3d.partition.segment import segments
from auto3d.partition.stage import cut
from auto3d.plan import stages_between
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.fast_calls import FUNCTIONS, METHODS, SIZES, use_fast_calls
from auto3d.runtime.stage.program import segment_program
from auto3d.runtime.weights.low_precision import with_copies
from auto3d.runtime.weights.materialize import materialize
from tests.models import captured

aten = torch.ops.aten
CPU = torch.device("cpu")
X = (3, 4)  # the shape of a tensor
SAMPLES: dict[Any, tuple[tuple, dict]] = {  # operator -> arguments, in which a tuple of sizes stands for a tensor
    aten.add.Tensor: ((X, X), {"alpha": 2}),
    aten.sub.Tensor: ((X, 0.3), {}),
    aten.mul.Tensor: ((X, 0.3), {}),
    aten.div.Tensor: ((X, X), {}),
    aten.pow.Tensor_Scalar: ((X, 3.0), {}),
    aten.mean.dim: ((X, [-1], True), {"dtype": torch.float64}),
    aten.softmax.int: ((X, -1, torch.float32), {}),
    aten.mm.default: ((X, (4, 2)), {}),
    aten.bmm.default: (((2, 3, 4), (2, 4, 2)), {}),
    aten.addmm.default: (((2,), X, (4, 2)), {}),
    aten.matmul.default: (((2, 3, 4), (4, 2)), {}),
    aten.linear.default: (((2, 3, 4), (5, 4), (5,)), {}),
    aten.conv2d.default: (((2, 3, 5, 5), (4, 3, 3, 3), (4,), [2, 2], [1, 1]), {}),
    aten.batch_norm.default: (((5, 4), (4,), (4,), None, None, True, 0.1, 1e-5, False), {}),
    aten.layer_norm.default: ((X, [4], (4,), (4,), 1e-5, False), {}),
    aten.embedding.default: (((7, 4), torch.tensor([[1, 2], [0, 6]]), 2), {}),
    aten.cat.default: (([X, X], -1), {}),
    aten.gelu.default: ((X,), {"approximate": "tanh"}),
    aten.scaled_dot_product_attention.default: (
        ((2, 2, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4), None, 0.0, True),
        {"scale": 0.3},
    ),
    aten.view.default: ((X, [2, -1]), {}),
    aten.reshape.default: ((X, [2, -1]), {}),
    aten.permute.default: (((2, 3, 4), [2, 0, 1]), {}),
    aten.transpose.int: (((2, 3, 4), 1, 2), {}),
    aten.unsqueeze.default: ((X, -1), {}),
    aten.contiguous.default: ((X,), {"memory_format": torch.contiguous_format}),
    aten.to.dtype: ((X, torch.bfloat16), {}),
    aten._to_copy.default: ((X,), {"dtype": torch.bfloat16}),
}
SAMPLES |= {operator: ((X,), {}) for operator in FUNCTIONS if operator not in SAMPLES}


class Recorded(TorchDispatchMode):
    """Records the operators that run, those of the backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, int) for each in value)


def program_of(target: Any, args: tuple, kwargs: dict) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A program of one call, and its tensors."""
    graph, tensors = fx.Graph(), list[torch.Tensor]()

    def given(value: Any) -> Any:
        if isinstance(value, list) and value and is_shape(value[0]):
            return [given(each) for each in value]
        if not is_shape(value):
            return value
        tensors.append(torch.rand(value, generator=torch.Generator().manual_seed(len(tensors))).requires_grad_())
        node = graph.placeholder(f"value_{len(tensors)}")
        node.meta["val"] = tensors[-1]
        return node

    placed = tuple(given(each) for each in args)
    if isinstance(args[-1], torch.Tensor):
        placed = (*placed[:-1], args[-1])
    constant = {"indices": placed[1]} if len(placed) > 1 and isinstance(placed[1], torch.Tensor) else {}
    if constant:
        placed = (placed[0], graph.get_attr("indices"), *placed[2:])
    graph.output([graph.call_function(target, placed, kwargs)])
    return fx.GraphModule(constant, graph), tensors


def run(module: fx.GraphModule, arguments: list[torch.Tensor]) -> tuple[list[torch.Tensor | None], list[Any]]:
    """What ``module`` gives, the gradients of ``arguments``, and the operators that it ran."""
    learned = [each for each in arguments if each.requires_grad]
    with Recorded() as recorded:
        made = [each for each in module(*arguments) if each.requires_grad]
        gradients = torch.autograd.grad(made, learned, [torch.ones_like(each) for each in made], allow_unused=True)
    return [*made, *gradients], recorded.operators


def assert_same(found: tuple, expected: tuple) -> None:
    assert found[1] == expected[1]
    for mine, other in zip(found[0], expected[0], strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or (torch.equal(mine, other) and mine.stride() == other.stride())


@pytest.mark.parametrize("target", SAMPLES, ids=str)
def test_a_fast_call_runs_the_same_operators(target):
    args, kwargs = SAMPLES[target]
    module, tensors = program_of(target, args, kwargs)
    expected = run(module, tensors)
    assert any(node.target is target for node in module.graph.nodes)
    use_fast_calls(module)
    assert not any(node.target is target for node in module.graph.nodes)
    assert_same(run(module, tensors), expected)


@pytest.mark.parametrize("target", SAMPLES, ids=str)
def test_a_fast_call_takes_all_that_its_operator_takes_by_position(target):
    args, kwargs = SAMPLES[target]
    by_position = [each for each in target._schema.arguments if not each.kwarg_only]
    args = (*args, *(each.default_value for each in by_position[len(args) :]))
    module, tensors = program_of(target, args, kwargs)
    expected = run(module, tensors)
    assert_same(run(use_fast_calls(module), tensors), expected)


@pytest.mark.parametrize(("target", "shape"), [(SIZES[0], (1,)), (SIZES[1], (1, 1)), (SIZES[2], ())])
def test_a_fast_call_makes_a_tensor_without_dimensions(target, shape):
    module, tensors = program_of(target, (shape, []), {})
    expected = run(module, tensors)
    assert_same(run(use_fast_calls(module), tensors), expected)


def test_every_operator_of_the_tables_has_a_sample():
    assert {*FUNCTIONS, *METHODS} <= SAMPLES.keys()


def test_only_dropout_that_drops_something_stays():
    graph = fx.Graph()
    value = graph.placeholder("value")
    for rate, trains in ((0.0, True), (0.5, False), (0.5, True)):
        value = graph.call_function(aten.dropout.default, (value, rate, trains))
    graph.output(value)
    module = use_fast_calls(fx.GraphModule({}, graph))
    assert [node.args[1:] for node in module.graph.nodes if node.op == "call_function"] == [(0.5, True)]


@pytest.mark.parametrize(
    "model", ["gpt2", "t5", "swin", "llama", "residual", "averaging", "gpt2@bfloat16", "llama@bfloat16"]
)
def test_a_program_runs_the_same_operators(model):
    of = captured(model, 2)
    (stage,) = cut(of.graph, stages_between([0, len(of.graph.nodes)]))
    (segment,) = segments(of.graph, stage, [(0, len(of.graph.nodes))])
    drawn = materialize(of.exported.build, [n for n in stage.state if n not in of.exported.constants], seed=1)
    state = {**drawn, **of.exported.constants}
    for name in of.graph.trained:
        state[name].requires_grad_()
    batch = {
        name: torch.ones(value.shape, dtype=getattr(torch, value.dtype)) for name, value in of.graph.inputs.items()
    }
    results = []
    for change in (lambda module: module, use_fast_calls):
        randomness = Randomness(1, first_micro_batch=0, micro_batches=1, device=CPU)
        module, names, values = segment_program(segment, of, randomness=randomness)
        tensors = with_copies(state, of)
        written = {name: tensors[name].clone() for name in of.graph.written_buffers}
        arguments = [{**tensors, **written}[name] for name in names]
        results.append(run(change(module), [*arguments, *(batch[name] for name in values)]))
    assert_same(results[1], results[0])
