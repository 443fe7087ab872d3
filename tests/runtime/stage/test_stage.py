"""A single stage: what a split backward defers, and what recomputation keeps."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from auto3d.data import Batches
from auto3d.partition.merak import shard
from auto3d.partition.segment import segments
from auto3d.partition.stage import cut
from auto3d.plan import PlanError, stages_between
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.build import build_stage
from auto3d.runtime.stage.module import StageModule
from auto3d.runtime.stage.out_of_range import OutOfRangeError
from auto3d.runtime.stage.program import ProgramOfStage
from tests.models import MODELS, captured

CPU = torch.device("cpu")


def whole_model(model: str, **options: Any) -> tuple[StageModule, nn.Module, dict[str, torch.Tensor]]:
    """The model as one stage, the module with its state and zero gradients, and a batch."""
    build, data = MODELS[model]
    torch.manual_seed(1)
    module = build()
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    model_captured = captured(model, 2)
    (stage,) = cut(model_captured.graph, stages_between([0, len(model_captured.graph.nodes)]))
    running = build_stage(
        [ProgramOfStage(stage, model_captured)],
        {**model_captured.exported.constants, **dict(module.named_buffers()), **parameters},
        loss_weight=1.0,
        randomness=Randomness(1, first_micro_batch=0, micro_batches=1, device=CPU),
        **options,
    )
    running.weights.start({0: 0})
    batch = Batches(data, seed=1, global_batch=2, micro_batch_size=2).micro_batch(0, 0, tuple(data.inputs))
    return running, module, batch


@pytest.mark.parametrize("model", ["gpt2", "vit"])
def test_the_input_half_defers_weight_gradients_of_products_to_the_weight_half(model):
    running, module, batch = whole_model(model, split_backward=True)
    parameters = dict(module.named_parameters())
    running.forward(0, {}, batch)
    running.backward(0, {}, defer_weights=True)
    matrices = [name for name, p in parameters.items() if p.dim() > 1 and "embedding" not in name and "wpe" not in name]
    empty = [name for name in matrices if not parameters[name].grad.any()]
    assert len(empty) >= 0.9 * len(matrices) > 10
    running.backward_weight(0)
    assert all(parameters[name].grad.any() for name in matrices)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "input_ids",
            5000,
            r"^input_ids: found 5000 in sample 1; the model takes whole numbers from 0 to \d+ at .*\.py",
        ),
        (
            "labels",
            -7,
            r"^labels: found -7 in sample 1; .* from 0 to \d+, and -100 for what is ignored, at .*\.py, line",
        ),
    ],
)
def test_a_whole_number_that_the_model_cannot_take_is_named_with_its_sample(name, value, line, recompute):
    running, _, batch = whole_model("gpt2", recompute=recompute)
    batch = {**batch, name: batch[name].clone()}
    batch["labels"][0] = -100
    batch[name][1, 3] = value
    with pytest.raises(OutOfRangeError, match=line):
        running.forward(0, {}, batch)


def test_a_stage_that_recomputes_keeps_nothing_of_its_forward():
    saved: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor

    running, _, batch = whole_model("gpt2-dropout", recompute=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        running.forward(0, {}, batch)
        assert not saved
        running.recompute(0)
        assert saved
        count = len(saved)
        running.backward(0, {})
        assert len(saved) == count, "the backward runs no forward once there was an R"


BOOKKEEPING = ("aten::detach", "aten::clone", "aten::copy_", "aten::mul.Tensor", "aten::add_.Tensor")


class _Calls(TorchDispatchMode):
    """Counts the operators that are executed."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.name() not in BOOKKEEPING:
            self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def calls() -> Iterator[Counter[str]]:
    with _Calls() as counting:
        yield counting.count


def calls_of(model: str, operations: list[str]) -> Counter[str]:
    """The operators that ``operations`` of the model run, found by interpreting its program node by node.

    Without those that no data enters, which a stage computes once and for all.
    """
    build, data = MODELS[model]
    module, exported = build(), captured(model, 2).exported
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters()), **exported.constants}
    tensors |= Batches(data, seed=1, global_batch=2, micro_batch_size=2).micro_batch(0, 0, tuple(data.inputs))
    program, names = exported.program, exported.parameters | exported.buffers
    counting = _Calls()
    fixed: set[fx.Node] = set()
    for node in program.nodes:
        if node.op == "call_function" and fixed.issuperset(node.all_input_nodes):
            fixed.add(node)

    class Interpreter(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            with counting if node.name in operations and node not in fixed else nullcontext():
                return super().run_node(node)

        def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
            return super().call_function(target, *tree_map_only(torch.device, lambda _: CPU, (args, kwargs)))

    arguments = [tensors[names.get(node.name, node.name)] for node in program.find_nodes(op="placeholder")]
    Interpreter(fx.GraphModule({}, program)).run(*arguments)
    return counting.count


def ranges(model: str) -> dict[str, list[tuple[int, int]]]:
    """What a single stage can keep of the model: its end, its beginning, a piece in between, every other subgraph."""
    bounds = shard(captured(model, 2).graph).bounds
    third, most = len(bounds) // 3, len(bounds) - 1
    return {
        "nothing": [],
        "the end": [(bounds[third], bounds[-1])],
        "the beginning": [(0, bounds[2 * third])],
        "a piece": [(bounds[third], bounds[2 * third])],
        "every other": [(bounds[i], bounds[i + 1]) for i in range(1, most, 2)],
        "all": [(0, bounds[-1])],
    }


@pytest.mark.parametrize("which", ["nothing", "the end", "the beginning", "a piece", "every other", "all"])
@pytest.mark.parametrize("model", ["gpt2-dropout", "bert", "residual", "averaging"])
def test_exactly_the_recomputed_operations_run_twice_and_gradients_are_identical(model, which):
    """With two micro-batches in flight, and even if the kept piece ends in the middle of the stage."""
    kept = ranges(model)[which]
    plain, expected_state, batch = whole_model(model)
    with calls() as once:
        plain.forward(0, {}, batch)
    plain.forward(1, {}, batch)
    plain.backward(0, {})
    plain.backward(1, {})
    for early in (True, False):
        running, state, batch = whole_model(model, recompute=True, kept=kept)
        with calls() as forward:
            running.forward(0, {}, batch)
        running.forward(1, {}, batch)
        assert forward == once
        graph = captured(model, 2).graph
        (stage,) = cut(graph, stages_between([0, len(graph.nodes)]))
        dropped = [name for segment in segments(graph, stage, kept) if not segment.kept for name in segment.nodes]
        expected = calls_of(model, dropped)
        if early:
            with calls() as again:
                running.recompute(0)
            assert again == expected
            running.recompute(1)
            with calls() as backward:
                running.backward(0, {})
            only_backward = backward
        else:
            with calls() as backward:
                running.backward(0, {})
            assert backward == only_backward + expected
        running.backward(1, {})
        assert running.losses == plain.losses
        assert_same_gradients(state, expected_state, identical=model == "gpt2-dropout")
        for (name, buffer), expected_buffer in zip(state.named_buffers(), expected_state.buffers(), strict=True):
            assert torch.equal(buffer, expected_buffer), f"{name} is written once"


def assert_same_gradients(found: nn.Module, expected: nn.Module, *, identical: bool) -> None:
    for (name, parameter), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        difference = (parameter.grad - other.grad).abs().max()
        assert difference <= 1e-6 * other.grad.abs().max(), name
        # The two uses of a tied parameter add to its gradient one after the other; one backward adds their sum.
        assert not identical or name == "transformer.wte.weight" or not difference, name


@pytest.mark.parametrize("which", ["nothing", "the end", "every other"])
def test_recomputation_and_a_split_backward_together(which):
    plain, expected, batch = whole_model("gpt2-dropout")
    running, state, _ = whole_model(
        "gpt2-dropout", recompute=True, kept=ranges("gpt2-dropout")[which], split_backward=True
    )
    for stage in (plain, running):
        stage.forward(0, {}, batch)
        stage.backward(0, {}, defer_weights=True)
        stage.backward_weight(0)
    assert_same_gradients(state, expected, identical=False)


def test_a_buffer_that_only_some_kept_operations_use_is_refused():
    graph = captured("averaging", 2).graph
    last = max(position for position, node in enumerate(graph.nodes) if "average" in node.state)
    with pytest.raises(PlanError, match="stage 0 keeps some of the operations on the buffer average"):
        whole_model("averaging", recompute=True, kept=[(last, len(graph.nodes))])
